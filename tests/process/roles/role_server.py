"""A server of one line: once all are ready, tells each connection what it is told by the launcher.

ROLE_SERVER: "" ends as it should; "busy" drains for ever; "stubborn" does not end after a death either.
"""

import json
import os
import select
import socket
import time

import msgspec

from sapwood.srt.lifeline import Lifeline
from sapwood.srt.orders import Boot, Died, Drain


def main(boot: Boot, lifeline: Lifeline) -> None:
    manner = os.environ.get("ROLE_SERVER", "")
    listener = socket.socket(fileno=int(os.environ["SAPWOOD_LISTEN_FD"]))
    clients: list[socket.socket] = []

    def tell(what: object) -> None:
        for client in clients:
            line = {"told": type(what).__name__, **msgspec.structs.asdict(what)}  # type: ignore[type-var]
            client.sendall(json.dumps(line, default=str).encode() + b"\n")

    def orphaned() -> None:
        for client in clients:
            client.sendall(b'{"told": "orphaned"}\n')
            client.close()

    lifeline.on_orphan = orphaned
    lifeline.ready({"server": "one line"})
    last: object = None
    while True:
        while not lifeline.commands.empty():
            last = lifeline.commands.get()
            if isinstance(last, Drain):
                listener.close()  # before anybody hears of it
            tell(last)
            if isinstance(last, Drain):
                time.sleep(600 if manner == "busy" else 0.5)
                return
            if isinstance(last, Died) and manner != "stubborn":
                return
        if select.select([listener] if last else [], [], [], 0.02)[0]:
            clients.append(listener.accept()[0])
            tell(last)
