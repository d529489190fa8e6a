"""Loads for ever."""

import time

from sapwood.srt.lifeline import Lifeline
from sapwood.srt.orders import Boot


def main(boot: Boot, lifeline: Lifeline) -> None:
    print(f"{boot.role} loads", flush=True)
    time.sleep(600)
