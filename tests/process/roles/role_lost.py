"""A worker's rank: once it is ready and told to, rank 1 is killed, and rank 0 ends as it has lost it."""

import os
import signal

from role_go import wait_for_go

from sapwood.srt.errors import RankLost
from sapwood.srt.lifeline import Lifeline
from sapwood.srt.orders import Boot


def main(boot: Boot, lifeline: Lifeline) -> None:
    lifeline.ready()
    wait_for_go()
    if boot.rank == 0:
        raise RankLost("the ranks have lost each other")
    os.kill(os.getpid(), signal.SIGKILL)
