"""Constraints compiled in real processes: what is bad costs nothing but itself."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sapwood.srt import bounded
from sapwood.srt.errors import BadRequest
from sapwood.srt.grammar import compiler
from sapwood.srt.grammar.child import Outcome, Setup
from sapwood.srt.grammar.compiler import Compiler
from sapwood.srt.grammar.engine import Engine
from sapwood.srt.params import Constraint
from sapwood.srt.worker.grammars import Grammars
from tests.tokenizer_kinds import END, byte_level

WAIT = 60.0
ROLES = Path(__file__).parent / "roles"
GOOD = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


def regex(text: str) -> Constraint:
    return Constraint("regex", text, "regex")


def schema(text: str) -> Constraint:
    return Constraint("json_schema", text, "response_format")


def bad(what: str, number: int = 0) -> Constraint:
    """One that is bad in some way (see roles/child_with_bombs.py), unlike all of other numbers."""
    return schema(json.dumps({"bad": what, "number": number}))


class Bench:
    """A Compiler, and what has come of it."""

    def __init__(self, tokenizer: Path, lanes: int = 1, **limits: float) -> None:
        eos = byte_level().token_to_id(END)
        setup = Setup(str(tokenizer), byte_level().get_vocab_size(), [eos], **limits)  # type: ignore[arg-type]
        self.compiler = Compiler(setup, lanes)
        self.outcomes: dict[int, Outcome] = {}
        self.seconds: dict[int, float] = {}

    def look(self) -> None:
        for number, outcome, seconds in self.compiler.finished():
            assert number not in self.outcomes, "two answers"
            self.outcomes[number], self.seconds[number] = outcome, seconds

    def until(self, holds: Callable[[], bool], seconds: float = WAIT) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it does not come"
            self.look()
            time.sleep(0.005)

    def compile(self, constraint: Constraint, number: int = 0) -> Outcome:
        self.outcomes.pop(number, None)
        self.compiler.put(number, constraint)
        self.until(lambda: number in self.outcomes)
        return self.outcomes[number]

    def works(self) -> None:
        assert self.compile(schema(GOOD), 999).grammar is not None

    def refused(self, constraint: Constraint) -> str:
        """Why it is: the message of the 400."""
        error = self.compile(constraint).error
        assert error is not None
        assert (error.status, error.param) == (400, constraint.field)
        return error.message

    def engine(self) -> psutil.Process:
        process = self.compiler._process
        assert process is not None
        return psutil.Process(process.pid)

    def forks(self) -> list[psutil.Process]:
        return self.engine().children()

    def a_fork(self, computed: float = 0.05) -> psutil.Process:
        """One that has computed for so long."""

        def found() -> list[psutil.Process]:
            with contextlib.suppress(psutil.Error):
                return [fork for fork in self.forks() if sum(fork.cpu_times()[:2]) >= computed]
            return []

        self.until(lambda: bool(found()))
        return found()[0]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grammar") / "tokenizer.json"
    byte_level().save(str(path))
    return path


@pytest.fixture
def begin(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []
    monkeypatch.setenv("PYTHONPATH", str(ROLES))

    def start(child: str = "child_with_bombs", **options: float) -> Bench:
        monkeypatch.setattr(compiler, "CHILD", child)
        benches.append(Bench(tokenizer, **options))  # type: ignore[arg-type]
        return benches[-1]

    yield start
    for bench in benches:
        bench.compiler.close()


def test_a_grammar_is_text_and_its_key_is_its_own(begin: Callable[..., Bench]) -> None:
    bench = begin()
    first, again, other = (
        bench.compile(c, i) for i, c in enumerate([schema(GOOD), schema(GOOD), regex("ab")])
    )
    assert first.grammar is not None
    assert other.grammar is not None
    assert first == again
    assert first.grammar.key != other.grammar.key
    assert bench.forks() == []


def test_the_start_is_not_waited_for(begin: Callable[..., Bench]) -> None:
    bench = begin("child_never_ready")
    began = time.monotonic()
    bench.compiler.start()
    assert time.monotonic() - began < compiler.ANSWER_SECONDS
    bench = begin()
    bench.compiler.start()
    bench.works()


@pytest.mark.parametrize(
    ("what", "limits", "reason"),
    [
        ("endless", {"cpu_seconds": 0.3, "wall_seconds": 60.0}, "took more than 0.3 s of computing"),
        ("greedy", {"memory_bytes": 2**26}, "needs more than 64 MiB"),
        ("crash", {}, "needs more than 1024 MiB to be compiled, or is nested too deeply (SIGSEGV)"),
        ("deep", {}, "is nested too deeply"),
        ("long", {}, "makes a grammar of 4194305 characters, above the limit of 4194304"),
    ],
)
def test_a_limit_is_a_400_that_names_it(
    begin: Callable[..., Bench], what: str, limits: dict[str, float], reason: str
) -> None:
    bench = begin("child_at_par", **limits)
    bench.works()
    pid = bench.engine().pid
    for _ in range(2):
        assert reason in bench.refused(bad(what))
        bench.works()
    assert bench.engine().pid == pid
    assert bench.forks() == []


def test_the_limit_is_two_seconds(begin: Callable[..., Bench]) -> None:
    bench = begin("child_at_par", wall_seconds=60.0)
    bench.works()
    assert bench.refused(bad("endless"))
    assert 1.5 < bench.seconds[0] < 2.2


def test_whoever_asks_has_an_answer_in_time(begin: Callable[..., Bench]) -> None:
    bench = begin()
    bench.works()
    began = time.monotonic()
    assert (error := bench.compile(bad("endless")).error) is not None
    assert error.status in (400, 503)  # as busy as the machine is
    assert time.monotonic() - began < 3.0


def test_too_little_time_is_no_fault_of_the_constraint(begin: Callable[..., Bench]) -> None:
    bench = begin(cpu_seconds=60.0, wall_seconds=2.0)
    bench.works()
    assert (error := bench.compile(bad("endless")).error) is not None
    assert (error.status, error.param) == (503, "response_format")
    assert "was not compiled within 2 s" in error.message
    bench.works()


def stack_bytes() -> int:
    """Of this thread."""
    libc = ctypes.CDLL(None)
    attributes, size = ctypes.create_string_buffer(256), ctypes.c_size_t()
    assert libc.pthread_getattr_np(ctypes.c_ulong(threading.get_ident()), attributes) == 0
    assert libc.pthread_attr_getstacksize(attributes, ctypes.byref(size)) == 0
    return size.value


def test_what_compiles_first_has_least_stack(begin: Callable[..., Bench]) -> None:
    """So what is too deep ends a fork, and not the worker."""
    sizes: queue.SimpleQueue[int] = queue.SimpleQueue()

    def none() -> Engine:
        sizes.put(stack_bytes())
        raise BadRequest("no engine")

    Grammars(none).start()
    bench = begin(wall_seconds=60.0, cpu_seconds=60.0)
    bench.works()
    bench.compiler.put(0, bad("endless"))
    limit, _ = bench.a_fork().rlimit(psutil.RLIMIT_STACK)
    assert 0 < 3 * limit < sizes.get(timeout=WAIT)


def test_what_nobody_has_foreseen_is_logged(
    begin: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = begin()
    assert (error := bench.compile(bad("unforeseen")).error) is not None
    assert (error.status, error.message) == (500, "response_format could not be compiled (ZeroDivisionError)")
    assert "child_with_bombs" in caplog.text
    bench.works()


NESTED = 20_000
NASTY = {
    "brackets": regex("(" * NESTED + "a" + ")" * NESTED),
    "an open group": regex("(a"),
    "look-ahead": regex("(?=a)b"),
    "a backreference": regex(r"(a)\1"),
    "lists": schema("[" * NESTED + "]" * NESTED),
    "items": schema('{"items":' * 5000 + "true" + "}" * 5000),
    "no JSON": schema('{"type": '),
    "no schema": schema('"object"'),
    "a type that is none": schema('{"type": "spam"}'),
    "many members": schema(json.dumps({"enum": [f"m{i}" for i in range(6000)]})),
    "half a pair": schema('{"const": "\\ud800"}'),
    "half a pair in a name": schema('{"required": ["\\udfff"], "properties": {"\\udfff": {"type": "spam"}}}'),
    "half a pair in a pattern": schema('{"pattern": "\\ud800["}'),
    "a mapping of nothing": schema("false"),
}
PATTERNS = {f"p{i}": {"pattern": f"^(a|b)*a(a|b){{{i % 15}}}[^{i}]+y{i}"} for i in range(600)}
NULLS = [{"required": [f"p{i}"], "properties": {f"p{i}": {"type": "null"}}} for i in range(999)]
HEAVY = {
    "many patterns": schema(json.dumps({"properties": PATTERNS})),
    "a long repeat": regex("(a{1000}){65}"),
    "repeats of repeats": regex("((((((a{100}){100}){100}){100}){100}){100}){100}"),
    "alternatives": schema(json.dumps({"anyOf": NULLS})),
    "oneOf in oneOf": schema('{"oneOf":[{"required":["a"]},{"properties":{"b":' * 25 + "true" + "}}]}" * 25),
    "backtracking": regex("(x+x+)+y"),
    "a large automaton": regex("(a|b)*a(a|b){40}"),
    "its complement": schema('{"type":"string","not":{"pattern":"(a|b)*a(a|b){40}"}}'),
}


@pytest.mark.parametrize("what", NASTY)
def test_what_is_no_constraint_is_a_400(begin: Callable[..., Bench], what: str) -> None:
    bench = begin()
    began = time.monotonic()
    error = bench.compile(NASTY[what]).error
    assert error is not None
    assert error.param == NASTY[what].field
    assert error.status == 400
    assert time.monotonic() - began < 10.0
    bench.works()


@pytest.mark.parametrize("what", HEAVY)
def test_what_is_much_work_has_an_answer_in_time(begin: Callable[..., Bench], what: str) -> None:
    """A grammar, or that it is too much: at all, or at present."""
    bench = begin()
    bench.works()
    began = time.monotonic()
    outcome = bench.compile(HEAVY[what])
    assert time.monotonic() - began < 3.0
    assert outcome.grammar is not None or (outcome.error is not None and outcome.error.status in (400, 503))
    bench.works()


def test_a_fork_is_of_low_priority_after_a_while(begin: Callable[..., Bench]) -> None:
    bench = begin(wall_seconds=60.0, cpu_seconds=60.0)
    bench.works()
    bench.compiler.put(0, bad("endless"))
    fork = bench.a_fork()
    bench.until(lambda: os.sched_getscheduler(fork.pid) == os.SCHED_IDLE)
    assert Path(f"/proc/{fork.pid}/stat").read_text().rpartition(")")[2].split()[38] == str(os.SCHED_IDLE)
    assert os.sched_getscheduler(bench.engine().pid) == os.sched_getscheduler(0)
    bench.works()  # meanwhile, as ever
    assert 0 not in bench.outcomes


def test_what_is_quick_waits_for_nothing_slow(begin: Callable[..., Bench]) -> None:
    bench = begin("child_at_par", wall_seconds=600.0, cpu_seconds=600.0)
    bench.works()
    for number in range(4):
        bench.compiler.put(number, bad("endless"))
    for number in range(4, 8):
        bench.compiler.put(number, regex(f"a{{{number}}}"))
    bench.until(lambda: len(bench.outcomes) == 5)
    assert [n for n in bench.outcomes if n < 999] == [4, 5, 6, 7]
    assert all(bench.outcomes[n].grammar is not None for n in range(4, 8))


def test_only_so_many_slow_ones_wait(begin: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_SLOW", 1)
    # None ends before all have been found slow.
    bench = begin("child_at_par", wall_seconds=60.0, cpu_seconds=3.0)
    bench.works()
    for number in range(5):
        bench.compiler.put(number, bad("endless"))
    bench.until(lambda: len(bench.outcomes) == 6)
    errors = [error for n in range(5) if (error := bench.outcomes[n].error) is not None]
    assert sorted(error.status for error in errors) == [400, 400, 400, 429, 429]


def test_who_has_much_to_compile_is_in_nobodys_way(begin: Callable[..., Bench]) -> None:
    bench = begin()
    bench.works()
    for number in range(50):
        bench.compiler.put(number, regex(f"a{{{number}}}"), "many")
    bench.compiler.put(50, regex("b"), "one")
    bench.until(lambda: len(bench.outcomes) == 52)
    assert list(bench.outcomes)[:4] == [999, 0, 1, 50]


def test_who_has_most_slow_ones_gives_way(
    begin: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_SLOW", 2)
    bench = begin("child_at_par", wall_seconds=60.0, cpu_seconds=60.0)
    bench.works()
    for number in range(4):
        bench.compiler.put(number, bad("endless", number), "many")
    bench.compiler.put(4, bad("endless", 4), "one")
    bench.until(lambda: 2 in bench.outcomes)
    bench.compiler.put(5, regex("a"))  # for which number 3 makes room
    bench.until(lambda: len(bench.outcomes) == 4)
    errors = {n: outcome.error.status for n, outcome in bench.outcomes.items() if outcome.error is not None}
    assert errors == {2: 429, 3: 429}


def test_a_fork_that_is_killed_costs_one_request(begin: Callable[..., Bench]) -> None:
    bench = begin(wall_seconds=60.0, cpu_seconds=60.0)
    bench.works()
    pid = bench.engine().pid
    bench.compiler.put(0, bad("endless"))
    bench.a_fork().kill()
    bench.until(lambda: 0 in bench.outcomes)
    error = bench.outcomes[0].error
    assert error is not None
    assert error.status == 500
    bench.works()
    assert bench.engine().pid == pid


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_engine_that_is_killed_costs_what_it_was_at(begin: Callable[..., Bench]) -> None:
    bench = begin(wall_seconds=60.0, cpu_seconds=60.0)
    bench.works()
    bench.compiler.put(0, bad("endless"))
    fork, engine = bench.a_fork(), bench.engine()
    engine.kill()
    bench.compiler.put(1, schema(GOOD))
    bench.until(lambda: len(bench.outcomes) == 3)
    error = bench.outcomes[0].error
    assert error is not None
    assert error.status == 500
    assert bench.outcomes[1].grammar is not None
    assert bench.engine().pid != engine.pid
    bench.until(lambda: not lives(fork))


def test_an_engine_that_says_nothing_is_given_up(
    begin: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "ANSWER_SECONDS", 2.0)
    bench = begin(wall_seconds=2.0)
    bench.works()
    engine = bench.engine()
    engine.suspend()
    assert (error := bench.compile(schema(GOOD)).error) is not None
    assert error.status == 500
    assert not engine.is_running()
    bench.works()


def test_what_is_dropped_ends_at_once(begin: Callable[..., Bench]) -> None:
    bench = begin("child_at_par", wall_seconds=60.0, cpu_seconds=60.0)
    bench.works()
    for number in range(3):
        bench.compiler.put(number, bad("endless"))
    bench.a_fork()
    for number in range(3):
        bench.compiler.drop(number)
    bench.until(lambda: not bench.forks())
    bench.works()
    assert list(bench.outcomes) == [999]


def test_many_come_out_in_order(begin: Callable[..., Bench]) -> None:
    bench = begin()
    for number in range(200):
        bench.compiler.put(number, schema(json.dumps({"enum": [f"word {number}", number]})))
    bench.until(lambda: len(bench.outcomes) == 200)
    assert list(bench.outcomes) == list(range(200))
    texts = {outcome.grammar.text for outcome in bench.outcomes.values() if outcome.grammar is not None}
    assert len(texts) == 200


def test_a_tokenizer_that_is_none_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text('{"model": null}')
    bench = Bench(broken)
    for _ in range(2):
        assert (error := bench.compile(regex("a")).error) is not None
        assert error.status == 400
        assert "cannot be enforced with this model's tokenizer" in error.message


def test_no_process_to_be_had_is_a_503(begin: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = begin()
    with monkeypatch.context() as patch:
        patch.setattr(bounded.sys, "executable", "/bin/false")
        assert (error := bench.compile(regex("a")).error) is not None
        assert error.status == 503
    bench.works()


def test_no_fork_to_be_had_is_a_503(begin: Callable[..., Bench]) -> None:
    bench = begin()
    bench.works()
    engine = bench.engine()
    limits = engine.rlimit(psutil.RLIMIT_NOFILE)
    engine.rlimit(psutil.RLIMIT_NOFILE, (engine.num_fds(), limits[1]))
    assert (error := bench.compile(regex("a")).error) is not None
    assert error.status == 503
    engine.rlimit(psutil.RLIMIT_NOFILE, limits)
    bench.works()
    assert bench.engine() == engine


def test_it_has_no_secret_and_one_thread(
    begin: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork has but the thread that forks: another one's locks would stay locked in it."""
    monkeypatch.setenv("SAPWOOD_TEST_SECRET", "s3cret")
    bench = begin()
    bench.works()
    engine = bench.engine()
    assert not any("SECRET" in name for name in engine.environ())
    assert not engine.net_connections("inet")
    assert engine.num_threads() == 1


def test_the_parent_is_without_the_engine() -> None:
    program = "import sys, sapwood.srt.grammar.process; print({'llguidance', 'torch'} & set(sys.modules))"
    answer = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=bounded.environment(), capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert answer.stdout.strip() == "set()"


def test_what_is_broken_off_leaves_nothing(begin: Callable[..., Bench]) -> None:
    bench = begin()
    bench.works()
    engine = bench.engine()
    bench.compiler.break_off()
    assert not engine.is_running()


def test_all_end_with_their_parent(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROLES))
    code = (
        "import sys, time\n"
        "from sapwood.srt.grammar import compiler\n"
        "from tests.process.test_grammar_compiler import Bench, Path, bad\n"
        "compiler.CHILD = 'child_with_bombs'\n"
        "bench = Bench(Path(sys.argv[1]), wall_seconds=60.0, cpu_seconds=60.0)\n"
        "bench.works()\n"
        "bench.compiler.put(0, bad('endless'))\n"
        "print(bench.engine().pid, bench.a_fork().pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tokenizer)], stdout=subprocess.PIPE, env=bounded.environment()
    )
    with parent:
        assert parent.stdout is not None
        family = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(family) == 2
        parent.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=WAIT)
    assert not [p for p in alive if lives(p)]
