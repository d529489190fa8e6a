"""A worker's rank: some time after it was ready, rank 1 is killed, and rank 0 ends as it has lost it."""

import os
import signal
import time

from sapwood.srt.errors import RankLost
from sapwood.srt.lifeline import Lifeline
from sapwood.srt.orders import Boot


def main(boot: Boot, lifeline: Lifeline) -> None:
    lifeline.ready()
    time.sleep(1.5)
    if boot.rank == 0:
        raise RankLost("the ranks have lost each other")
    os.kill(os.getpid(), signal.SIGKILL)
