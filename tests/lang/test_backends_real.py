"""The backends on the packaged model: what they decide, that they agree, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sapwood.lang.backend import (
    Answer,
    Backend,
    Fill,
    Generate,
    Ids,
    Logprobs,
    Output,
    Piece,
    Sampling,
    Score,
    Segments,
    Text,
    Turn,
)
from sapwood.lang.backends import native
from sapwood.lang.backends.endpoint import RuntimeEndpoint
from sapwood.lang.backends.openai import OpenAI
from sapwood.lang.choices import (
    Method,
    greedy_token_selection,
    mean,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from sapwood.lang.errors import RequestFailed
from sapwood.srt.engine import Engine
from sapwood.srt.runtime import Runtime
from tests.models import tiny_llama
from tests.serving import Server, serve

OPEN = Turn("assistant", (), open=True)
GREETING: Segments = (Turn("user", (Text("Good morning"),)), OPEN)
GRASS: Segments = (Text("The colour of fresh grass is "),)
FRANCE: Segments = (Text("The capital of France is"),)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(None, tmp_path_factory.mktemp("lang"), reasoning_parser="think") as running:
        yield running


@pytest.fixture
def backend(server: Server) -> Backend:
    return native.of(RuntimeEndpoint(server.url))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(num_threads=1, log_level="warning") as engine:
        yield engine


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def greedy(segments: Segments, tokens: int = 16, **sampling: Any) -> Generate:
    return Generate(segments=segments, sampling=Sampling(max_new_tokens=tokens, temperature=0.0, **sampling))


def only(answer: Answer) -> Output:
    (output,) = answer.outputs
    return output


def reference(server: Server, prompt: Sequence[int], choice: Sequence[int]) -> list[float]:
    """What `/generate` tells of the choice's tokens within a prompt that has them."""
    answer = server.post(
        "/generate",
        {
            "input_ids": [*prompt, *choice],
            "return_logprob": True,
            "logprob_start_len": len(prompt),
            "sampling_params": {"max_new_tokens": 0},
        },
    ).json()
    return [value for value, _, _ in answer["meta_info"]["input_token_logprobs"]]


@pytest.mark.parametrize(
    ("method", "best"),
    [
        (token_length_normalized, None),
        (greedy_token_selection, "green"),
        (unconditional_likelihood_normalized, "green"),
    ],
)
def test_the_colour_of_grass(server: Server, backend: Backend, method: Method, best: str | None) -> None:
    """P38: all scores are the model's own; the methods that do not favour long words find the right one."""
    choices = ("green", "incomprehensibilities")
    call = Score(segments=GRASS, choices=choices, unconditional=method.needs_unconditional)
    answer = run(backend.score(call))
    assert answer.input_ids is not None
    expected = [reference(server, answer.input_ids, one.ids) for one in answer.scored]
    assert [list(one.logprobs) for one in answer.scored] == expected
    decision = method(choices, answer.scored)
    assert decision.meta["normalized_prompt_logprobs"] == [mean(values) for values in expected]
    if best is None:
        means = [mean(values) for values in expected]
        best = choices[means.index(max(means))]
    assert decision.decision == best


def test_choices_that_begin_alike_and_equal_ones(server: Server, backend: Backend) -> None:
    """P38: a prefix of another choice, the same one twice, a single one; an empty one is refused."""
    segments = (Text("The largest city of the United States is"),)
    call = Score(segments=segments, choices=(" New", " New York", " New"))
    answer = run(backend.score(call))
    new, new_york, again = answer.scored
    assert new == again
    assert new_york.logprobs[: len(new.logprobs)] == new.logprobs
    for method in (token_length_normalized, greedy_token_selection):
        assert method(call.choices, answer.scored).index in (0, 1)
    assert greedy_token_selection(call.choices, answer.scored).decision == " New York"
    single = run(backend.score(Score(segments=segments, choices=(" New",))))
    assert single.scored == [new]
    with pytest.raises(RequestFailed) as caught:
        run(backend.score(Score(segments=segments, choices=("a", ""))))
    assert caught.value.status == 400


@pytest.mark.parametrize("space", [False, True])
def test_a_selection_may_be_the_first_of_a_message(server: Server, backend: Backend, space: bool) -> None:
    """P39: never the nonsense, and what scores best in a run of its own, with a space before it or not."""
    choices = ("Good", "Bye", "%%#zq~")
    begun = (Turn("user", (Text("Good morning"),)), Turn("assistant", (Text(" "),), open=True))
    call = Score(segments=begun if space else GREETING, choices=choices)
    answer = run(backend.score(call))
    assert answer.input_ids is not None
    means = [mean(reference(server, answer.input_ids, one.ids)) for one in answer.scored]
    decision = token_length_normalized(choices, answer.scored)
    assert decision.index == means.index(max(means))
    assert decision.decision != "%%#zq~"


async def streamed(backend: Backend, call: Generate) -> tuple[str, Piece]:
    pieces = [piece async for piece in backend.stream(call)]
    return "".join(piece.text for piece in pieces), pieces[-1]


CALLS = [
    greedy(FRANCE),
    greedy(FRANCE, stop=(",",)),
    greedy(FRANCE, stop_regex=("[A-Z][a-z]+s",)),
    greedy(GREETING),
    greedy(FRANCE, regex="(cat|dog)+"),
]


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
def test_a_stream_is_the_same_answer(backend: Backend, call: Generate) -> None:
    whole = run(backend.generate(call))
    text, last = run(streamed(backend, call))
    output = only(whole)
    assert last.output is not None
    assert (text, last.output.text, last.output.content) == (output.text, output.text, output.content)
    assert (last.input_ids, last.rewritten) == (whole.input_ids, whole.rewritten)


@pytest.mark.parametrize("call", CALLS[:2], ids=range(2))
def test_an_output_goes_on_from_its_own_tokens(server: Server, backend: Backend, call: Generate) -> None:
    """What a state goes on with is cached but for its last token, whatever ended it, and is the text."""
    server.post("/flush_cache", {})
    first = run(backend.generate(call))
    output = only(first)
    assert "".join(part.text for part in output.content) == output.text
    after = (*call.segments, *output.content, Text(" And so"))
    second = run(backend.generate(greedy(after)))
    assert first.input_ids is not None
    assert second.input_ids is not None
    known = (*first.input_ids, *(i for part in output.content if isinstance(part, Ids) for i in part.ids))
    assert second.input_ids[: len(known)] == known
    assert only(second).meta["cached_tokens"] >= len(known) - 1


def test_a_chat_s_turns_go_on_from_their_own_tokens(backend: Backend) -> None:
    segments: Segments = (Turn("user", (Text("Name a tree."),)),)
    known: tuple[int, ...] = ()
    for question in ("Another one?", "And another?"):
        answer = run(backend.generate(greedy((*segments, OPEN), 12)))
        output = only(answer)
        assert answer.input_ids is not None
        assert answer.rewritten == ()
        assert answer.input_ids[: len(known)] == known
        assert output.meta["cached_tokens"] >= len(known) - 1
        known = answer.input_ids + tuple(
            i for part in output.content if isinstance(part, Ids) for i in part.ids
        )
        segments = (*segments, Turn("assistant", output.content), Turn("user", (Text(question),)))


def test_the_backends_agree(server: Server, engine: Engine) -> None:
    """P41: the same calls give the same results, each in the backend's own way."""
    here: Backend = native.of(RuntimeEndpoint(server.url))
    there: Backend = native.of(engine)
    openai: Backend = OpenAI("default", server.url + "/v1", server="sapwood")
    choices = (" Paris", " a city", " London")
    for call in (greedy(FRANCE), greedy(GREETING), greedy(FRANCE, n=2)):
        outputs = [[o.text for o in run(backend.generate(call)).outputs] for backend in (here, there, openai)]
        assert outputs[0] == outputs[1] == outputs[2]
        texts = [run(streamed(backend, call))[1] for backend in (here, there, openai)]
        assert {piece.output.text for piece in texts if piece.output} == {outputs[0][-1]}
    call = Score(segments=FRANCE, choices=choices)
    scored = [run(backend.score(call)).scored for backend in (here, there, openai)]
    assert scored[0] == scored[1]
    assert [one.logprobs for one in scored[2]] == [one.logprobs for one in scored[0]]
    unconditional = Score(segments=FRANCE, choices=choices, unconditional=True)
    answers = [run(backend.score(unconditional)) for backend in (here, there)]
    assert answers[0].scored == answers[1].scored
    assert answers[0].input_ids == answers[1].input_ids
    assert {answer.meta["prompt_tokens"] for answer in answers} == {5}
    for backend in (here, there):
        assert run(backend.fill(Fill(segments=FRANCE, program="p"))).input_ids is not None
        assert run(backend.end("p"))["requests"] == 1
        assert run(backend.server_info())["model"]
        run(backend.flush_cache())


def idle(server: Server) -> bool:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        state = server.state()
        if not state["running"] and not state["waiting"]:
            return True
        time.sleep(0.05)
    return False


LONG = greedy(FRANCE, 4000, ignore_eos=True)


@pytest.mark.parametrize("kind", ["server", "engine", "openai"])
def test_a_cancelled_call_ends_at_once(server: Server, engine: Engine, kind: str) -> None:
    backends: dict[str, Callable[[], Backend]] = {
        "server": lambda: native.of(RuntimeEndpoint(server.url)),
        "engine": lambda: native.of(engine),
        "openai": lambda: OpenAI("default", server.url + "/v1", server="sapwood"),
    }
    backend = backends[kind]()

    async def leave() -> None:
        task = asyncio.ensure_future(backend.generate(LONG))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = backend.stream(LONG)
        assert (await anext(stream)).output is None
        await stream.aclose()  # type: ignore[attr-defined]

    run(leave())
    if kind == "engine":
        end = time.monotonic() + 10
        while engine.server_info()["state"]["running"] and time.monotonic() < end:
            time.sleep(0.05)
        assert not engine.server_info()["state"]["running"]
    else:
        assert idle(server)


def test_logprobs_are_told(backend: Backend) -> None:
    call = Generate(
        segments=FRANCE,
        sampling=Sampling(max_new_tokens=3, temperature=0.0),
        logprobs=Logprobs(top=2, start=0, texts=True),
    )
    whole = only(run(backend.generate(call))).meta
    assert [len(whole[f"{part}_token_logprobs"]) for part in ("input", "output")] == [5, 3]
    _, last = run(streamed(backend, call))
    assert last.output is not None
    for name in ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs"):
        assert last.output.meta[name] == whole[name], name


def test_reasoning_is_told_apart(server: Server, backend: Backend) -> None:
    """The prompt opens the reasoning, which the model does not close."""
    segments = (Text("Let me see. <think>"),)
    plain = only(run(backend.generate(greedy(segments, 8))))
    asked = Generate(segments=segments, sampling=greedy(segments, 8).sampling, reasoning=True)
    apart = only(run(backend.generate(asked)))
    assert "reasoning_content" not in plain.meta
    assert (apart.text, apart.meta["reasoning_content"]) == ("", plain.text.strip())
    assert [part.ids for part in apart.content if isinstance(part, Ids)] == [
        part.ids for part in plain.content if isinstance(part, Ids)
    ]
    body = {"text": "a", "score": ["b"], "separate_reasoning": True}
    with pytest.raises(RequestFailed, match="separate_reasoning cannot be used with score"):
        run(RuntimeEndpoint(server.url).post("/generate", body))


@pytest.mark.parametrize("kind", ["server", "engine"])
def test_errors_name_the_field(backend: Backend, engine: Engine, kind: str) -> None:
    """An engine's are those of a server."""
    backend = backend if kind == "server" else native.of(engine)
    with pytest.raises(RequestFailed, match="top_p") as caught:
        run(backend.generate(greedy(FRANCE, top_p=2.0)))
    assert (caught.value.status, caught.value.param) == (400, "top_p")

    async def stream() -> None:
        async for _ in backend.stream(greedy(FRANCE, regex="(")):
            pass

    with pytest.raises(RequestFailed) as caught:
        run(stream())
    assert caught.value.status == 400


def test_a_runtime_is_a_backend_that_keeps_it_alive(tmp_path: Path) -> None:
    runtime = Runtime(str(tiny_llama(tmp_path)), max_total_tokens=512, api_key="secret,other")
    url, here = runtime.url, native.of(runtime)
    assert native.of(runtime) is here
    del runtime
    gc.collect()
    call = Generate(segments=(Text("The sapwood"),), sampling=Sampling(max_new_tokens=4, ignore_eos=True))
    assert only(run(here.generate(call))).meta["completion_tokens"] == 4
    del here
    gc.collect()
    with pytest.raises(RequestFailed, match="does not answer"):
        run(native.of(RuntimeEndpoint(url, "secret")).generate(call))
