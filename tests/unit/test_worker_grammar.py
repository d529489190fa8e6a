"""Rows with a grammar: every token is one that it allows, whatever else is asked, with drafts or without."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import select
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sapwood.srt import messages
from sapwood.srt.channel import Inbox, Outbox
from sapwood.srt.errors import BadRequest
from sapwood.srt.grammar.compile import compile_constraint
from sapwood.srt.grammar.engine import Engine, Filler, Matcher
from sapwood.srt.messages import DropGrammars, GrammarLoaded, GrammarState, LoadGrammar, RowStart
from sapwood.srt.params import Constraint
from sapwood.srt.worker import constraints
from sapwood.srt.worker.constraints import MAX_FORCED, SLICE, _Follower
from sapwood.srt.worker.grammars import Grammars, make_grammars
from sapwood.srt.worker.loop import AtOnce, turn
from tests.models import IM_END, VOCAB, source_of, tiny_llama, tiny_tokenizer
from tests.worker_bench import Bench, Stream, ids_of, make_bench, row_start, run_streams

PERSON = 'start: "{\\"name\\": \\"" /[a-z]{1,12}/ "\\", \\"age\\": " /[1-9][0-9]{0,2}/ "}"'
SHAPE = re.compile(r'\{"name": "[a-z]{1,12}", "age": [1-9][0-9]{0,2}\}')
WORDS = "start: /[a-z ]{3,40}/"
ANSWER = 'start: "yes" | "no" | "not at all"'
DEAD_END = "start: A\nA: /a[0-9]/ & /a[x-z]*b/"
TOO_MUCH = 'start: e{1,40}\ne: e e e e | "a" | "a" e | ""'
PROMPT = ids_of(8, 51)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def bench(folder: Path) -> Bench:
    return make_bench(folder)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(str(folder / "tokenizer.json"), VOCAB, [IM_END])


def text_of(ids: list[int]) -> str:
    return str(tokenizer().decode(ids, skip_special_tokens=True))


@functools.cache
def tokenizer() -> Any:
    return tiny_tokenizer()


def plain(bench: Bench, grammar: str, tokens: int = 40, **params: Any) -> Stream:
    stream = Stream(bench, 7, PROMPT, {"grammar": bench.load(grammar), **params})
    run_streams([stream], tokens)
    return stream


def check(stream: Stream, engine: Engine, grammar: str) -> None:
    """Each id is in the mask of a matcher of its own, and so are the states."""
    matcher, mask = engine.compile(grammar), np.zeros(engine.mask_words, dtype=np.int32)
    seen = 0
    for result in stream.results:
        state = result.grammars[stream.row]
        count = len(messages.unpack(result.ids))
        for token in stream.output[seen : seen + count]:
            matcher.fill(mask.ctypes.data, mask.nbytes)
            assert mask.view(np.uint32)[token // 32] >> (token % 32) & 1
            assert matcher.accept([token]) == 1
        seen += count
        forced = [] if matcher.ended else matcher.forced()[:MAX_FORCED]
        assert state == GrammarState(matcher.complete, matcher.ended, messages.pack(forced))
    assert seen == len(stream.output)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_every_token_is_allowed(bench: Bench, engine: Engine, temperature: float) -> None:
    for seed in range(4):
        stream = plain(bench, PERSON, temperature=temperature, seed=seed)
        check(stream, engine, PERSON)
        assert SHAPE.fullmatch(text_of(stream.output))
        json.loads(text_of(stream.output))
        stream = plain(bench, WORDS, temperature=temperature, seed=seed)
        check(stream, engine, WORDS)
        assert re.fullmatch("[a-z ]{3,40}", text_of(stream.output)) or len(stream.output) == 40


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_drafts_change_nothing(bench: Bench, engine: Engine, temperature: float, length: int) -> None:
    """Forced ones, right ones, ones of which some are not allowed, and ones that go on behind the end."""
    params = {
        "temperature": temperature, "seed": 3, "logprobs": 2, "frequency_penalty": 0.5, "min_tokens": 4,
    }  # fmt: skip
    for grammar in (PERSON, WORDS, ANSWER):
        reference = plain(bench, grammar, **params)
        for kind in ("forced", "right", "behind", "half"):
            stream = Stream(bench, 1, PROMPT, {"grammar": bench.load(grammar), **params})
            stream.propose = proposals(stream, reference.output, kind, length)
            run_streams([stream], 40)
            assert (stream.output[:40], stream.logprobs[:40]) == (reference.output, reference.logprobs), kind
            check(stream, engine, grammar)
            if kind != "half" and grammar == PERSON:
                assert len(stream.results) < len(reference.results)


def proposals(stream: Stream, right: list[int], kind: str, length: int) -> Callable[[list[int]], list[int]]:
    rng = random.Random(length)

    def propose(output: list[int]) -> list[int]:
        if kind == "forced":
            return messages.unpack(stream.results[-1].grammars[stream.row].forced).tolist()[:length]
        rest = right[len(output) :]
        if kind == "behind":
            return [*rest, IM_END, *PROMPT][:length]
        if kind == "half":
            return [token if rng.random() < 0.7 else rng.randrange(VOCAB) for token in rest[:length]]
        return rest[:length]

    return propose


def test_rows_of_several_grammars_share_steps(bench: Bench) -> None:
    cases = [(PERSON, 0.0), (PERSON, 1.0), (WORDS, 1.5), (ANSWER, 2.0), ("", 1.0), (WORDS, 1.0)]
    references, streams = [], []
    for i, (grammar, temperature) in enumerate(cases):
        params: dict[str, Any] = {"temperature": temperature, "seed": i}
        if grammar:
            params["grammar"] = bench.load(grammar)
        alone = Stream(bench, 7, PROMPT, params)
        run_streams([alone], 30)
        references.append(alone.output)
        stream = Stream(bench, i, PROMPT, params)
        stream.propose = proposals(stream, alone.output, "right", i)
        streams.append(stream)
    run_streams(streams, 30)
    assert [stream.output[:30] for stream in streams] == references


@pytest.mark.parametrize("at", [1, 4, 9])
def test_a_row_that_begins_again_goes_on_as_it_was(bench: Bench, at: int) -> None:
    params = {"temperature": 1.0, "seed": 4}
    whole = plain(bench, PERSON, **params)
    again = Stream(bench, 2, PROMPT, {"grammar": bench.load(PERSON), **params}, output=whole.output[:at])
    run_streams([again], 40)
    assert again.output == whole.output
    assert again.results[-1].grammars[2] == whole.results[-1].grammars[7]


def test_the_grammar_beats_min_tokens_and_ends_the_row(bench: Bench) -> None:
    """Where the grammar allows the end and more, min_tokens holds it back; where the end alone, it comes."""
    params: dict[str, Any] = {"temperature": 0.0, "min_tokens": 30, "logit_bias": {IM_END: 50.0}}
    stream = plain(bench, "start: /[ab]{2,6}/", **params)
    assert re.fullmatch("[ab]{6}", text_of(stream.output))
    last = stream.results[-1].grammars[7]
    assert (last.complete, last.ended) == (True, True)
    # Surplus steps of a row that has ended fail not, and allow the end alone.
    for _ in range(2):
        result = bench.step([stream.part()])
        assert (messages.unpack(result.ids).tolist(), result.errors) == ([IM_END], [])
        assert result.grammars[7].ended
        stream.take(result, 0, 1)


def test_an_end_is_drawn_only_where_the_grammar_is_complete(bench: Bench) -> None:
    stream = plain(bench, "start: /[ab]{2,6}/", temperature=0.0, logit_bias={IM_END: 90.0})
    assert re.fullmatch("[ab]{2,3}", text_of(stream.output[:-1]))
    assert stream.output[-1] == IM_END
    assert stream.results[-1].grammars[7] == GrammarState(complete=True, ended=True)


def test_choices_fork_under_one_mask(bench: Bench) -> None:
    start = row_start(0, grammar=bench.load(ANSWER), seed=2, temperature=2.0, history=PROMPT, prompt_len=8)
    part = {"row": 0, "start": 0, "ids": PROMPT, "slots": range(8), "samples": 6}
    forked = bench.step([part], [start])
    tokens = messages.unpack(forked.ids).tolist()
    assert all(text_of([token])[0] in "yn" for token in tokens)
    for choice, token in enumerate(tokens):
        start.choice = choice
        alone = bench.step([{**part, "samples": 1}], [start])
        assert messages.unpack(alone.ids).tolist() == [token]
        if choice == 0:
            assert alone.grammars == forked.grammars


def test_logprobs_are_of_the_model_alone(bench: Bench) -> None:
    params: dict[str, Any] = {"temperature": 0.0, "logprobs": 20}
    constrained = plain(bench, PERSON, tokens=1, **params)
    free = Stream(bench, 6, PROMPT, params)
    run_streams([free], 1)
    assert constrained.logprobs[0].top == free.logprobs[0].top


def failing(bench: Bench, start: RowStart) -> tuple[str, str]:
    """The error of a row's first step; another one beside it has none, and gives what it gives alone."""
    beside = Stream(bench, 7, PROMPT, {"temperature": 0.0})
    ids = messages.unpack(start.history).tolist()
    part = {"row": start.row, "start": 0, "ids": ids, "slots": range(500, 500 + len(ids)), "samples": 1}
    result = bench.step([part, beside.part()], [start, beside.start()])
    (error,) = result.errors
    assert error.row == start.row
    alone = Stream(bench, 6, PROMPT, {"temperature": 0.0})
    run_streams([alone], 1)
    assert messages.unpack(result.ids).tolist()[1:] == alone.output
    # It stays so: nothing is ever drawn freely for it.
    further = {**part, "start": len(ids), "ids": [-1], "slots": [520]}
    assert [e.error.code for e in bench.step([further]).errors] == [error.error.code]
    return error.error.code, error.error.message


def test_rows_that_cannot_go_on_fail_alone(bench: Bench) -> None:
    def start(grammar: bytes, output: list[int]) -> RowStart:
        return row_start(3, grammar=grammar, history=[*PROMPT, *output], prompt_len=8)

    assert failing(bench, start(b"never loaded", []))[0] == "internal_error"
    wrong = failing(bench, start(bench.load(ANSWER), [5, 5]))
    assert wrong[1] == "the constraint does not allow the output that there is"
    assert failing(bench, start(bench.load(DEAD_END), [])) == (
        "constraint_dead_end",
        "no token can go on with the constraint at output token 1",
    )
    key = bench.load(ANSWER)
    bench.grammars.drop([key])
    assert failing(bench, start(key, []))[0] == "internal_error"


def test_what_becomes_too_complex_ends_with_an_error(bench: Bench) -> None:
    """And in no step it takes long; the grammar stays good for others."""
    bias = {"logit_bias": {IM_END: -100.0}}
    stream = plain(bench, TOO_MUCH, 70, temperature=0.0, **bias)
    (error,) = stream.results[-1].errors
    assert error.error.code == "constraint_too_complex"
    assert (error.error.status, error.error.type) == (400, "invalid_request_error")
    assert re.search(r"at output token \d+$", error.error.message)
    again = plain(bench, TOO_MUCH, 8, temperature=0.0, **bias)
    assert again.output == stream.output[:8]


@pytest.mark.parametrize("trap", ["A\nA: /a[0-9]/ & /a[x-z]*b/", 'e{1,200}\ne: "a"? "a"? "a"?'])
def test_drafts_into_a_trap_are_no_reason_to_fail(bench: Bench, trap: str) -> None:
    """A row that proposes them at every step draws what it draws without, to the end."""
    draft = tokenizer().encode("?ab" if trap.startswith("A") else "?aaaaaaaaaaaa").ids[:7]
    grammar = f'start: /[b-z]{{40}}/ | /[b-z]{{5,39}}/ "?" {trap}'
    for bias, ends in ((0.0, False), (40.0, True)):
        biases = {draft[0]: bias, tokenizer().token_to_id("a"): bias / 2, IM_END: -bias}
        params: dict[str, Any] = {"temperature": 1.0, "seed": 2, "logit_bias": biases}
        reference = plain(bench, grammar, 50, **params)
        stream = Stream(bench, 1, PROMPT, {"grammar": bench.load(grammar), **params}, lambda output: draft)
        run_streams([stream], 50)
        assert stream.output == reference.output
        codes = [[e.error.code for e in s.results[-1].errors] for s in (stream, reference)]
        assert codes[0] == codes[1]
        assert bool(codes[0]) == ends


def follower_of(bench: Bench, row: int) -> _Follower:
    follower = bench.runner._constraints._rows[row]
    assert isinstance(follower, _Follower)
    return follower


def break_down(bench: Bench, row: int) -> None:
    """The row's matcher fails: an id that there is not is an error of the engine's, as limits are."""
    matcher = follower_of(bench, row).matcher
    matcher.accept([2**30])
    assert matcher.error


def errors_of(stream: Stream) -> list[str]:
    return [error.error.code for error in stream.results[-1].errors]


def test_a_matcher_that_fails_of_what_others_walked_is_made_anew(bench: Bench) -> None:
    """Copies share their automata: what one row has used up is not the others' fault, nor are drafts."""
    params = {"temperature": 1.0, "seed": 1}
    reference = plain(bench, PERSON, **params)
    stream = Stream(bench, 2, PROMPT, {"grammar": bench.load(PERSON), **params})
    run_streams([stream], 5)
    break_down(bench, 2)
    stream.propose = lambda output: reference.output[len(output) : len(output) + 3]
    run_streams([stream], 40, admitted=True)
    assert stream.output == reference.output
    assert messages.unpack(stream.results[5].counts).tolist() == [1]


@pytest.mark.parametrize("times", [2, 3])
def test_a_matcher_that_fails_again_soon_is_made_anew_of_a_base_of_its_own(bench: Bench, times: int) -> None:
    """Others may have used up the new one, too; what fails alone is too complex."""
    params = {"temperature": 1.0, "seed": 1}
    reference = plain(bench, PERSON, **params)
    stream = Stream(bench, 2, PROMPT, {"grammar": bench.load(PERSON), **params})
    beside = Stream(bench, 3, PROMPT, {"grammar": PERSON.encode(), **params})
    run_streams([stream, beside], 2)
    for at in (3, 4, 5)[:times]:
        break_down(bench, 2)
        run_streams([stream, beside], at, admitted=True)
    if times == 2:
        follower = follower_of(bench, 2)
        assert follower._base is not follower.grammar.base
        run_streams([stream, beside], 40, admitted=True)
        assert stream.output == reference.output
    else:
        assert errors_of(stream) == ["constraint_too_complex"]
        run_streams([beside], 40, admitted=True)
    assert beside.output == reference.output


def test_a_grammar_that_cannot_be_compiled_again_costs_its_row_only(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {"temperature": 1.0, "seed": 1}
    stream = Stream(bench, 2, PROMPT, {"grammar": bench.load(PERSON), **params})
    run_streams([stream], 2)
    break_down(bench, 2)

    def refuse(engine: Engine, text: str) -> Matcher:
        raise BadRequest("it cannot be compiled")

    monkeypatch.setattr(Engine, "compile", refuse)
    run_streams([stream], 3, admitted=True)
    assert errors_of(stream) == ["constraint_too_complex"]


def test_a_long_output_is_gone_through_in_slices(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, params = "start: /[a-z ]{400}/", {"temperature": 1.0, "seed": 4}
    whole = plain(bench, grammar, **params)
    accept = Matcher.accept
    sizes: list[int] = []

    def counted(matcher: Matcher, ids: list[int]) -> int:
        sizes.append(len(ids))
        return accept(matcher, ids)

    monkeypatch.setattr(Matcher, "accept", counted)
    again = Stream(bench, 2, PROMPT, {"grammar": bench.load(grammar), **params}, output=whole.output[:37])
    run_streams([again], 40)
    assert again.output == whole.output
    assert max(sizes) <= SLICE < 37 <= sum(sizes)


def test_a_row_that_takes_others_too_much_time_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"temperature": 1.0, "seed": 1}
    stream = Stream(bench, 2, PROMPT, {"grammar": bench.load(PERSON), **params})
    run_streams([stream], 5)
    assert not follower_of(bench, 2).failed
    monkeypatch.setattr(constraints, "SECONDS", 0.0)
    monkeypatch.setattr(constraints, "SECONDS_A_TOKEN", 0.0)
    run_streams([stream], 40, admitted=True)
    assert errors_of(stream) == ["constraint_too_complex"]
    assert len(stream.output) == 5
    start = row_start(3, grammar=PERSON.encode(), history=[*PROMPT, *stream.output], prompt_len=8)
    assert failing(bench, start)[0] == "constraint_too_complex"


def test_as_many_optional_properties_as_there_may_be_are_followed(engine: Engine) -> None:
    properties = {f"p{i}": {"type": "boolean"} for i in range(200)}
    schema = json.dumps({"type": "object", "properties": properties})
    grammar = compile_constraint(Constraint("json_schema", schema, "schema"), engine)
    for given in ([], [0, 1, 99, 199], list(range(200))):
        matcher = engine.compile(grammar.text)
        ids = engine.tokenize(json.dumps({f"p{i}": True for i in given}))
        assert (matcher.accept(ids), matcher.complete) == (len(ids), True), matcher.error


def test_grammars_are_loaded_or_refused(bench: Bench, folder: Path) -> None:
    answer = bench.answer("start: nothing_of_that_name")
    assert answer.error is not None
    assert answer.error.status == 400
    assert "nothing_of_that_name" in answer.error.message
    source = msgspec.structs.replace(source_of(folder), tokenizer_file=None)
    without = Bench(bench.runner, bench.pool, make_grammars(source)).answer(ANSWER)
    assert without.error is not None
    assert "tokenizer.json" in without.error.message


def test_the_loop_wakes_for_a_grammar_that_is_loaded(bench: Bench, tmp_path: Path) -> None:
    """Nothing else comes; and a step of a row that has it finds it there."""
    inbox, scheduler = Inbox(str(tmp_path), "worker"), Inbox(str(tmp_path), "scheduler")
    to_worker, to_scheduler = Outbox(str(tmp_path), "worker"), Outbox(str(tmp_path), "scheduler")
    try:
        inbox.watch(bench.grammars.fileno())
        to_worker.send(LoadGrammar(b"answer", ANSWER))
        answers: list[Any] = []
        while not answers:  # the first turn may find it loaded already, and then no second one would end
            turn(inbox, to_scheduler, AtOnce(bench.runner.run), bench.grammars)
            answers += scheduler.receive(1.0)
        assert answers == [GrammarLoaded(b"answer")]
        to_worker.send(DropGrammars([b"answer"]))
        turn(inbox, to_scheduler, AtOnce(bench.runner.run), bench.grammars)
        assert bench.grammars.get(b"answer") is None
    finally:
        for socket in (inbox, scheduler, to_worker, to_scheduler):
            socket.close()


def test_masks_are_written_only_where_there_is_room(engine: Engine) -> None:
    matcher, filler = engine.compile(ANSWER), Filler(1)
    masks = np.zeros((3, engine.mask_words), dtype=np.int32)
    filler.fill([(matcher, 0, [5, 6])], masks)
    for line, drafts in ((3, []), (2, [5]), (-1, []), (0, [5, 6, 7])):
        with pytest.raises(IndexError, match=f"line {line} "):
            filler.fill([(matcher, line, drafts)], masks)


class Panic(BaseException):
    """As the engine's own are, which are no Exceptions."""


@pytest.mark.parametrize("kind", [OSError, Panic])
def test_an_engine_that_breaks_answers_all_the_same(kind: type[BaseException]) -> None:
    def broken() -> Engine:
        raise kind("no such file")

    grammars = Grammars(broken)
    grammars.load(LoadGrammar(b"1", ANSWER))
    grammars.load(LoadGrammar(b"2", ANSWER))
    answers = []
    while len(answers) < 2:
        answers += grammars.finished()
    assert [a.key for a in answers] == [b"1", b"2"]
    assert all(a.error is not None and "no such file" in a.error.message for a in answers)


def next_answers(grammars: Grammars, count: int) -> list[GrammarLoaded]:
    answers: list[GrammarLoaded] = []
    while len(answers) < count:
        assert select.select([grammars], [], [], 60.0)[0]
        answers += grammars.finished()
    return answers


def test_a_process_of_low_priority_loads_all_the_same(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody but root can make a thread less nice than it is."""
    asked: list[int] = []

    def refuse(which: int, who: int, priority: int) -> None:
        asked.append(priority)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "getpriority", lambda which, who: 15)
    monkeypatch.setattr(os, "setpriority", refuse)
    grammars = Grammars(lambda: engine)
    grammars.load(LoadGrammar(b"1", ANSWER))
    assert next_answers(grammars, 1) == [GrammarLoaded(b"1")]
    assert asked == [15]


def test_what_was_dropped_is_not_compiled_or_not_kept() -> None:
    begun, go = threading.Event(), threading.Event()
    compiled: list[str] = []

    class Slow:
        mask_words = 1

        def compile(self, text: str) -> str:
            compiled.append(text)
            begun.set()
            assert go.wait(60.0)
            return text

    make: Any = Slow
    grammars = Grammars(make)
    for text in "abcd":
        grammars.load(LoadGrammar(text.encode(), text))
    assert begun.wait(60.0)
    grammars.drop([b"a", b"b"])
    go.set()
    assert next_answers(grammars, 2) == [GrammarLoaded(b"c"), GrammarLoaded(b"d")]
    assert compiled == ["a", "c", "d"]
    assert grammars.get(b"a") is None
