"""Is ready, and once more after each new worker that it is told of (ROLE_SCHEDULER_WAITS seconds later)."""

import os
import time

from sapwood.srt.lifeline import Lifeline
from sapwood.srt.orders import Boot, Restart


def main(boot: Boot, lifeline: Lifeline) -> None:
    lifeline.ready({}, 48)
    while True:
        order = lifeline.commands.get()
        if isinstance(order, Restart):
            time.sleep(float(os.environ.get("ROLE_SCHEDULER_WAITS", "0")))
            lifeline.ready({}, 48 + order.index)
