"""Ends in the way that ROLE_ENDS names, at once or (ROLE_ENDS_AFTER) some seconds after it was ready."""

import os
import sys
import time

from sapwood.srt.errors import ModelError
from sapwood.srt.lifeline import Lifeline
from sapwood.srt.orders import Boot


def main(boot: Boot, lifeline: Lifeline) -> None:
    if "ROLE_ENDS_AFTER" in os.environ:
        lifeline.ready()
        time.sleep(float(os.environ["ROLE_ENDS_AFTER"]))
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
