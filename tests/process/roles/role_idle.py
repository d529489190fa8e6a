"""Is ready, and waits."""

import time

from sapwood.srt.lifeline import Lifeline
from sapwood.srt.orders import Boot


def main(boot: Boot, lifeline: Lifeline) -> None:
    facts = {f"{boot.role} {boot.index}": "idle"}
    if boot.role == "worker":
        lifeline.ready({**facts, "device": boot.config.device}, device="cuda")
    else:
        lifeline.ready(facts, 48 if boot.role == "scheduler" else 0)
    time.sleep(600)
