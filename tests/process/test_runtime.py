"""`sapwood.Runtime` on a tiny random model: a server of its own, what a program written for SGLang gets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import sapwood
from sapwood import LLM, Engine, Runtime, SamplingParams
from sapwood.srt.errors import (
    BadRequest,
    ConfigError,
    ContextTooLong,
    ModelError,
    ProcessDied,
    SapwoodError,
    Unavailable,
)
from tests.models import tiny_llama

PROMPTS = ["The sapwood of a tree", "A river is", "What is the capital", "def add(a, b):", "Numbers: 1, 2"]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(folder)
    return str(folder)


@pytest.fixture(scope="module")
def runtime(model: str) -> Iterator[Runtime]:
    # Without drafts, so that an answer comes in pieces even where all cores are busy.
    options = {"max_total_tokens": 4096, "speculative_algorithm": "none"}
    with Runtime(model_path=model, tp_size=1, mem_fraction_static=0.3, **options) as runtime:
        yield runtime


@pytest.fixture
def own(model: str) -> Iterator[tuple[Runtime, dict[int, str]]]:
    """One that a test may break, and its processes."""
    before = children()
    with Runtime(model, max_total_tokens=2048) as runtime:
        yield runtime, {pid: role for pid, role in children().items() if pid not in before}


def children() -> dict[int, str]:
    """The role of each process of ours."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            argv = child.cmdline()
            if "sapwood.srt.lifeline" in argv:
                found[child.pid] = argv[argv.index("sapwood.srt.lifeline") + 1]
    return found


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    keep = ("finish_reason", "prompt_tokens", "completion_tokens", "output_token_logprobs")
    meta = {k: v for k, v in answer["meta_info"].items() if k in keep}
    return {"text": answer["text"], "ids": answer["output_ids"], **meta}


def test_an_answer_is_json_text(runtime: Runtime) -> None:
    answer = json.loads(runtime.generate(PROMPTS[0], sampling_params=GREEDY))
    assert len(answer["output_ids"]) == 8
    assert answer["meta_info"]["completion_tokens"] == 8
    listed = json.loads(runtime.generate(PROMPTS, GREEDY))
    assert without_times(listed[0]) == without_times(answer)
    assert len(listed) == 5


def test_every_door_gives_the_same(runtime: Runtime, model: str) -> None:
    over_http = json.loads(
        runtime.generate(PROMPTS, GREEDY, return_logprob=True, return_text_in_logprobs=True)
    )
    with Engine(model, max_total_tokens=4096, log_level="warning") as engine:
        native = engine.generate(PROMPTS, GREEDY, return_logprob=True)
        native = json.loads(json.dumps(native))
    assert [without_times(a) for a in native] == [without_times(a) for a in over_http]
    with LLM(model, max_total_tokens=4096, log_level="warning") as llm:
        outputs = llm.generate(
            PROMPTS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
        )
    assert [o.outputs[0].text for o in outputs] == [a["text"] for a in over_http]
    for output, answer in zip(outputs, over_http, strict=True):
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        triples = answer["meta_info"]["output_token_logprobs"]
        assert [[(v.logprob, t, v.decoded_token) for t, v in e.items()] for e in logprobs] == [
            [tuple(triple)] for triple in triples
        ]


def test_parameters_may_be_given_in_several_ways(runtime: Runtime) -> None:
    ways: list[Any] = [
        GREEDY,
        {"temperature": 0, "max_tokens": 8, "ignore_eos": True},
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    ]
    answers = json.loads(runtime.generate([PROMPTS[0]] * 3, ways))
    assert [a["output_ids"] for a in answers] == [answers[0]["output_ids"]] * 3
    biased = json.loads(runtime.generate(PROMPTS[0], SamplingParams(logit_bias={7: 100.0}, max_tokens=3)))
    assert biased["output_ids"] == [7, 7, 7]
    assert json.loads(runtime.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)) | {
        "meta_info": None
    } == json.loads(runtime.generate([[5, 6, 7]], GREEDY))[0] | {"meta_info": None}


def test_a_misspelt_parameter_is_no_long_prompt(runtime: Runtime) -> None:
    with pytest.raises(BadRequest, match="unknown field `temprature`") as unknown:
        runtime.generate("a", sampling_params={"temprature": 0})
    assert type(unknown.value) is BadRequest


def test_text_comes_piece_by_piece(runtime: Runtime) -> None:
    whole = json.loads(runtime.generate(PROMPTS[0], LONG))["text"]

    async def main() -> None:
        pieces = [piece async for piece in runtime.async_generate(PROMPTS[0], LONG)]
        assert "".join(pieces) == whole
        assert len(pieces) > 1
        both = await asyncio.gather(*[collect(runtime.add_request(p, GREEDY)) for p in PROMPTS[:2]])
        assert both == [a["text"] for a in json.loads(runtime.generate(PROMPTS[:2], GREEDY))]
        with pytest.raises(BadRequest, match="temperature"):
            await collect(runtime.async_generate(PROMPTS[0], {"temperature": -1}))
        with pytest.raises(ContextTooLong):
            await collect(runtime.async_generate([5] * 600, GREEDY))

    async def collect(pieces: Any) -> str:
        return "".join([piece async for piece in pieces])

    asyncio.run(main())


def test_a_stream_left_early_is_aborted(runtime: Runtime) -> None:
    async def main() -> None:
        stream = runtime.async_generate(PROMPTS[0], LONG)
        await anext(stream)
        await stream.aclose()

    asyncio.run(main())
    deadline = time.monotonic() + 5
    while (state := runtime.get_server_info()["state"])["slots_used"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert state["slots_used"] == state["running"] == 0


def test_a_streamed_text_may_have_any_line_separator(runtime: Runtime) -> None:
    text = "a\u2028b\u0085c\u2029d"

    async def main() -> list[str]:
        sampling = {"regex": text, "max_new_tokens": 40}
        return [piece async for piece in runtime.async_generate(PROMPTS[0], sampling)]

    assert "".join(asyncio.run(main())) == text


def test_a_real_server_answers(runtime: Runtime) -> None:
    assert runtime.url == runtime.endpoint == f"http://127.0.0.1:{runtime.port}"
    assert httpx.get(runtime.url + "/health").status_code == 200
    assert sorted(children().values()) == ["grammar", "scheduler", "server", "tokenizer", "worker"]
    assert runtime.get_server_info()["config"]["max_total_tokens"] == 4096


def test_a_prefix_can_be_computed_and_forgotten(runtime: Runtime) -> None:
    ids = runtime.get_tokenizer().encode(PROMPTS[2]).ids
    runtime.flush_cache()
    runtime.cache_prefix(PROMPTS[2])
    meta = json.loads(runtime.generate(PROMPTS[2] + " and more", GREEDY))["meta_info"]
    assert meta["cached_tokens"] >= len(ids) - 1
    runtime.flush_cache()
    assert json.loads(runtime.generate(PROMPTS[2], GREEDY))["meta_info"]["cached_tokens"] == 0


def test_embeddings_are_those_of_the_route(runtime: Runtime, model: str) -> None:
    one = json.loads(runtime.encode(PROMPTS[0]))
    listed = json.loads(runtime.encode(PROMPTS))
    assert listed[0] == one
    with Engine(model, max_total_tokens=4096, log_level="warning") as engine:
        assert [e["embedding"] for e in engine.encode(PROMPTS)] == [e["embedding"] for e in listed]


def test_threads_share_a_runtime(runtime: Runtime) -> None:
    expected = [json.loads(runtime.generate(p, GREEDY))["text"] for p in PROMPTS]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda p: json.loads(runtime.generate(p, GREEDY))["text"], PROMPTS * 4))
    assert found == expected * 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "text"),
        ({"prompt": "a\ud800"}, "lone surrogate"),
        ({"prompt": "a", "sampling_params": {"temprature": 1}}, "temprature"),
        ({"prompt": "a", "sampling_params": {"max_tokens": 5, "max_new_tokens": 5}}, "twice"),
        ({"prompt": "a", "sampling_params": {"temperature": float("nan")}}, "JSON"),
        ({"prompt": "a", "sampling_params": 5}, "must be a dict"),
        ({"prompt": "a", "nonsense": 5}, "nonsense"),
    ],
)
def test_a_wrong_argument_is_named(runtime: Runtime, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        runtime.generate(**arguments)


def test_keys_are_sent_along(model: str) -> None:
    with Runtime(model, max_total_tokens=512, api_key="one, two", admin_api_key="boss") as closed:
        assert json.loads(closed.generate(PROMPTS[0], GREEDY))["meta_info"]["completion_tokens"] == 8
        closed.flush_cache()
        answer = httpx.post(closed.url + "/generate", json={"text": "a"})
        assert answer.status_code == 401


def test_a_death_is_told(own: tuple[Runtime, dict[int, str]]) -> None:
    runtime, roles = own
    (worker,) = [pid for pid, role in roles.items() if role == "worker"]
    psutil.Process(worker).kill()
    with pytest.raises((ProcessDied, Unavailable)):
        runtime.generate(PROMPTS[0], LONG)
    deadline = time.monotonic() + 10
    while roles.keys() & children().keys() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not roles.keys() & children().keys()
    with pytest.raises(ProcessDied, match="worker died: killed by signal 9"):
        runtime.generate(PROMPTS[0], GREEDY)


def test_shutting_down_ends_all(own: tuple[Runtime, dict[int, str]]) -> None:
    runtime, roles = own
    assert len(roles) == 5
    runtime.shutdown()
    runtime.shutdown()
    assert not roles.keys() & children().keys()
    with pytest.raises(Unavailable, match="shut down"):
        runtime.generate(PROMPTS[0], GREEDY)
    with pytest.raises(httpx.TransportError):
        httpx.get(runtime.url + "/health")


def test_the_collector_ends_a_runtime(model: str) -> None:
    before = children()
    own = Runtime(model, max_total_tokens=512)
    assert len(children()) == len(before) + 5
    del own
    deadline = time.monotonic() + 10
    while len(children()) > len(before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert children() == before


@pytest.mark.parametrize(
    ("ending", "code"), [("pass", 0), ("1 / 0", 1), ("os.kill(os.getpid(), signal.SIGKILL)", -9)]
)
def test_a_program_that_ends_takes_its_server_along(
    model: str, tmp_path: Path, ending: str, code: int
) -> None:
    program = f"""
import os, signal, sapwood, psutil
runtime = sapwood.Runtime({model!r}, max_total_tokens=512)
print(runtime.url, *(p.pid for p in psutil.Process().children()), flush=True)
{ending}
"""
    root = str(Path(sapwood.__file__).resolve().parent.parent)
    answer = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, "PYTHONPATH": root, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == code, answer.stderr
    url, *pids = answer.stdout.split()
    deadline = time.monotonic() + 8
    while any(map(_lives, map(int, pids))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (len(pids), [pid for pid in pids if _lives(int(pid))]) == (5, [])
    with pytest.raises(httpx.TransportError):
        httpx.get(url + "/health")


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_cannot_start_says_why_and_leaves_nothing(model: str, tmp_path: Path, runtime: Runtime) -> None:
    before = children()
    with pytest.raises(ConfigError, match="pp_size"):
        Runtime(model, pp_size=2)
    with pytest.raises(ModelError, match="nowhere"):
        Runtime(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="is another server running"):
        Runtime(model, port=runtime.port)
    with pytest.raises(SapwoodError, match=r"max.total.tokens"):
        Runtime(model, max_total_tokens=2**31 - 1)
    assert children() == before
