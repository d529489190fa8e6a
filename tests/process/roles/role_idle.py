"""Is ready, and waits."""

import time

from sapwood.srt.lifeline import Lifeline
from sapwood.srt.orders import Boot


def main(boot: Boot, lifeline: Lifeline) -> None:
    lifeline.ready({f"{boot.role} {boot.index}": "idle"}, 48 if boot.role == "scheduler" else 0)
    time.sleep(600)
