"""Is ready, then computes with the GIL held: no thread of it beats, listens or handles a signal."""

import ctypes
import time

from sapwood.srt.lifeline import Lifeline
from sapwood.srt.orders import Boot


def main(boot: Boot, lifeline: Lifeline) -> None:
    lifeline.ready()
    time.sleep(0.3)
    ctypes.PyDLL(None).sleep(600)
