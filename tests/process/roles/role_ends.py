"""Ends in the way that ROLE_ENDS names: at once or, with ROLE_ENDS_READY, once it is ready and told to."""

import os
import sys
import time

from role_go import wait_for_go

from sapwood.srt.errors import ModelError
from sapwood.srt.lifeline import Lifeline
from sapwood.srt.orders import Boot


def main(boot: Boot, lifeline: Lifeline) -> None:
    if "ROLE_ENDS_READY" in os.environ:
        lifeline.ready()
        wait_for_go()
    match os.environ["ROLE_ENDS"]:
        case "refuse":
            raise ModelError("tensor layers.7.wq is missing from model.safetensors")
        case "raise":
            raise ZeroDivisionError("seven by nothing")
        case "return":
            return
        case "exit":
            sys.exit(7)
        case "leave a child":
            os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")
            time.sleep(600)
