"""Tokenizer and grammar process as they are; the test plays the server and the scheduler."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sapwood.srt import config
from sapwood.srt.channel import Inbox, Outbox
from sapwood.srt.config import ModelSource
from sapwood.srt.errors import ProcessDied
from sapwood.srt.launch import Interrupted, Launcher
from sapwood.srt.lifeline import ROLES
from sapwood.srt.messages import Abort, Ended, Generate, IdsPrompt, Submit, pack
from sapwood.srt.params import Constraint, SamplingParams
from tests.process.test_grammar_compiler import GOOD, NASTY, ROLES as FOLDER, bad, lives, schema
from tests.tokenizer_kinds import END, byte_level

WAIT = 15.0


def source(folder: Path) -> ModelSource:
    path = folder / "tokenizer.json"
    byte_level().save(str(path))
    return ModelSource(
        name="small", format="dummy", path="", files=[], architecture="", config={},
        vocab_size=byte_level().get_vocab_size(), context_length=64,
        eos_ids=[byte_level().token_to_id(END)], tokenizer_file=str(path), template_vars={},
        chat_template=None, sampling_defaults={},
    )  # fmt: skip


class Bench:
    def __init__(self, folder: Path) -> None:
        roles = {"tokenizer": ROLES["tokenizer"], "grammar": "role_grammar"}
        self.launcher = Launcher(config.make(), source(folder), roles)
        self.launcher.prepare()
        self.server = Inbox(self.launcher.directory, "server")
        self.scheduler = Inbox(self.launcher.directory, "scheduler")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(FOLDER))
            self.launcher.start()
        self._outbox = Outbox(self.launcher.directory, "tokenizer")
        self._numbers = iter(range(10**6))

    def ask(self, constraint: Constraint | None) -> str:
        rid = f"r{next(self._numbers)}"
        message = Generate(rid, IdsPrompt(pack([5, 6])), SamplingParams(), constraint=constraint)
        assert self._outbox.send(message)
        return rid

    def abort(self, rid: str) -> None:
        assert self._outbox.send(Abort(rid))

    def submitted(self, count: int = 1, wait: float = WAIT) -> list[Submit]:
        return self._read(self.scheduler, Submit, count, wait)

    def ended(self, count: int = 1, wait: float = WAIT) -> list[Ended]:
        return self._read(self.server, Ended, count, wait)

    def _read(self, inbox: Inbox, kind: type, count: int, wait: float) -> list[Any]:
        got: list[Any] = []
        end = time.monotonic() + wait
        while len(got) < count:
            left = end - time.monotonic()
            assert left > 0, f"only {got}"
            got += [message for message in inbox.receive(left) if isinstance(message, kind)]
        return got

    def family(self) -> dict[str, psutil.Process]:
        """The processes by what they are."""
        found: dict[str, psutil.Process] = {}
        with contextlib.suppress(psutil.Error):
            for child in self.launcher._children:
                found[child.role] = psutil.Process(child.process.pid)
            for engine in found["grammar"].children():
                found["engine"] = engine
                for fork in engine.children():
                    found["fork"] = fork
        return found

    def a_fork(self) -> psutil.Process:
        end = time.monotonic() + WAIT
        while (fork := self.family().get("fork")) is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        return fork

    def close(self) -> None:
        self.launcher.close()
        for socket in (self.server, self.scheduler):
            socket.close()
        self._outbox.close()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    running = Bench(tmp_path_factory.mktemp("grammars"))
    yield running
    running.close()


def gone(process: psutil.Process, seconds: float = WAIT) -> bool:
    end = time.monotonic() + seconds
    while lives(process):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_a_request_comes_with_its_grammar(bench: Bench) -> None:
    rids = [bench.ask(schema(GOOD)), bench.ask(schema(GOOD)), bench.ask(None)]
    submits = {submit.rid: submit for submit in bench.submitted(3)}
    first, again, free = (submits[rid].grammar for rid in rids)
    assert first is not None
    assert first == again
    assert free is None


@pytest.mark.parametrize("what", NASTY)
def test_what_cannot_be_enforced_ends_its_request(bench: Bench, what: str) -> None:
    began = time.monotonic()
    rid = bench.ask(NASTY[what])
    (ended,) = bench.ended()
    assert ended.rid == rid
    assert ended.error is not None
    assert (ended.error.status, ended.error.param) == (400, NASTY[what].field)
    assert time.monotonic() - began < 3.0


def test_a_bomb_ends_in_time_and_holds_up_nobody(bench: Bench) -> None:
    began = time.monotonic()
    rid = bench.ask(bad("endless"))
    bench.a_fork()
    bench.ask(None)
    bench.ask(schema('{"type": "integer", "minimum": 5}'))
    bench.submitted(2)
    assert bench.family()["fork"].is_running()
    (ended,) = bench.ended()
    assert ended.rid == rid
    assert ended.error is not None
    assert ended.error.status in (400, 503)  # as busy as the machine is
    assert ended.error.param == "response_format"
    assert time.monotonic() - began < 3.0


def test_an_abort_ends_the_compiling(bench: Bench) -> None:
    rid = bench.ask(bad("endless", 1))
    fork = bench.a_fork()
    fork.suspend()  # so it keeps its priority, and no limit of its own ends it
    bench.abort(rid)
    (ended,) = bench.ended()
    assert (ended.rid, ended.error) == (rid, None)
    assert gone(fork, 1.0)


def test_a_killed_fork_or_engine_costs_its_request_alone(bench: Bench) -> None:
    for role in ("fork", "engine"):
        rid = bench.ask(bad("endless", len(role)))
        bench.a_fork()
        bench.family()[role].kill()
        (ended,) = bench.ended()
        assert ended.rid == rid
        assert ended.error is not None
        assert ended.error.status == 500
        bench.ask(schema(json.dumps({"const": role})))
        assert bench.submitted()[0].grammar is not None


def test_a_flood_of_different_ones(bench: Bench) -> None:
    rids = [bench.ask(schema(json.dumps({"enum": [f"w{i}", i]}))) for i in range(200)]
    submits = bench.submitted(200)
    assert sorted(submit.rid for submit in submits) == sorted(rids)
    assert len({submit.grammar.key for submit in submits if submit.grammar is not None}) == 200


def test_what_many_ask_for_is_compiled_once(bench: Bench) -> None:
    def used() -> float:
        return float(sum(bench.family()["engine"].cpu_times()[2:]))

    bench.ask(schema(json.dumps({"enum": [f"value {i}" for i in range(3000)]})))
    bench.submitted()
    eventually(lambda: "fork" not in bench.family())  # what it took is counted now
    before = used()
    for _ in range(100):
        bench.ask(schema(json.dumps({"enum": [f"value {i}" for i in range(3000)]})))
    assert len({submit.grammar.key for submit in bench.submitted(100) if submit.grammar is not None}) == 1
    assert used() - before < 0.05  # one alone takes more


@pytest.mark.parametrize("role", ["grammar", "launcher"])
def test_all_end_with_the_grammar_process(tmp_path: Path, role: str) -> None:
    bench = Bench(tmp_path)
    try:
        bench.ask(schema(GOOD))
        bench.submitted()
        bench.ask(bad("endless"))
        bench.a_fork()
        family = bench.family()
        if role == "grammar":
            family[role].kill()
            with pytest.raises(ProcessDied, match="grammar died"):
                watch(bench.launcher)
            assert gone(family["engine"])
            assert gone(family["fork"])
    finally:
        bench.close()
    assert all(gone(process) for process in family.values())


def watch(launcher: Launcher) -> None:
    limit = threading.Timer(WAIT, launcher.interrupt)
    limit.start()
    try:
        launcher.watch()
    except Interrupted:
        pytest.fail("the death was not seen")
    finally:
        limit.cancel()


def test_a_death_amid_many_leaves_none_behind(tmp_path: Path) -> None:
    """Whatever it was at: the launcher ends all at once."""
    bench = Bench(tmp_path)
    try:
        for number in range(40):
            bench.ask(bad("endless", number))
        bench.a_fork()
        family = bench.family()
    finally:
        began = time.monotonic()
        bench.close()
    assert time.monotonic() - began < 5.0
    assert all(gone(process) for process in family.values())


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_engine_is_ready_before_anybody_asks(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    try:
        eventually(lambda: "engine" in bench.family())
        eventually(lambda: bench.family()["engine"].memory_info().rss > 30 * 2**20)
    finally:
        bench.close()
