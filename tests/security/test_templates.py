"""No template and no template argument can stop, stall, flood or leave the process that renders it."""

from __future__ import annotations

import copy
import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import psutil
import pytest

from sapwood.srt import bounded, bounded_child
from sapwood.srt.errors import BadRequest, ModelError, Unavailable
from sapwood.srt.tokenizer import isolation, render_child
from sapwood.srt.tokenizer.isolation import IsolatedTemplate
from sapwood.srt.tokenizer.templates import ChatTemplate

LITTLE = 0.4
"""Seconds, where it does not matter how many."""
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
DOUBLING = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"


def doubled(start: str, step: str, then: str) -> str:
    return DOUBLING.replace("START", start).replace("STEP", step) + then


GREEDY = {
    "a string doubles": doubled("'a'", "ns.x ~ ns.x", "{{ ns.x | length }}"),
    "a list doubles": doubled("[0]", "ns.x + ns.x", "{{ ns.x | length }}"),
    "join doubles": doubled("'ab'", "ns.x | join(ns.x)", "{{ ns.x | length }}"),
    "replace doubles": doubled("'aa'", "ns.x | replace('a', 'aa')", "{{ ns.x | length }}"),
    "a format's width": "{{ '%1000000000d' % (messages | length) }}",
    "a format's given width": "{{ '%*d' % (2000000000, 1) }}",
    "a format method's width": "{{ ('{:>' ~ 10 ** 9 ~ '}').format(1) }}",
    "another": "{{ '{:>1000000000}'.format(1) }}",
    "center": "{{ messages[0].content | center(10000000000) }}",
    "ljust": "{{ messages[0].content.ljust(1000000000) }}",
    "zfill": "{{ messages[0].content.zfill(1000000000) }}",
    "indent": "{{ 'a\\nb' | indent(1000000000) }}",
    "tojson's indent": "{{ messages | tojson(indent=1000000000) }}",
    "join of many": "{{ (['a' * 1000000] * (messages | length * 1000000)) | join | length }}",
    "nested lists": doubled("[0]", "[ns.x, ns.x]", "{{ ns.x | string | length }}"),
    "tojson of nested lists": doubled("[0]", "[ns.x, ns.x]", "{{ ns.x | tojson | length }}"),
    "nested lists compared": doubled(
        "[0]", "[ns.x, ns.x]", doubled("[0]", "[ns.x, ns.x]", "{{ ns.x == ns.x }}").replace("ns", "other")
        + "{{ ns.x == other.x }}"
    ),
    "slice": "{{ messages | slice(1000000000000) | list | length }}",
    "batch": "{{ messages | batch(1000000000, 'x') | list | length }}",
    "sum of lists": "{{ ([messages * 100000] * (messages | length * 100000)) | sum(start=[]) | length }}",
    "lipsum": "{{ lipsum(n=10000000) }}",
    "ranges": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "recursion": "{% for a in range(100000) recursive %}{{ loop(range(100000)) }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "much text": "{% for a in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
    "powers": "{{ 10 ** (messages | length * 10 ** 9) }}",
    "a repetition": "{{ 'x' * 1000000000 }}",
    "a list's repetition": "{{ [0] * 1000000000 }}",
    "a long range": "{% for a in range(10 ** 9) %}{% endfor %}",
    "caller": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call f() %}" * 24 + "x" + "{% endcall %}" * 24,
}  # fmt: skip


@pytest.mark.parametrize("what", GREEDY)
def test_a_greedy_template_is_a_400_in_time(what: str) -> None:
    begin = time.monotonic()
    isolated = IsolatedTemplate(GREEDY[what], {}, LITTLE)
    with pytest.raises(BadRequest) as caught:
        isolated.render(CHAT)
    assert caught.value.status == 400
    assert caught.value.message.startswith("the chat template ")
    assert time.monotonic() - begin < isolation.WALL_SECONDS


def test_a_greedy_constant_is_a_model_error() -> None:
    """It is computed when the template is compiled."""
    with pytest.raises(ModelError, match=r"more than 0\.4 s"):
        IsolatedTemplate("{{ 10 ** (10 ** 9) }}", {}, LITTLE)


@pytest.mark.parametrize("what", ["a string doubles", "nested lists", "ranges", "lipsum"])
def test_the_next_chat_renders(what: str) -> None:
    """A process that was killed, or has held much, is followed by a new one; others are kept."""
    guarded = "{% if messages[0].content == 'bad' %}" + GREEDY[what] + "{% else %}ok{% endif %}"
    isolated = IsolatedTemplate(guarded, {}, LITTLE)
    for _ in range(2):
        with pytest.raises(BadRequest):
            isolated.render([{"role": "user", "content": "bad"}])
        assert isolated.render(CHAT) == "ok"
    kept = isolated._idle[0].process.pid
    assert isolated.render(CHAT) == "ok"
    assert isolated._idle[0].process.pid == kept
    isolated.close()
    assert not psutil.pid_exists(kept)


def test_a_large_parent_does_not_make_its_processes_short_lived() -> None:
    ballast = bytearray(b"x" * (300 * 2**20))
    isolated = IsolatedTemplate("ok", {})
    kept = isolated._idle[0].process.pid
    for _ in range(3):
        assert isolated.render(CHAT) == "ok"
        assert isolated._idle[0].process.pid == kept
    isolated.close()
    assert ballast


def test_a_stuck_template_holds_up_no_other_thread() -> None:
    isolated = IsolatedTemplate(
        "{% if messages[0].content == 'bad' %}" + GREEDY["ranges"] + "{% endif %}ok", {}, 60.0
    )
    refused: list[str] = []

    def bad() -> None:
        with pytest.raises(BadRequest) as caught:
            isolated.render([{"role": "user", "content": "bad"}])
        refused.append(caught.value.message)

    thread = threading.Thread(target=bad)
    thread.start()
    while not isolated._busy:
        time.sleep(0.001)
    (stuck,) = isolated._busy
    for _ in range(50):
        assert isolated.render(CHAT) == "ok"
    assert [*isolated._busy] == [stuck]
    isolated.close()
    thread.join(20)
    assert "its process has ended" in refused[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_dies_costs_one_chat_at_most(number: int) -> None:
    isolated = IsolatedTemplate("ok", {})
    for _ in range(2):
        process = isolated._idle[0].process._process
        os.kill(process.pid, number)
        process.wait()
        assert isolated.render(CHAT) == "ok"
    isolated.close()


def test_a_process_that_is_stopped_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "WALL_SECONDS", 3.0)
    isolated = IsolatedTemplate("ok", {})
    stopped = isolated._idle[0].process._process
    os.kill(stopped.pid, signal.SIGSTOP)
    with pytest.raises(BadRequest, match="more than 3 s"):
        isolated.render(CHAT)
    assert stopped.poll() is not None
    assert isolated.render(CHAT) == "ok"
    isolated.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EAGAIN])
@pytest.mark.parametrize("what", ["socket.socketpair", "subprocess.Popen"])
def test_no_process_to_be_had_is_a_503(monkeypatch: pytest.MonkeyPatch, what: str, number: int) -> None:
    """And nothing is left open, and nothing broken for the next chat."""
    isolated = IsolatedTemplate("ok", {})
    isolated._idle.pop().kill()

    def refuse(*_args: Any, **_options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    gc.collect()
    mine = psutil.Process()
    before = mine.num_fds()
    with monkeypatch.context() as patch:
        patch.setattr(f"{bounded.__name__}.{what}", refuse)
        with pytest.raises(Unavailable) as caught:
            isolated.render(CHAT)
    assert caught.value.status == 503
    assert os.strerror(number) in caught.value.message
    assert mine.num_fds() == before
    assert isolated.render(CHAT) == "ok"
    isolated.close()


def test_a_later_process_that_cannot_begin_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first one it would be the model's fault; of this one it is a shortage."""
    isolated = IsolatedTemplate("ok", {})
    isolated._idle.pop().kill()
    with monkeypatch.context() as patch:
        patch.setattr(bounded.sys, "executable", "/bin/false")
        with pytest.raises(Unavailable):
            isolated.render(CHAT)
        with pytest.raises(ModelError):
            IsolatedTemplate("ok", {})
    assert isolated.render(CHAT) == "ok"
    isolated.close()


def test_its_processes_end_with_it() -> None:
    isolated = IsolatedTemplate("ok", {})
    pid = isolated._idle[0].process.pid
    assert psutil.pid_exists(pid)
    del isolated
    assert not psutil.pid_exists(pid)


def test_it_has_no_secret_and_little_else() -> None:
    os.environ["SAPWOOD_TEST_SECRET"] = "s3cret"
    try:
        isolated = IsolatedTemplate("ok", {})
    finally:
        del os.environ["SAPWOOD_TEST_SECRET"]
    process = psutil.Process(isolated._idle[0].process.pid)
    assert not any("SECRET" in name for name in process.environ())
    assert not process.net_connections("inet")
    loaded = " ".join(m.path for m in process.memory_maps())
    assert "torch" not in loaded
    assert "tokenizers" not in loaded
    isolated.close()


@pytest.mark.parametrize("source", ["{% for %}", "{{ x | nofilter }}", "{% if a %}"])
def test_a_template_that_is_none_is_a_model_error(source: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        IsolatedTemplate(source, {})


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ (messages | attr('__class__')).__mro__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__closure__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ ('{0.__cl' ~ 'ass__}').format(messages) }}",
    "{{ '{m.__class__}'.format_map({'m': messages}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends '/etc/passwd' %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ messages[0].__setitem__('role', 'system') }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_template_gets_out_of_the_sandbox(source: str) -> None:
    template = ChatTemplate(source, {})
    chat = copy.deepcopy(CHAT)
    try:
        text = template.render(chat)
    except BadRequest as e:
        text = e.message
    assert chat == CHAT
    for sign in ("<class", "<module", "uid=", "root:", "built-in", "subclasses"):
        assert sign not in text


HOSTILE = [
    "{{ 7 * 7 }}", "{% raw %}", "{0.__class__}", "%(x)s %s %1000000d", "{{ ''.__class__ }}", "__class__",
    "\0",
    "{% for a in range(100000) %}x{% endfor %}", "{#", "</s>", "\u202e",
]  # fmt: skip
ECHO = (
    "{{ messages[0].content }}|{{ extra }}|{{ messages | tojson }}|{{ extra | string | upper | trim }}"
    "|{{ '%s' % extra }}|{{ '{}'.format(extra) }}|{{ extra ~ messages[0].content }}"
)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_client_sends_is_data(text: str) -> None:
    template = ChatTemplate(ECHO, {})
    rendered = template.render([{"role": "user", "content": text}], kwargs={"extra": text}).split("|")
    assert rendered[0] == rendered[1] == rendered[-3] == rendered[-2] == text
    assert rendered[-1] == text + text


@pytest.mark.parametrize(
    "extra", [["__class__"], {"__class__": 1, "items": 2, "append": 3}, 1e308, None, True, -(2**63)]
)
def test_arguments_of_any_type_are_data(extra: Any) -> None:
    template = ChatTemplate("{{ extra | tojson }}{{ extra.__class__ }}{{ extra['__class__'] }}", {})
    try:
        text = template.render(CHAT, kwargs={"extra": extra})
    except BadRequest as e:
        text = e.message
    assert "<class" not in text


@pytest.mark.parametrize(
    "name",
    [
        "messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "range",
        "namespace",
        "raise_exception", "strftime_now", "dict", "lipsum", "cycler", "joiner", "_tick", "__class__", "_",
    ],
)  # fmt: skip
@pytest.mark.parametrize("make", [ChatTemplate, IsolatedTemplate])
def test_arguments_cannot_replace_what_is_there(name: str, make: Callable[..., Any]) -> None:
    template = make("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", {"bos_token": "<s>"})
    with pytest.raises(BadRequest, match="cannot set") as caught:
        template.render(CHAT, kwargs={name: "x"})
    assert caught.value.param == "chat_template_kwargs"
    assert template.render(CHAT, kwargs={"enable_thinking": False, "documents": []}) == "<s>hi"


def test_a_large_chat_renders_and_its_memory_goes_back() -> None:
    isolated = IsolatedTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    text = "é" * 4_000_000
    assert isolated.render(isolated.prepare([{"role": "user", "content": text}])) == text
    assert isolated.render(CHAT) == "hi"
    for process in isolated._idle:
        assert psutil.Process(process.process.pid).memory_info().rss < 140 * 2**20
    isolated.close()


def test_values_arrive_as_they_were_sent() -> None:
    isolated = IsolatedTemplate("{{ extra | tojson }}{{ messages | tojson }}", {})
    extra = {"z": [1, -1, 2**63, 0.1, 1e-300, True, None, "é🙂\0", {}], "a": {"b": [[]]}}
    plain = ChatTemplate("{{ extra | tojson }}{{ messages | tojson }}", {})
    assert isolated.render(CHAT, kwargs={"extra": extra}) == plain.render(CHAT, kwargs={"extra": extra})
    with pytest.raises(BadRequest, match="lone surrogate"):
        isolated.render([{"role": "user", "content": "\ud800"}])
    with pytest.raises(BadRequest, match="64 bits"):
        isolated.render(CHAT, kwargs={"extra": 2**70})
    isolated.close()


@pytest.mark.parametrize("end", ["stop", "close"])
def test_a_rendering_can_be_broken_off(end: str) -> None:
    isolated = IsolatedTemplate(
        "{% if messages[0].content == 'bad' %}" + GREEDY["ranges"] + "{% endif %}ok", {}, 20.0
    )
    bad, other, failed = object(), object(), []

    def render(owner: object) -> None:
        with pytest.raises(BadRequest, match="process has ended"):
            isolated.render([{"role": "user", "content": "bad"}], owner=owner)
        failed.append(owner)

    begin = time.monotonic()
    threads = [threading.Thread(target=render, args=(owner,)) for owner in (bad, other)]
    for thread in threads:
        thread.start()
    while len(isolated._busy) < 2:
        time.sleep(0.001)
    children = [process.process.pid for process in isolated._busy]
    if end == "stop":
        isolated.stop(object())
        isolated.stop(bad)
        threads[0].join(10)
        assert failed == [bad]
        assert threads[1].is_alive(), "that is another's"
        assert isolated.render(CHAT) == "ok"
    isolated.close()
    for thread in threads:
        thread.join(10)
    assert set(failed) == {bad, other}
    assert time.monotonic() - begin < 10
    assert not any(map(psutil.pid_exists, children))
    with pytest.raises(Unavailable, match="tokenizer ends"):
        isolated.render(CHAT)
    assert not isolated._idle


def test_a_process_that_was_broken_off_renders_no_more() -> None:
    """The end may come when the text is already there."""
    isolated = IsolatedTemplate("ok", {})
    process, owner = isolated._idle[0], object()
    plain = process.render

    def late(frame: bytes) -> Any:
        result = plain(frame)
        isolated.stop(owner)
        while not process.broken_off:
            time.sleep(0.001)
        return result

    process.render = late  # type: ignore[method-assign]
    assert isolated.render(CHAT, owner=owner) == "ok"
    assert not isolated._idle
    assert isolated.render(CHAT) == "ok"
    isolated.close()


def test_a_rendering_that_nobody_waits_for_and_that_is_quick_costs_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another one takes a tenth of a second to start: a client that leaves at once, or posts what is refused,
    would have others pay for it."""
    monkeypatch.setattr(isolation, "GRACE_SECONDS", 0.05)
    isolated = IsolatedTemplate("ok", {})
    process, owner = isolated._idle[0], object()
    plain = process.render

    def left(frame: bytes) -> Any:
        isolated.stop(owner)
        return plain(frame)

    process.render = left  # type: ignore[method-assign]
    assert isolated.render(CHAT, owner=owner) == "ok"
    assert isolated._idle == [process]
    time.sleep(0.1)
    assert process.alive
    assert not process.broken_off
    isolated.close()


def test_a_process_ends_with_its_parent_amid_a_rendering_and_says_nothing() -> None:
    code = (
        "import sys, threading, time\n"
        "from sapwood.srt.tokenizer.isolation import IsolatedTemplate\n"
        "isolated = IsolatedTemplate(sys.argv[1], {}, 15.0)\n"
        "print(isolated._idle[0].process.pid, flush=True)\n"
        "chat = [{'role': 'user', 'content': ''}]\n"
        "threading.Thread(target=isolated.render, args=(chat,), daemon=True).start()\n"
        "time.sleep(60)\n"
    )
    # One step that keeps all else in the process from running, and one of many.
    for source in ("{{ 10 ** (messages | length * 10 ** 9) }}", GREEDY["ranges"]):
        parent = subprocess.Popen(
            [sys.executable, "-c", code, source],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=bounded.environment(),
        )
        with parent:
            assert parent.stdout is not None
            assert parent.stderr is not None
            child = psutil.Process(int(parent.stdout.readline()))
            before, end = child.cpu_times().user, time.monotonic() + 10
            while child.cpu_times().user < before + 0.1:
                assert time.monotonic() < end, "it does not render"
                time.sleep(0.01)
            parent.kill()
            killed = time.monotonic()
            while is_alive(child):
                assert time.monotonic() < killed + 1.5
                time.sleep(0.01)
            assert parent.stderr.read() == b""


@pytest.mark.parametrize("answers", [0, 1])
def test_a_process_whose_parent_hangs_up_first_says_nothing(answers: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", render_child.__name__, str(os.getpid())],
            stdin=theirs.fileno(),
            stderr=subprocess.PIPE,
            env=bounded.environment(),
        )
        theirs.close()
        bounded_child.send(ours, msgspec.msgpack.encode(render_child.Setup("ok", {}, 1.0)))
        if answers:
            assert bounded_child.read(ours) is not None
            job = render_child.Job(CHAT, True, False, {}, None)
            bounded_child.send(ours, msgspec.msgpack.encode(job))
    _, said = child.communicate(timeout=20)
    assert (child.returncode, said) == (0, b"")


def test_a_process_that_is_another_ones_does_not_begin() -> None:
    """Its parent has ended before it could ask to end with it."""
    child = subprocess.run(
        [sys.executable, "-P", "-m", render_child.__name__, "1"],
        capture_output=True, env=bounded.environment(), timeout=20, check=True,
    )  # fmt: skip
    assert (child.stdout, child.stderr) == (b"", b"")


def test_a_process_does_not_outlive_its_parent() -> None:
    """Not even one that is computing when the parent is killed."""
    code = (
        "import sys, threading, time\n"
        "from sapwood.srt.tokenizer.isolation import IsolatedTemplate\n"
        "isolated = IsolatedTemplate(sys.argv[1], {}, 1.0)\n"
        "print(isolated._idle[0].process.pid, flush=True)\n"
        "chat = [{'role': 'user', 'content': ''}]\n"
        "threading.Thread(target=isolated.render, args=(chat,), daemon=True).start()\n"
        "time.sleep(60)\n"
    )
    for source in ("ok", GREEDY["nested lists"]):
        parent = subprocess.Popen(
            [sys.executable, "-c", code, source], stdout=subprocess.PIPE, env=bounded.environment()
        )
        with parent:
            assert parent.stdout is not None
            child = psutil.Process(int(parent.stdout.readline()))
            time.sleep(0.1)
            parent.kill()
        end = time.monotonic() + 15
        while is_alive(child):
            assert time.monotonic() < end
            time.sleep(0.02)


def is_alive(process: psutil.Process) -> bool:
    """It may be waited for by another, and so be gone, at any time."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
