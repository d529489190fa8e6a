"""The listeners that a library keeps: strangers get no answer, friends go on."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from sapwood.srt.worker import listeners


def answers(listener: socket.socket) -> bool:
    address = listener.getsockname()[:2]
    try:
        socket.create_connection(address, timeout=0.2).close()
    except TimeoutError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_listener_is_shut_to_all_but_those_connected(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        spared = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with spared:
        before = listeners.listening()
        with (
            socket.create_server((host, 0), family=family) as shut,
            socket.create_connection(shut.getsockname()[:2]) as friend,
            shut.accept()[0] as own,
        ):
            opened = len(os.listdir("/proc/self/fd"))
            assert listeners.shut(but=before) == 1
            assert len(os.listdir("/proc/self/fd")) == opened
            assert not answers(shut)
            assert answers(spared)
            friend.sendall(b"still here")
            assert own.recv(10) == b"still here"


def test_without_proc_nothing_is_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_OPEN", "/is/not/there")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert listeners.shut() == 0
        assert answers(listener)
