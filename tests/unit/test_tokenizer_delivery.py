"""Messages to a slow server: in order, bounded, and each request with exactly one end."""

from __future__ import annotations

from typing import Any

from sapwood.srt.messages import Answer, Chunk, Ended, Finish, Started, Stats, Verdict
from sapwood.srt.tokenizer.delivery import Delivery
from sapwood.srt.tokenizer.recent import Recent

STATS = Stats(*[0] * 12, 0.0)


class Server:
    """An outbox with room for so many frames."""

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.got: list[Any] = []

    def send(self, *batch: Any) -> bool:
        if self.room == 0:
            return False
        self.room -= 1
        self.got += batch
        return True


def chunk(rid: str, text: str = "x", finish: Finish | None = None) -> Chunk:
    return Chunk(rid, 0, text, b"\1\0\0\0", None, finish)


def test_what_has_no_room_waits_in_order() -> None:
    server = Server(1)
    delivery = Delivery(server)
    sent = [chunk("a", str(i)) for i in range(1000)]
    for message in sent:
        delivery.send([message])
    assert len(delivery) == 999
    server.room = 2
    delivery.retry()
    assert 0 < len(delivery) < 999
    server.room = 100
    delivery.send([Ended("a")])
    delivery.retry()
    assert server.got == [*sent, Ended("a")]
    assert len(delivery) == 0


def test_gauges_do_not_pile_up() -> None:
    delivery = Delivery(Server())
    for _ in range(10):
        delivery.send([STATS, chunk("a")])
    assert len(delivery) == 10


def test_an_overfull_backlog_gives_up_output_but_no_end() -> None:
    server = Server()
    delivery = Delivery(server, limit=10)
    started = Started("done", b"", Verdict(0, "cold"), 0.0)
    delivery.send([started, chunk("done", finish=Finish("stop")), Ended("done"), Ended("clean")])
    delivery.send([Answer(7, None, {})])
    assert not delivery.overfull
    for _ in range(10):
        delivery.send([chunk("live")])
    assert delivery.overfull
    assert delivery.shed() == ["live"]
    assert not delivery.overfull
    server.room = 10
    delivery.retry()
    done, clean, answer = server.got
    assert (done.rid, done.error.status, done.error.code) == ("done", 503, "queue_full")
    assert (clean, answer) == (Ended("clean"), Answer(7, None, {}))


def test_recent_names_are_forgotten_by_age_and_by_number() -> None:
    now = 0.0
    recent = Recent(5.0, 3, clock=lambda: now)
    for name in "abcd":
        recent.add(name)
    assert "a" not in recent
    assert all(name in recent for name in "bcd")
    assert recent.discard("c")
    assert not recent.discard("c")
    now = 4.0
    recent.add("b")
    now = 6.0
    assert "d" not in recent
    assert "b" in recent
    assert len(recent) == 1
