"""`sapwood.LLM` on a tiny random model: what a program written for vLLM gets."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer

from sapwood import LLM, Engine, SamplingParams
from sapwood.srt.errors import BadRequest, ConfigError, ContextTooLong, ModelError, SapwoodError, Unavailable
from sapwood.srt.llm_outputs import RequestOutput
from tests.models import IM_END, tiny_llama

PROMPTS = ["The sapwood of a tree", "A river is", "What is the capital", "def add(a, b):", "Numbers: 1, 2"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def greedy(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **values})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(
        model, tensor_parallel_size=1, max_num_seqs=8, max_total_tokens=4096, log_level="warning"
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[Engine]:
    """A second runtime beside the first, whose answers are /generate's."""
    with Engine(model, max_running_requests=8, max_total_tokens=4096, log_level="warning") as engine:
        yield engine


def one(outputs: list[RequestOutput]) -> RequestOutput:
    (output,) = outputs
    return output


def told(output: RequestOutput) -> tuple[Any, ...]:
    """All of an output but its number and what happened to be cached."""
    return output.prompt, output.prompt_token_ids, output.outputs, output.prompt_logprobs


def test_prompts_are_answered_in_order(llm: LLM, engine: Engine) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    native = engine.generate(PROMPTS, {"temperature": 0, "max_tokens": 8, "ignore_eos": True})
    assert [o.prompt for o in outputs] == PROMPTS
    assert [o.outputs[0].text for o in outputs] == [a["text"] for a in native]
    assert [o.outputs[0].token_ids for o in outputs] == [a["output_ids"] for a in native]
    assert [len(o.prompt_token_ids) for o in outputs] == [a["meta_info"]["prompt_tokens"] for a in native]
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}
    assert all(o.finished and o.outputs[0].finished() for o in outputs)
    assert len({o.request_id for o in outputs}) == len(PROMPTS)
    assert [told(one(llm.generate(p, GREEDY))) for p in PROMPTS] == [told(o) for o in outputs]


def test_a_prompt_may_be_text_ids_or_a_dict(llm: LLM) -> None:
    whole = one(llm.generate(PROMPTS[0], GREEDY))
    ids = whole.prompt_token_ids
    ways: list[Any] = [
        {"prompt": PROMPTS[0]},
        {"prompt_token_ids": ids},
        ids,
        {"prompt_token_ids": ids, "prompt": "mine"},
    ]
    outputs = llm.generate(ways, GREEDY)
    assert [o.outputs for o in outputs] == [whole.outputs] * 4
    assert [o.prompt for o in outputs] == [PROMPTS[0], None, None, "mine"]
    assert llm.generate({"prompt": PROMPTS[0]}, GREEDY)[0].outputs == whole.outputs
    assert llm.generate([], GREEDY) == []


def test_without_parameters_there_are_sixteen_tokens(llm: LLM) -> None:
    assert SamplingParams().max_tokens == 16
    assert llm.get_default_sampling_params() == SamplingParams()
    output = one(llm.generate(PROMPTS[1], SamplingParams(ignore_eos=True)))
    assert len(output.outputs[0].token_ids) == 16
    assert len(one(llm.generate(PROMPTS[1])).outputs[0].token_ids) <= 16
    to_the_end = one(llm.generate([[5] * 500], greedy(max_tokens=None)))
    assert (len(to_the_end.outputs[0].token_ids), to_the_end.outputs[0].finish_reason) == (12, "length")


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    each = [greedy(max_tokens=3), greedy(max_tokens=5, n=2)]
    first, second = llm.generate(PROMPTS[:2], each)
    assert [len(c.token_ids) for c in first.outputs] == [3]
    assert [(c.index, len(c.token_ids)) for c in second.outputs] == [(0, 5), (1, 5)]
    drawn = SamplingParams(n=3, temperature=1.5, seed=7, max_tokens=10, ignore_eos=True)
    again = one(llm.generate(PROMPTS[0], drawn))
    assert again.outputs == one(llm.generate(PROMPTS[0], drawn)).outputs
    assert len({tuple(c.token_ids) for c in again.outputs}) == 3


def test_logprobs_are_those_of_generate(llm: LLM, engine: Engine) -> None:
    choice = one(llm.generate(PROMPTS[0], greedy(logprobs=2))).outputs[0]
    meta = engine.generate(
        PROMPTS[0],
        {"temperature": 0, "max_tokens": 8, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=2,
    )["meta_info"]
    assert choice.logprobs is not None
    for token, entry, triple, tops in zip(
        choice.token_ids,
        choice.logprobs,
        meta["output_token_logprobs"],
        meta["output_top_logprobs"],
        strict=True,
    ):
        assert (entry[token].logprob, token, entry[token].decoded_token) == tuple(triple)
        assert [(v.logprob, t, v.decoded_token) for t, v in entry.items()] == [tuple(top) for top in tops]
        assert [v.rank for v in entry.values()] == [1, 2]
    assert choice.cumulative_logprob == sum(
        entry[t].logprob for t, entry in zip(choice.token_ids, choice.logprobs, strict=True)
    )
    plain = one(llm.generate(PROMPTS[0], GREEDY)).outputs[0]
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)
    bare = one(llm.generate(PROMPTS[0], greedy(logprobs=0))).outputs[0].logprobs
    assert bare is not None
    assert [list(entry) for entry in bare] == [[t] for t in choice.token_ids]


def test_an_unlikely_token_is_told_beside_the_alternatives(llm: LLM) -> None:
    drawn = SamplingParams(temperature=50.0, seed=3, max_tokens=8, ignore_eos=True, logprobs=1)
    choice = one(llm.generate(PROMPTS[0], drawn)).outputs[0]
    assert choice.logprobs is not None
    ranks = [entry[token].rank for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
    assert None in ranks
    for token, entry, rank in zip(choice.token_ids, choice.logprobs, ranks, strict=True):
        assert len(entry) == (2 if rank is None else 1)
        assert next(iter(entry)) == token


def test_prompt_logprobs_are_those_of_the_prompt(llm: LLM) -> None:
    output = one(llm.generate(PROMPTS[0], greedy(prompt_logprobs=1, max_tokens=4)))
    values, ids = output.prompt_logprobs, output.prompt_token_ids
    assert values is not None
    assert (len(values), values[0], output.outputs[0].logprobs) == (len(ids), None, None)
    for place in range(1, len(ids)):
        # The same token as the only output after the same beginning.
        entry = values[place]
        assert entry is not None
        forced = greedy(logprobs=1, max_tokens=1, logit_bias={ids[place]: 100.0})
        alone = one(llm.generate([ids[:place]], forced)).outputs[0]
        assert alone.token_ids == [ids[place]]
        assert alone.logprobs == [entry]


def test_ends_are_told_as_vllm_tells_them(llm: LLM) -> None:
    text = one(llm.generate(PROMPTS[0], greedy(max_tokens=24))).outputs[0]
    stop = next(text.text[i : i + 3] for i in range(4, 20) if text.text[i : i + 3].isascii())
    cut = one(llm.generate(PROMPTS[0], greedy(max_tokens=24, stop=stop))).outputs[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text == text.text.partition(stop)[0]
    assert cut.token_ids == text.token_ids[: len(cut.token_ids)]
    shown = greedy(max_tokens=24, stop=[stop], include_stop_str_in_output=True)
    assert one(llm.generate(PROMPTS[0], shown)).outputs[0].text == cut.text + stop
    by_id = greedy(max_tokens=24, stop_token_ids=[text.token_ids[2]])
    ended = one(llm.generate(PROMPTS[0], by_id)).outputs[0]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", text.token_ids[2])
    by_eos = SamplingParams(temperature=0, logit_bias={IM_END: 100.0})
    over = one(llm.generate(PROMPTS[0], by_eos)).outputs[0]
    assert (over.text, over.token_ids, over.finish_reason, over.stop_reason) == ("", [IM_END], "stop", None)
    silent = one(llm.generate(PROMPTS[0], greedy(detokenize=False))).outputs[0]
    assert (silent.text, silent.token_ids) == ("", text.token_ids[:8])


def test_a_chat_is_its_rendered_prompt(llm: LLM, engine: Engine) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    output = one(llm.chat(chat, GREEDY))
    native = engine.chat(chat, {"temperature": 0, "max_tokens": 8, "ignore_eos": True})
    assert output.outputs[0].token_ids == native["output_ids"]
    assert output.prompt == (
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    several = llm.chat([chat, chat[:1], [*chat, {"role": "assistant", "content": "It is"}]], GREEDY)
    assert [o.outputs for o in several[:2]] == [output.outputs] * 2
    bare = one(llm.chat(chat, GREEDY, add_generation_prompt=False))
    assert bare.prompt is not None
    assert output.prompt == bare.prompt + "<|im_start|>assistant\n"
    left_open = one(
        llm.chat([*chat, {"role": "assistant", "content": "It is"}], GREEDY, continue_final_message=True)
    )
    assert left_open.prompt == output.prompt + "It is"


def test_the_cache_is_told_and_can_be_forgotten(llm: LLM) -> None:
    llm.generate(PROMPTS[0], GREEDY)
    again = one(llm.generate(PROMPTS[0], GREEDY))
    assert again.num_cached_tokens == len(again.prompt_token_ids) - 1
    salted = {"prompt": PROMPTS[0], "cache_salt": "other"}
    assert one(llm.generate(salted, GREEDY)).num_cached_tokens == 0
    assert llm.reset_prefix_cache()
    assert one(llm.generate(PROMPTS[0], GREEDY)).num_cached_tokens == 0


def test_an_embedding_is_the_same_alone_cached_and_in_a_list(llm: LLM, engine: Engine) -> None:
    alone = llm.embed(PROMPTS[0])[0]
    listed = llm.embed(PROMPTS)
    assert listed[0].outputs.embedding == alone.outputs.embedding
    assert [e["embedding"] for e in engine.encode(PROMPTS)] == [o.outputs.embedding for o in listed]
    assert engine.encode(PROMPTS[0])["embedding"] == alone.outputs.embedding
    assert math.isclose(sum(x * x for x in alone.outputs.embedding), 1.0, rel_tol=1e-5)
    assert alone.outputs.hidden_size == 64
    mean = llm.embed(PROMPTS[0], pooling="mean")[0]
    assert mean.outputs.embedding != alone.outputs.embedding
    assert llm.embed([[5, 6, 7]])[0].prompt_token_ids == [5, 6, 7]
    with pytest.raises(BadRequest, match="max"):
        llm.embed(PROMPTS, pooling="max")  # type: ignore[arg-type]


def test_more_prompts_than_may_wait_are_all_answered(model: str) -> None:
    many = [[3 + i % 300, 5, 7] for i in range(200)]
    with LLM(
        model, max_queued_requests=3, max_num_seqs=2, max_total_tokens=512, log_level="warning"
    ) as small:
        outputs = small.generate(many, greedy(max_tokens=2))
        assert [o.prompt_token_ids for o in outputs] == many
        with ThreadPoolExecutor(4) as pool:
            several = list(pool.map(lambda _: small.generate(many[:40], greedy(max_tokens=2)), range(4)))
        assert [[o.outputs for o in found] for found in several] == [[o.outputs for o in outputs[:40]]] * 4


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"temperature": -1}, "temperature must be from 0.0"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n must be from 1"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"logprobs": 21}, "logprobs must be from 0 to 20, got 21"),
        ({"logprobs": -1, "prompt_logprobs": 2}, "logprobs must be from 0 to 20, got -1"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be from 0 to 20, got 21"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids must be|stop token id must be from 0 to 330"),
        ({"logit_bias": {5: 1e9}}, "logit_bias"),
        ({"bad_words": ["a"]}, "bad_words is not supported: logit_bias"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "two constraints"),
        ({"structured_outputs": {}}, "structured_outputs holds no constraint"),
        ({"structured_outputs": {"regexp": "a"}}, "regexp"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not supported: cut"),
        ({"best_of": 3}, "best_of must equal n, which is 1, got 3"),
        ({"include_stop_str_in_output": True, "stop_token_ids": [5]}, "include_stop_str_in_output"),
    ],
)
def test_a_wrong_parameter_is_named(llm: LLM, values: dict[str, Any], text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        llm.generate(PROMPTS, SamplingParams(**values))


def test_unknown_names_are_python_errors() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    assert SamplingParams(bad_words=[], seed=-1, best_of=1).native().get("seed") is None


@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        ([""], "empty"),
        ("a\ud800", "lone surrogate"),
        ([[10**6]], "must be from 0 to 330, got 1000000"),
        ({"prompt_token_ids": []}, "empty"),
        ({"text": "a"}, "'text'"),
        ({"prompt": "a", "multi_modal_data": {}}, "multi_modal_data"),
        ({"cache_salt": "a"}, "neither"),
        ([5.5], "prompt"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
    ],
)
def test_a_wrong_prompt_is_named(llm: LLM, prompts: Any, text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        llm.generate(prompts, GREEDY)


def test_wrong_calls_are_named(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="one entry for each of the 2 prompts, got 1"):
        llm.generate(PROMPTS[:2], [GREEDY])
    with pytest.raises(BadRequest, match="got dict"):
        llm.generate(PROMPTS[:1], [{"temperature": 0}])  # type: ignore[list-item]
    with pytest.raises(BadRequest, match="got dict"):
        llm.generate(PROMPTS[:1], {"temperature": 0})  # type: ignore[arg-type]
    with pytest.raises(ContextTooLong, match="512"):
        llm.generate([[5] * 600, [5]], GREEDY)
    with pytest.raises(BadRequest, match="role"):
        llm.chat([{"role": "king", "content": "a"}], GREEDY)
    with pytest.raises(BadRequest, match="must not be empty"):
        llm.chat([], GREEDY)
    with pytest.raises(BadRequest, match="exclude each other"):
        llm.chat(
            [{"role": "assistant", "content": "a"}], add_generation_prompt=True, continue_final_message=True
        )
    with pytest.raises(BadRequest, match="priority must have one entry for each of the 2 prompts, got 1"):
        llm.generate(PROMPTS[:2], GREEDY, priority=[0])
    with pytest.raises(BadRequest, match="priority must be 0 or null, got 3"):
        llm.generate(PROMPTS[:2], GREEDY, priority=[0, 3])
    assert len(llm.generate(PROMPTS, GREEDY, priority=[0] * 5)) == 5


def test_the_engine_takes_the_same_parameters(llm: LLM, engine: Engine) -> None:
    params = SamplingParams(
        temperature=0.8, seed=4, stop="zz", max_tokens=None, min_tokens=2, ignore_eos=True
    )
    answer = engine.generate(input_ids=[5] * 500, sampling_params=params)
    output = one(llm.generate([[5] * 500], params))
    assert answer["output_ids"] == output.outputs[0].token_ids
    with pytest.raises(BadRequest, match="logprobs is for LLM; here use return_logprob=True"):
        engine.generate(PROMPTS[0], SamplingParams(logprobs=1))


def test_ctrl_c_aborts_the_call_and_nothing_else(llm: LLM) -> None:
    def press() -> None:
        ask = llm._runtime.service.client.ask
        while not llm._runtime.run(ask("state"))["running"]:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS * 400, greedy(max_tokens=400))
    assert len(llm.generate(PROMPTS, GREEDY)) == 5


def test_the_tokenizer_is_the_models(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.encode(PROMPTS[0]).ids == one(llm.generate(PROMPTS[0], GREEDY)).prompt_token_ids


def children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True)}


def test_the_collector_ends_it(model: str) -> None:
    before = children()
    own = LLM(model, max_total_tokens=512, log_level="warning")
    assert len(children() - before) >= 3
    del own
    deadline = time.monotonic() + 10
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert children() <= before
    closed = LLM(model, max_total_tokens=512, log_level="warning")
    closed.shutdown()
    closed.close()
    assert children() <= before
    with pytest.raises(Unavailable, match="shut down"):
        closed.generate(PROMPTS, GREEDY)


def test_what_cannot_start_says_why(model: str, tmp_path: Path) -> None:
    before = children()
    for options, kind, text in (
        ({"pipeline_parallel_size": 2}, ConfigError, "pipeline_parallel_size"),
        ({"nonsense": 2}, ConfigError, "unknown option 'nonsense'"),
        ({"max_model_len": -3}, ConfigError, "context.length"),
        ({"max_total_tokens": 2**31 - 1}, SapwoodError, r"max.total.tokens"),
    ):
        with pytest.raises(kind, match=text):
            LLM(model, **options)
    with pytest.raises(ModelError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))
    assert children() == before


def test_priorities_are_vllms(model: str, llm: LLM) -> None:
    """Where the lowest goes first; that it does: tests/process/test_isolation.py."""
    with LLM(model, scheduling_policy="priority", max_num_seqs=1, log_level="warning") as ordered:
        chosen = ordered._runtime.service.config
        assert (chosen.schedule_policy, chosen.schedule_low_priority_values_first) == ("priority", True)
        outputs = ordered.generate(PROMPTS, GREEDY, priority=[2, -5, 0, 9, 1])
    assert [told(output) for output in outputs] == [told(output) for output in llm.generate(PROMPTS, GREEDY)]
