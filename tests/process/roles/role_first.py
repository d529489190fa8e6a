"""A worker that is ready; those after it refuse to start."""

import time

from sapwood.srt.errors import ModelError
from sapwood.srt.lifeline import Lifeline
from sapwood.srt.orders import Boot


def main(boot: Boot, lifeline: Lifeline) -> None:
    if boot.index:
        raise ModelError("tensor layers.7.wq is missing from model.safetensors")
    lifeline.ready()
    time.sleep(600)
