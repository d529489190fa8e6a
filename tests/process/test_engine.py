"""The offline Engine on a tiny random model: answers, errors, and an end without anything left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import sapwood
from bench.processes import cuda_libraries
from sapwood import Engine, SamplingParams
from sapwood.srt.errors import (
    BadRequest,
    ConfigError,
    Conflict,
    ContextTooLong,
    ModelError,
    ProcessDied,
    SapwoodError,
    Unavailable,
)
from tests.models import tiny_llama

PROMPT = "The sapwood of a tree"
PROMPTS = [PROMPT, "A river is", "What is the capital", "def add(a, b):", "Numbers: 1, 2"]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
ENDLESS = {"temperature": 0, "max_new_tokens": 20_000, "ignore_eos": True}
"""By an engine without drafts not over before a test has done what it does meanwhile."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(folder)
    return str(folder)


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[Engine]:
    with Engine(model, max_running_requests=8, max_total_tokens=4096, log_level="warning") as engine:
        yield engine


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that takes long requests."""
    return str(tiny_llama(tmp_path_factory.mktemp("large"), max_position_embeddings=32768))


@pytest.fixture
def own_engine(large: str) -> Iterator[Engine]:
    """One that a test may break."""
    options = {"max_total_tokens": 200_000, "max_running_requests": 8, "speculative_algorithm": "none"}
    with Engine(large, log_level="warning", **options) as engine:
        yield engine


def processes() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one that has just ended
            if process.status() != psutil.STATUS_ZOMBIE and "sapwood.srt.lifeline" in process.cmdline():
                found.append(process)
    return found


def idle(engine: Engine) -> bool:
    """Whether, soon, nothing runs and no slot is held by a row."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        state = engine.server_info()["state"]
        if state["running"] == state["waiting"] == state["slots_used"] == 0:
            return True
        time.sleep(0.02)
    return False


def drawn_tokens(engine: Engine) -> int:
    return int(engine.server_info()["state"]["output_tokens"])


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    """What is the same whatever was in the cache, and however fast it was."""
    varying = ("id", "e2e_latency", "cache", "cached_tokens", "drafted_tokens", "accepted_tokens")
    meta = {k: v for k, v in answer["meta_info"].items() if k not in varying}
    return {**answer, "meta_info": meta}


def test_one_prompt_is_one_answer(engine: Engine) -> None:
    answer = engine.generate(PROMPT, GREEDY, rid="mine")
    assert len(answer["output_ids"]) == 8
    meta = answer["meta_info"]
    assert (meta["id"], meta["completion_tokens"]) == ("mine", 8)
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert 0 <= meta["cached_tokens"] < meta["prompt_tokens"]
    assert "output_token_logprobs" not in meta
    assert without_times(engine.generate(PROMPT, GREEDY)) == without_times(answer)


def test_a_list_is_answered_in_order_as_one_by_one(engine: Engine) -> None:
    alone = [engine.generate(p, GREEDY, return_logprob=True) for p in PROMPTS]
    many = [p for p in PROMPTS for _ in range(8)]
    together = engine.generate(many, GREEDY, return_logprob=True)
    assert [without_times(a) for a in together[::8]] == [without_times(a) for a in alone]
    assert len(together) == 40
    assert engine.generate(PROMPTS[:1], GREEDY)[0]["text"] == alone[0]["text"]
    assert idle(engine)


def test_n_choices_stand_prompt_by_prompt(engine: Engine) -> None:
    drawn = {"temperature": 1.0, "seed": 5, "n": 2, "max_new_tokens": 12, "ignore_eos": True}
    two = engine.generate(PROMPT, drawn)
    four = engine.generate(PROMPTS[:2], drawn)
    assert len(two) == 2
    assert two[0]["output_ids"] != two[1]["output_ids"]
    assert [a["output_ids"] for a in four[:2]] == [a["output_ids"] for a in two]


def test_ids_and_text_and_parameters_may_be_given_in_several_ways(engine: Engine) -> None:
    ids = [5, 6, 7, 8]
    one = engine.generate(input_ids=ids, sampling_params=GREEDY)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    mixed = engine.generate(
        input_ids=[ids, ids, ids],
        sampling_params=[GREEDY, params, {"temperature": 0, "max_tokens": 8, "ignore_eos": True}],
    )
    assert [a["output_ids"] for a in mixed] == [one["output_ids"]] * 3
    assert one["meta_info"]["prompt_tokens"] == 4


def test_logprobs_come_on_request(engine: Engine) -> None:
    answer = engine.generate(PROMPT, GREEDY, return_logprob=True, top_logprobs_num=2)
    triples = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in triples] == answer["output_ids"]
    assert "".join(text for _, _, text in triples) == answer["text"] or "\ufffd" in answer["text"]
    tops = answer["meta_info"]["output_top_logprobs"]
    assert [top[0][:2] for top in tops] == [triple[:2] for triple in triples]
    assert all(len(top) == 2 and top[0][0] >= top[1][0] for top in tops)


def test_the_prompts_logprobs_come_on_request(engine: Engine) -> None:
    wanted: dict[str, Any] = {
        "return_logprob": True,
        "logprob_start_len": 2,
        "top_logprobs_num": 1,
        "token_ids_logprob": [5, 7],
    }
    answer = engine.generate(PROMPT, GREEDY, **wanted)
    meta, ids = answer["meta_info"], engine.tokenize(PROMPT)
    assert [token for _, token, _ in meta["input_token_logprobs"]] == ids[2:]
    assert [[t for _, t, _ in place] for place in meta["output_token_ids_logprobs"]] == [[5, 7]] * 8
    place = 3
    alone = engine.generate(
        input_ids=ids[:place],
        sampling_params={"max_tokens": 1},
        return_logprob=True,
        token_ids_logprob=[ids[place]],
    )["meta_info"]
    assert alone["output_token_ids_logprobs"][0][0] == meta["input_token_logprobs"][place - 2]
    nothing = engine.generate(PROMPT, {"max_tokens": 0}, return_logprob=True, logprob_start_len=0)
    assert (nothing["text"], nothing["output_ids"]) == ("", [])
    first, *others = nothing["meta_info"]["input_token_logprobs"]
    assert first == (None, ids[0], engine.get_tokenizer().decode(ids[:1]))
    assert others[1:] == meta["input_token_logprobs"]


def test_a_stream_grows_into_the_whole_answer(engine: Engine) -> None:
    whole = engine.generate(PROMPT, GREEDY)
    pieces = list(engine.generate(PROMPT, GREEDY, stream=True))
    for shorter, longer in itertools.pairwise(pieces):
        assert longer["text"].startswith(shorter["text"])
        assert longer["output_ids"][: len(shorter["output_ids"])] == shorter["output_ids"]
    assert without_times(pieces[-1]) == without_times(whole)
    both = list(engine.generate(PROMPTS[:2], GREEDY, stream=True))
    assert {piece["index"] for piece in both} == {0, 1}
    assert [p["text"] for p in both if p["index"] == 0][-1] == whole["text"]


def test_a_stream_left_early_aborts_its_request(own_engine: Engine) -> None:
    stream = own_engine.generate(PROMPT, ENDLESS, stream=True)
    next(stream)
    stream.close()
    assert idle(own_engine)
    assert drawn_tokens(own_engine) < 10_000


def test_a_chat_is_its_rendered_prompt(engine: Engine) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = engine.chat(messages, GREEDY)
    assert len(answer["output_ids"]) == 8
    assert answer["meta_info"]["prompt_tokens"] > 8
    last = list(engine.chat(messages, GREEDY, stream=True))[-1]
    assert last["output_ids"] == answer["output_ids"]
    longer = engine.chat(messages, GREEDY, add_generation_prompt=False)
    assert longer["meta_info"]["prompt_tokens"] < answer["meta_info"]["prompt_tokens"]


def test_a_prompt_is_read_as_it_is_tokenized(engine: Engine) -> None:
    ids = engine.tokenize(PROMPT)
    assert ids == engine.get_tokenizer().encode(PROMPT).ids
    chat = [{"role": "user", "content": "hi"}]
    assert len(engine.tokenize(chat)) == engine.chat(chat, GREEDY)["meta_info"]["prompt_tokens"]
    assert engine.tokenize(ids) == ids
    with pytest.raises(BadRequest, match="lone surrogate"):
        engine.tokenize("a\ud800")
    with pytest.raises(BadRequest, match="prompt"):
        engine.tokenize(5)  # type: ignore[arg-type]


def test_ids_may_be_spelt_as_json_has_them(engine: Engine) -> None:
    forced = [engine.generate("a", {**GREEDY, "logit_bias": {key: 100.0}})["output_ids"] for key in (7, "7")]
    assert forced[0] == forced[1]
    assert set(forced[0]) == {7}


def test_the_cache_explains_what_it_would_find(engine: Engine) -> None:
    engine.flush_cache()
    cold = engine.cache_explain(PROMPT)
    assert (cold["matched"], cold["stopped"]) == (0, "cold")
    engine.generate(PROMPT, GREEDY)
    assert engine.cache_explain(PROMPT)["stopped"] == "last_token"
    other = engine.cache_explain(PROMPT[:-4] + "?!")
    assert other["stopped"] == "diverged"
    assert 0 < other["matched"] < len(engine.tokenize(PROMPT))
    assert engine.cache_explain(PROMPT, cache_salt="mine")["matched"] == 0
    found = engine.generate(PROMPT[:-4] + "?!", GREEDY)["meta_info"]
    assert found["cached_tokens"] == other["matched"]


def test_a_call_may_hold_more_prompts_than_may_wait(model: str, engine: Engine) -> None:
    few = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    many = [[3 + i, 5, 7] for i in range(50)]
    expected = [a["output_ids"] for a in engine.generate(input_ids=many, sampling_params=few)]
    with Engine(
        model, max_running_requests=2, max_queued_requests=4, max_total_tokens=512, log_level="warning"
    ) as small:
        whole = small.generate(input_ids=many, sampling_params=few, rid="r")
        assert [a["output_ids"] for a in whole] == expected
        assert [a["meta_info"]["id"] for a in whole] == [f"r_{i}" for i in range(50)]
        streamed: dict[int, Any] = {}
        for piece in small.generate(input_ids=many, sampling_params={**few, "n": 2}, stream=True):
            streamed[piece["index"]] = piece["output_ids"]
        assert [streamed[2 * i] for i in range(50)] == expected == [streamed[2 * i + 1] for i in range(50)]
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(small.generate, input_ids=many, sampling_params=few) for _ in range(2)]
            slow = pool.submit(
                lambda: list(small.generate(input_ids=many[:10], sampling_params=few, stream=True))
            )
            assert [[a["output_ids"] for a in c.result()] for c in calls] == [expected] * 2
            assert len({piece["index"] for piece in slow.result()}) == 10
        with pytest.raises(ContextTooLong):
            small.generate(input_ids=[*many, [5] * 600], sampling_params=few)
        assert idle(small)


def test_a_stream_that_is_not_read_on_is_in_nobodys_way(model: str) -> None:
    few = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    with Engine(
        model, max_running_requests=2, max_queued_requests=2, max_total_tokens=512, log_level="warning"
    ) as small:
        expected = [a["output_ids"] for a in small.generate(PROMPTS[:3], few)]
        stream = small.generate(PROMPTS[:3], few, stream=True)
        pieces = [next(stream)]
        assert asyncio.run(asyncio.wait_for(small.async_generate(PROMPTS[:2], few), 30))
        pieces += stream
        assert [[p["output_ids"] for p in pieces if p["index"] == i][-1] for i in range(3)] == expected
        left = small.generate(PROMPTS[:3], {**few, "max_tokens": 400}, stream=True)
        next(left)
        left.close()
        with pytest.raises(ContextTooLong):
            list(small.generate(input_ids=[[5] * 600, [5] * 6], sampling_params=few, stream=True))
        assert len(small.generate(PROMPTS[:2], few)) == 2
        assert small._runtime.gate._free == 2


def test_a_running_loop_is_no_obstacle(engine: Engine) -> None:
    whole = engine.generate(PROMPT, GREEDY)

    async def main() -> None:
        async def last_piece() -> Any:
            return [piece async for piece in await engine.async_generate(PROMPT, GREEDY, stream=True)][-1]

        answers = await asyncio.gather(
            engine.async_generate(PROMPT, GREEDY),
            last_piece(),
            engine.async_chat([{"role": "user", "content": "hi"}], GREEDY),
        )
        assert without_times(answers[0]) == without_times(answers[1]) == without_times(whole)
        assert len(answers[2]["output_ids"]) == 8
        assert without_times(engine.generate(PROMPT, GREEDY)) == without_times(whole)

    asyncio.run(main())


def test_a_cancelled_task_aborts_its_requests(own_engine: Engine) -> None:
    async def main() -> None:
        cut = asyncio.create_task(own_engine.async_generate(PROMPTS * 10, ENDLESS))
        await asyncio.sleep(0.2)
        cut.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cut

    asyncio.run(main())
    assert idle(own_engine)
    assert drawn_tokens(own_engine) < 50 * 10_000


def test_threads_share_an_engine(engine: Engine) -> None:
    expected = [engine.generate(p, GREEDY)["text"] for p in PROMPTS]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda p: engine.generate(p, GREEDY)["text"], PROMPTS * 4))
    assert found == expected * 4


def test_ctrl_c_aborts_the_call_and_nothing_else(own_engine: Engine) -> None:
    def press() -> None:
        while not own_engine.server_info()["state"]["running"]:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        own_engine.generate(PROMPTS * 20, ENDLESS)
    assert idle(own_engine)
    assert drawn_tokens(own_engine) < 100 * 10_000
    assert len({p.pid for p in processes()} & own_pids(own_engine)) == 4
    assert own_engine.generate(PROMPT, GREEDY)["meta_info"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "exactly one of prompt, input_ids and input"),
        ({"prompt": "a", "input_ids": [1]}, "exactly one of prompt, input_ids and input"),
        ({"prompt": []}, "empty list"),
        ({"prompt": 5}, "text"),
        ({"prompt": "a\ud800"}, "lone surrogate"),
        ({"input_ids": []}, "empty list"),
        ({"input_ids": [10**6]}, "a token id in input_ids must be from 0 to 330, got 1000000"),
        ({"prompt": "a", "sampling_params": {"temprature": 1}}, "temprature"),
        ({"prompt": "a", "sampling_params": {"temperature": -1}}, "temperature must be from 0.0"),
        ({"prompt": "a", "sampling_params": {"max_tokens": "5"}}, "max_new_tokens"),
        ({"prompt": "a", "sampling_params": {"max_tokens": 5, "max_new_tokens": 5}}, "twice"),
        ({"prompt": "a", "sampling_params": SamplingParams(n=0)}, "n must be from 1"),
        ({"prompt": "a", "sampling_params": SamplingParams(logprobs=1)}, "logprobs is for LLM"),
        ({"prompt": "a", "sampling_params": 5}, "must be a dict or SamplingParams, got int"),
        ({"prompt": "a", "nonsense": 5}, "nonsense"),
        ({"prompt": "a", "logprob_start_len": 0}, "logprob_start_len needs return_logprob"),
        ({"prompt": ["a", "b"], "rid": ["x", "x"]}, "the same"),
        ({"prompt": ["a", "b"], "sampling_params": [{}]}, "one entry for each of the 2 prompts, got 1"),
        ({"prompt": ["a", "b"], "rid": ["x"]}, "one entry for each of the 2 prompts, got 1"),
        ({"prompt": "a", "top_logprobs_num": 2}, "return_logprob"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt must have from 1 to 256 characters, got 0"),
        ({"prompt": "a", "priority": 1}, "priority must be 0 or null, got 1"),
        ({"prompt": "a", "keep": 3601}, "keep must be from 0 to 3600 seconds, got 3601"),
        ({"prompt": "a", "queue_timeout": 0}, "queue_timeout must be above 0 and at most 86400 seconds"),
        ({"prompt": "a", "return_logprob": True, "top_logprobs_num": 21}, "from 0 to 20, got 21"),
    ],
)
def test_a_wrong_argument_is_named(engine: Engine, arguments: dict[str, Any], text: str) -> None:
    for stream in (False, True):
        with pytest.raises((BadRequest, Conflict), match=text):
            list(engine.generate(**arguments, stream=stream))


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "must not be empty"),
        ([{"role": "user"}], "content is required"),
        ([{"role": "user", "content": "a\udfff"}], "lone surrogate"),
        ([{"role": "king", "content": "a"}], "role"),
        ("hello", "messages"),
    ],
)
def test_a_wrong_chat_is_named(engine: Engine, messages: Any, text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        engine.chat(messages, GREEDY)


def test_a_prompt_that_never_fits_is_an_error_for_the_whole_list(engine: Engine) -> None:
    with pytest.raises(ContextTooLong, match="512"):
        engine.generate(input_ids=[5] * 600, sampling_params=GREEDY)
    with pytest.raises(ContextTooLong):
        engine.generate(input_ids=[[5] * 600, [5] * 6], sampling_params=ENDLESS)
    assert idle(engine)


def test_the_cache_can_be_looked_at_and_flushed(engine: Engine) -> None:
    engine.generate(PROMPT, GREEDY)
    again = engine.generate(PROMPT, GREEDY)["meta_info"]
    assert again["cached_tokens"] == again["prompt_tokens"] - 1
    assert again["cache"]["stopped"] == "last_token"
    assert engine.generate(PROMPT, GREEDY, cache_salt="other")["meta_info"]["cached_tokens"] == 0
    engine.flush_cache()
    assert engine.generate(PROMPT, GREEDY)["meta_info"]["cached_tokens"] == 0
    # Raises if the pool invariant does not hold in the live scheduler.
    assert engine._runtime.run(engine._runtime.service.client.ask("check"))["slots_private"] == 0
    info = engine.server_info()
    assert info["config"]["max_running_requests"] == 8
    assert info["max_request_tokens"] == 512
    assert "kernels" in info["facts"]


@pytest.mark.parametrize("role", ["worker", "scheduler", "tokenizer"])
def test_a_death_is_raised_by_running_and_later_calls(own_engine: Engine, role: str) -> None:
    stream = own_engine.generate(PROMPT, ENDLESS, stream=True)
    next(stream)
    (victim,) = [p for p in processes() if role in p.cmdline() and p.pid in own_pids(own_engine)]
    victim.kill()
    with pytest.raises(ProcessDied, match=f"{role} died: killed by signal 9"):
        list(stream)
    with pytest.raises(Unavailable, match=f"{role} died"):
        own_engine.generate(PROMPT, GREEDY)
    with pytest.raises(Unavailable, match=f"{role} died"):
        own_engine.flush_cache()


def own_pids(engine: Engine) -> set[int]:
    return {c.process.pid for c in engine._runtime._launcher._launcher._children}


def test_what_only_the_worker_can_refuse_is_an_error_of_the_configuration(model: str) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8_e4m3 is for a GPU, and --device is cpu") as e:
        Engine(model, device="cpu", kv_cache_dtype="fp8_e4m3")
    assert e.value.param == "kv_cache_dtype"


def test_shutting_down_ends_what_runs(own_engine: Engine) -> None:
    mine = own_pids(own_engine)
    folder = Path(own_engine._runtime._launcher.directory)
    stream = own_engine.generate(PROMPT, ENDLESS, stream=True)
    next(stream)
    own_engine.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in mine)
    assert not folder.exists()
    with pytest.raises(Unavailable, match="shut down"):
        list(stream)
    with pytest.raises(Unavailable, match="shut down"):
        own_engine.generate(PROMPT, GREEDY)
    own_engine.shutdown()


def test_the_collector_ends_an_engine(model: str) -> None:
    engine = Engine(model, max_total_tokens=512, log_level="warning")
    mine = own_pids(engine)
    del engine
    deadline = time.monotonic() + 20
    while any(map(psutil.pid_exists, mine)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(psutil.pid_exists, mine))


@pytest.mark.parametrize(
    ("ending", "code"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1), ("os.kill(os.getpid(), signal.SIGKILL)", -9)],
)
def test_a_program_that_ends_takes_its_engine_along(
    model: str, tmp_path: Path, ending: str, code: int
) -> None:
    program = f"""
import os, signal, sapwood, psutil
engine = sapwood.Engine({model!r}, max_total_tokens=512, log_level="warning")
stream = engine.generate("A river", {ENDLESS!r}, stream=True)
next(stream)
print(*(p.pid for p in psutil.Process().children()), flush=True)
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
    pids = [int(pid) for pid in answer.stdout.split()]
    deadline = time.monotonic() + 20
    while any(map(_lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (len(pids), [pid for pid in pids if _lives(pid)]) == (4, [])
    if code != -9:
        assert not list(tmp_path.iterdir())
        assert answer.stderr.count("Error") == (1 if code == 1 else 0), answer.stderr


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch brings CUDA's libraries itself")
def test_nothing_of_cuda_is_loaded_without_a_gpu(engine: Engine) -> None:
    engine.generate("One,", {"max_new_tokens": 2})
    found = {" ".join(p.cmdline()[-4:]): cuda_libraries(p.pid) for p in processes()}
    assert len(found) == 4, found
    assert not any(found.values()), found


def test_what_cannot_start_says_why_and_leaves_nothing(model: str, tmp_path: Path) -> None:
    before = processes()
    with pytest.raises(ConfigError, match="unknown option 'nonsense'"):
        Engine(model, nonsense=2)
    with pytest.raises(ConfigError, match="pp_size 2 is refused"):
        Engine(model, pp_size=2)
    with pytest.raises(ModelError, match="nowhere"):
        Engine(str(tmp_path / "nowhere"))
    with pytest.raises(SapwoodError, match=r"max.total.tokens"):
        Engine(model, max_total_tokens=2**31 - 1)
    assert processes() == before


def test_an_embedding_takes_the_fields_of_its_place(engine: Engine) -> None:
    first = engine.encode(PROMPT, cache_salt="a", keep=5, queue_timeout=60, progress=False)
    assert engine.encode([PROMPT], progress=False)[0]["embedding"] == first["embedding"]
    for fields, text in (
        ({"keep": -1}, "keep must be from 0 to 3600 seconds, got -1"),
        ({"priority": 2**31}, "priority must be from -2147483648 to 2147483647"),
        ({"nonsense": 1}, "nonsense"),
    ):
        with pytest.raises(BadRequest, match=text):
            engine.encode(PROMPT, **fields)
