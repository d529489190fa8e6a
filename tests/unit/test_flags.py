"""The flags of SGLang and vLLM: each does its work, is so anyway, or is refused with the reason."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import sapwood
from sapwood.srt import config
from sapwood.srt.config import Config
from sapwood.srt.errors import ConfigError
from sapwood.srt.flags import page
from sapwood.srt.flags.command_line import read
from sapwood.srt.flags.entry import ANY, Entry
from sapwood.srt.flags.keywords import translate
from sapwood.srt.flags.table import TABLE, by_name, suggestions
from sapwood.srt.flags.values import load
from sapwood.srt.server import process, throughput

KINDS = {name: kind for name, kind, _flag in config.fields()}
WORKING = [entry for entry in TABLE if entry.action == "same"]
OTHERS = [entry for entry in TABLE if entry.action != "same"]


def flag_of(entry: Entry) -> str:
    return entry.flag


def values_of(argv: list[str]) -> dict[str, Any]:
    """What a command line sets; nothing may be left over."""
    found = read(argv)
    assert found.rest == []
    return found.values


def keywords(entry: Entry, value: Any) -> dict[str, Any]:
    return {entry.name: value}


def test_each_vocabulary_is_known() -> None:
    assert len(by_name()) == len(TABLE), [n for n, c in Counter(e.name for e in TABLE).items() if c > 1]
    for vocabulary in ("sglang", "vllm"):
        long = [e for e in TABLE if e.vocabulary in (vocabulary, "both") and not e.name.startswith("-")]
        assert len(long) >= 300, vocabulary


def test_every_target_is_a_field_and_every_refusal_has_its_reason() -> None:
    for entry in WORKING:
        assert entry.target in Config.__struct_fields__, entry.name
    for entry in OTHERS:
        assert not entry.target, entry.name
        assert len(entry.reason) > 15, entry.name
        assert entry.reason[0].islower() or entry.reason[0] in "`/KC" or entry.reason.startswith("CUDA")
        if entry.action == "anyway":
            assert entry.accepts, entry.name


def test_a_field_that_others_have_under_our_name_is_in_the_table() -> None:
    ours_alone = {
        "split_special_tokens", "tokenizer_workers", "max_body_bytes", "stream_buffer", "request_timeout",
        "log_format", "log_stats", "pooling", "drain_timeout", "heartbeat_timeout", "cpu_isa", "num_threads",
        "weight_cache", "queue_timeout", "cache_isolation", "shared_prefixes", "restart_worker",
        "json_whitespace", "program_timeout", "deterministic",
    }  # fmt: skip
    assert set(Config.__struct_fields__) - set(by_name()) == ours_alone
    for name in set(Config.__struct_fields__) & set(by_name()):
        assert by_name()[name].target == name


def sample(entry: Entry) -> tuple[Any, Any]:
    """A value for a flag that works, and what its field must become."""
    kind = KINDS[entry.target]
    if entry.becomes:
        return next((text, value) for text, value in entry.becomes.items() if value is not None)
    if config.choices(kind):
        return config.choices(kind)[-1], config.choices(kind)[-1]
    if config.plain(kind) is bool:
        return "true", True
    (flag,) = (flag for name, _, flag in config.fields() if name == entry.target)
    if config.plain(kind) is int:
        number = int(max(flag.low or 0, 7))
        return str(number), number
    if config.plain(kind) is float:
        return "0.5", 0.5
    return "text", "text"


@pytest.mark.parametrize("entry", WORKING, ids=flag_of)
def test_a_flag_that_works_sets_its_field(entry: Entry) -> None:
    text, value = sample(entry)
    expected = {entry.target: value}
    assert values_of([f"{entry.flag}={text}"]) == expected
    assert values_of([entry.flag, text]) == expected
    if entry.switch and not entry.becomes:
        assert values_of([entry.flag]) == expected
        assert values_of(["--no-" + entry.flag[2:]]) == {entry.target: not value}
    if not entry.name.startswith("-"):
        given = text if isinstance(value, bool) else value
        assert translate(keywords(entry, {"true": True, "false": False}.get(text, given))) == expected
    assert getattr(config.make(**expected), entry.target) == value


@pytest.mark.parametrize(
    ("entry", "text", "reason"),
    [(entry, text, reason) for entry in WORKING for text, reason in entry.wrong.items()],
    ids=lambda v: v.flag if isinstance(v, Entry) else v[:20],
)
def test_a_value_that_cannot_be_had_is_refused(entry: Entry, text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read([entry.flag, text])
    assert caught.value.message.startswith(f"{entry.flag} {text} is refused: {reason}")


def test_what_is_so_anyway_is_accepted() -> None:
    """That it is so: tests/process/test_cli.py."""
    for entry, text in [(other, text) for other in OTHERS for text in other.accepts]:
        argv = [entry.flag, "anything" if text == ANY and not entry.switch else text.replace(ANY, "true")]
        found = read(argv)
        assert (found.values, found.rest) == ({}, []), entry.flag
        assert entry.reason in found.notes[0], entry.flag
        if not entry.name.startswith("-"):
            value = {"true": True, "false": False}.get(argv[1], argv[1])
            assert translate(keywords(entry, value)) == {}, entry.flag


def test_a_keyword_that_is_none_asks_for_nothing() -> None:
    assert translate({entry.name: None for entry in TABLE if not entry.name.startswith("-")}) == {}


@pytest.mark.parametrize("entry", [e for e in OTHERS if ANY not in e.accepts], ids=flag_of)
def test_what_cannot_be_had_is_refused_with_the_reason(entry: Entry) -> None:
    value: Any = "false" if entry.accepts == ("true",) else "true" if entry.switch else "no-such-value"
    ways = [[entry.flag, value], [f"{entry.flag}={value}"]]
    if entry.flag.startswith("--"):
        ways.append([entry.flag.replace("-", "_").replace("__", "--"), value])
    for argv in ways:
        with pytest.raises(ConfigError) as caught:
            read(argv)
        message = caught.value.message
        assert entry.reason in message
        assert message.partition(" ")[0].strip("-").replace("no-", "").replace("_", "-").lstrip("-") in (
            entry.flag.lstrip("-").replace("no-", "")
        )
        assert "\n" not in message
        assert entry.instead in message
        assert all(text in message for text in entry.accepts if not entry.switch)
    if not entry.name.startswith("-"):
        python = {"true": True, "false": False}.get(value, value)
        with pytest.raises(ConfigError, match="is refused") as caught:
            translate(keywords(entry, python))
        assert entry.name in caught.value.message


def test_the_page_is_what_the_table_makes() -> None:
    made = page.markdown()
    assert all(f"`{entry.flag}`" in made for entry in TABLE)
    path = Path(sapwood.__file__).resolve().parent.parent / "docs" / "flags.md"
    assert path.read_text() == made, "run: python -m sapwood.srt.flags > docs/flags.md"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--model-path m --tp 1 --mem-fraction-static 0.8 --host 0.0.0.0 --port 30000 "
            "--trust-remote-code=false --page-size 1 --enable-mixed-chunk",
            {"model_path": "m", "mem_fraction_static": 0.8, "host": "0.0.0.0", "port": 30000,
             "tensor_parallel_size": 1},
        ),
        (
            "--max-model-len 8K --gpu_memory_utilization=0.6 --max-num-seqs 32 --enable-prefix-caching "
            "--enable-chunked-prefill True --max-num-batched-tokens 1k --dtype half --swap-space 0 "
            "--disable-log-requests --block-size 1 --enforce-eager -tp 1 --seed 0 --api-key k",
            {"context_length": 8192, "mem_fraction_static": 0.6, "max_running_requests": 32, "api_key": "k",
             "disable_radix_cache": False, "chunked_prefill_size": 1000, "dtype": "float16",
             "log_requests": False, "random_seed": 0, "disable_cuda_graph": True,
             "tensor_parallel_size": 1},
        ),
        ("--no-enable-prefix-caching --no-enable-chunked-prefill",
         {"disable_radix_cache": True, "chunked_prefill_size": -1}),
        ("--schedule-policy lof --schedule-conservativeness 0.3 --radix-eviction-policy lfu "
         "--stream-interval 8 --enable-priority-scheduling=false --default-priority-value 0 "
         "--abort-on-priority-when-disabled",
         {"schedule_policy": "lof", "schedule_conservativeness": 0.3, "radix_eviction_policy": "lfu",
          "stream_interval": 8}),
        ("--enable-priority-scheduling --schedule-low-priority-values-first",
         {"schedule_policy": "priority", "schedule_low_priority_values_first": True}),
        ("--scheduling-policy priority --stream-interval 4",
         {"schedule_policy": "priority", "schedule_low_priority_values_first": True, "stream_interval": 4}),
        ("--scheduling-policy fcfs", {"schedule_policy": "fcfs"}),
        ("--quantization None --served-model-name a", {"served_model_name": "a"}),
        ("--quantization gguf --load-format gguf", {"quantization": "gguf", "load_format": "gguf"}),
        ("-q w8", {"quantization": "w8"}),
        ("--decode-attention-backend flashinfer --prefill-attention-backend flashinfer",
         {"attention_backend": "flashinfer"}),
        ("--disable-decode-cuda-graph --cuda-graph-backend-decode disabled --max-cudagraph-capture-size 0",
         {"disable_cuda_graph": True}),
        ("--cuda-graph-backend-decode full", {"disable_cuda_graph": False, "device": "cuda"}),
        ("--max-cudagraph-capture-size 16", {"cuda_graph_max_bs": 16}),
        ("--chunked-prefill-size 512 --max-prefill-tokens 512", {"chunked_prefill_size": 512}),
        ("--json-model-override-args {} --compilation-config 0 --swa-full-tokens-ratio 1.0", {}),
    ],
)  # fmt: skip
def test_launch_lines_of_others(line: str, expected: dict[str, Any]) -> None:
    assert values_of(line.split()) == expected
    config.make(**expected)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("--max-model-len 100 --context-length 200", ("--max-model-len 100", "--context-length 200")),
        (
            "--enable-prefix-caching --disable-radix-cache",
            ("--enable-prefix-caching", "--disable-radix-cache"),
        ),
        ("--max-num-seqs 4 --max-num-seqs 5", ("--max-num-seqs 4", "--max-num-seqs 5")),
        (
            "--attention-backend cpu --decode-attention-backend flashinfer",
            ("--attention-backend cpu", "--decode-attention-backend flashinfer"),
        ),
        (
            "--cuda-graph-backend-decode full --enforce-eager",
            ("--cuda-graph-backend-decode full", "--enforce-eager"),
        ),
        ("--cuda-graph-backend-decode full --device cpu", ("--cuda-graph-backend-decode", "--device cpu")),
        ("--port 1 --port 2", ("--port 1", "--port 2")),
        ("--enable-chunked-prefill --chunked-prefill-size -1", ("--enable-chunked-prefill",)),
        ("--no-enable-chunked-prefill --max-num-batched-tokens 9", ("--no-enable-chunked-prefill",)),
        ("--split-special-tokens --no-split-special-tokens", ("--no-split-special-tokens",)),
        (
            "--enable-priority-scheduling --schedule-policy fcfs",
            ("--enable-priority-scheduling", "--schedule-policy fcfs"),
        ),
        ("--no-enable-priority-scheduling --schedule-policy priority", ("--schedule-policy priority",)),
        (
            "--scheduling-policy priority --no-schedule-low-priority-values-first",
            ("--scheduling-policy priority", "--no-schedule-low-priority-values-first"),
        ),
    ],
)
def test_flags_that_contradict_each_other_are_an_error(line: str, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="contradict each other") as caught:
        read(line.split())
    assert all(name in caught.value.message for name in names)


def test_keywords_that_contradict_each_other_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len 5 and context_length 6 contradict"):
        translate({"max_model_len": 5, "context_length": 6})
    assert translate({"max_model_len": 5, "context_length": 5}) == {"context_length": 5}


def test_a_key_is_never_printed() -> None:
    for line in (
        "--api-key secret1 --api-key secret2",
        "--api-key=secret1 --admin-api-key secret2 --admin-api-key secret3",
        "--api-key secret1 secret2",
        "--api-key secret1 secret2 --model m",
        "--admin-api-key secret1 m",
        "--hf-token secret1",
        "--ssl-keyfile-password secret1",
    ):
        with pytest.raises(ConfigError) as caught:
            read(line.split())
        assert "secret" not in caught.value.message, line
    with pytest.raises(ConfigError, match="hf_token is refused") as caught:
        translate({"hf_token": "secret1"})
    assert "secret" not in caught.value.message


def test_several_keys_are_one_value() -> None:
    assert translate({"api_key": ["a", "b"]}) == {"api_key": "a,b"}
    assert read(["m", "--api-key", "a", "b", "--port", "1"]).values == {"api_key": "a,b", "port": 1}
    assert read(["m", "--api-key", "a", "b", "--port", "1"]).rest == ["m"]
    assert values_of(["--model", "m", "--api-key", "a", "b"]) == {"model_path": "m", "api_key": "a,b"}
    found = read(["--api-key=a", "m"])
    assert (found.values, found.rest) == ({"api_key": "a"}, ["m"])
    with pytest.raises(ConfigError, match="--api-key is followed by 2 words"):
        read(["--api-key", "a", "m"])
    with pytest.raises(ConfigError, match="--served-model-name takes one value, got 2"):
        read(["m", "--served-model-name", "a", "b"])
    with pytest.raises(ConfigError, match="--api-key needs a value"):
        read(["m", "--api-key", "--port", "1"])


def test_a_flag_wins_over_its_variable_even_if_it_asks_for_the_default() -> None:
    size = config.default("chunked_prefill_size")
    environ = {"SAPWOOD_CHUNKED_PREFILL_SIZE": "-1"}
    assert load(values_of(["--enable-chunked-prefill"]), environ).chunked_prefill_size == size
    assert load(values_of([]), environ).chunked_prefill_size == -1
    assert translate({"enable_chunked_prefill": True}) == {"chunked_prefill_size": size}
    both = values_of(["--enable-chunked-prefill", "--chunked-prefill-size", "9", "--enable-chunked-prefill"])
    assert both == {"chunked_prefill_size": 9}


@pytest.mark.parametrize(("line", "logged"), [("", True), ("--disable-log-stats", False)])
def test_statistics_are_logged_unless_they_are_not_wanted(
    line: str, logged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SAPWOOD_LISTEN_FD", raising=False)
    monkeypatch.setattr("sapwood.srt.log.set_up", lambda *_: None)
    monkeypatch.setattr(throughput.logger, "disabled", logged)
    boot: Any = SimpleNamespace(config=config.make(**values_of(line.split())))
    with pytest.raises(ConfigError, match="SAPWOOD_LISTEN_FD"):  # it goes no further than its logs
        process.main(boot, cast("Any", None))
    assert throughput.logger.disabled is not logged


def test_keywords_of_ours_and_unknown_ones() -> None:
    given = {"model": "m", "tensor_parallel_size": 1, "num_threads": 2, "max_model_len": None}
    assert translate(given) == {"model_path": "m", "tensor_parallel_size": 1, "num_threads": 2}
    with pytest.raises(ConfigError, match=r"unknown option 'max_model_length'; did you mean max_model_len"):
        translate({"max_model_length": 5})
    with pytest.raises(ConfigError, match="unknown option 'qqqqqq'; see sapwood serve --help"):
        translate({"qqqqqq": 5})
    with pytest.raises(ConfigError, match="enable_prefix_caching is on or off"):
        translate({"enable_prefix_caching": "perhaps"})


def test_what_is_no_flag_of_the_runtime_is_left_to_the_command() -> None:
    found = read(["MODEL", "--raw", "--port", "5", "-", "-h", "--no-such", "--", "--port", "6"])
    assert found.values == {"port": 5}
    assert found.rest == ["MODEL", "--raw", "-", "-h", "--no-such", "--", "--port", "6"]
    assert read(["--seed", "5"], own=("--seed",)).rest == ["--seed", "5"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-model-len"], "--max-model-len needs a value"),
        (["--page-size"], "--page-size is refused: a page is one token"),
        (["--port", "http"], "--port must be a whole number, got 'http'"),
        (["--mem-fraction-static", "half"], "--mem-fraction-static must be a number, got 'half'"),
        (["--cpu-isa", "neon"], "--cpu-isa must be auto, amx, avx512, avx2 or portable, got 'neon'"),
        (["--skip-tokenizer-init=perhaps"], "--skip-tokenizer-init is on or off (true or false)"),
        (["--compilation-config.mode", "3"], "--compilation-config.mode 3 is refused"),
        (["--speculative-config", '{"method": "ngram"}'], "not from a second model"),
        (["--lora-paths", "a=b", "c=d", "--port", "1"], '--lora-paths ["a=b", "c=d"] is refused'),
    ],
)
def test_a_wrong_value_is_told_in_one_line(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(argv)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_a_misspelt_flag_is_recognised_in_every_vocabulary() -> None:
    assert "--max-model-len" in suggestions("--max-model-length")
    assert "--port" in suggestions("--prot")
    assert suggestions("--speculatve-algoritm")[0] == "--speculative-algorithm"
    assert suggestions("--gpu-memory-utilisation")[0] == "--gpu-memory-utilization"


def test_priorities_mean_what_they_mean_elsewhere() -> None:
    """SGLang's higher numbers go first, vLLM's lower ones."""
    assert translate({"schedule_policy": "priority"}) == {"schedule_policy": "priority"}
    assert translate({"scheduling_policy": "priority"}) == {
        "schedule_policy": "priority",
        "schedule_low_priority_values_first": True,
    }
    row = next(line for line in page.markdown().splitlines() if line.startswith("| `--scheduling-policy`"))
    assert "`priority` sets `--schedule-low-priority-values-first` to true too" in row
