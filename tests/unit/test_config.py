"""One struct gives flags, environment variables, defaults, limits and help."""

from __future__ import annotations

import argparse
import re
import typing
from pathlib import Path

import msgspec
import pytest

import sapwood
from sapwood.srt import config
from sapwood.srt.config import Config
from sapwood.srt.errors import ConfigError
from sapwood.srt.flags import command_line, configuration
from sapwood.srt.flags.values import load

FIELDS = config.fields()
NUMBERS = [(name, flag) for name, _kind, flag in FIELDS if flag.low is not None or flag.high is not None]


def parse(*argv: str, environ: dict[str, str] | None = None) -> Config:
    read = command_line.read(argv)
    assert read.rest == []
    return load(read.values, environ or {})


def test_nothing_given_is_the_default() -> None:
    assert parse() == Config()


def test_every_field_says_what_it_is() -> None:
    assert [name for name, _, _ in FIELDS] == list(Config.__struct_fields__)
    for name, kind, flag in FIELDS:
        assert flag.help, name
        if kind in (int, float) and name != "random_seed":
            assert flag.low is not None and flag.high is not None, name  # noqa: PT018


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--model-path", "/m"], "model_path", "/m"),
        (["--model", "/m"], "model_path", "/m"),
        (["--served-model-name", "x"], "served_model_name", "x"),
        (["--host", "0.0.0.0"], "host", "0.0.0.0"),
        (["--port", "0"], "port", 0),
        (["--max-running-requests", "3"], "max_running_requests", 3),
        (["--max-total-tokens", "600"], "max_total_tokens", 600),
        (["--mem-fraction-static", "0.25"], "mem_fraction_static", 0.25),
        (["--chunked-prefill-size", "-1"], "chunked_prefill_size", -1),
        (["--schedule-policy", "fcfs"], "schedule_policy", "fcfs"),
        (["--disable-radix-cache"], "disable_radix_cache", True),
        (["--disable-overlap-schedule"], "disable_overlap_schedule", True),
        (["--no-split-special-tokens"], "split_special_tokens", False),
        (["--skip-tokenizer-init"], "skip_tokenizer_init", True),
        (["--context-length", "2048"], "context_length", 2048),
        (["--kv-cache-dtype", "float16"], "kv_cache_dtype", "float16"),
        (["--dtype", "float32"], "dtype", "float32"),
        (["--quantization", "w4"], "quantization", "w4"),
        (["--no-weight-cache"], "weight_cache", False),
        (["--context-length", "8k"], "context_length", 8000),
        (["--context_length=1.5K"], "context_length", 1536),
        (["--max-total-tokens", "1M"], "max_total_tokens", 2**20),
    ],
)
def test_a_flag_sets_its_field(argv: list[str], name: str, value: object) -> None:
    chosen = parse(*argv)
    assert getattr(chosen, name) == value
    assert chosen == msgspec.structs.replace(Config(), **{name: value})


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("SAPWOOD_PORT", "8000", "port", 8000),
        ("SAPWOOD_MODEL_PATH", "8000", "model_path", "8000"),
        ("SAPWOOD_DISABLE_RADIX_CACHE", "true", "disable_radix_cache", True),
        ("SAPWOOD_DISABLE_RADIX_CACHE", "0", "disable_radix_cache", False),
        ("SAPWOOD_CPU_ISA", "portable", "cpu_isa", "portable"),
        ("SAPWOOD_MEM_FRACTION_STATIC", "0.9", "mem_fraction_static", 0.9),
        ("SAPWOOD_CONTEXT_LENGTH", "128", "context_length", 128),
        ("SAPWOOD_CONTEXT_LENGTH", "2K", "context_length", 2048),
    ],
)
def test_an_environment_variable_sets_its_field(variable: str, text: str, name: str, value: object) -> None:
    assert getattr(parse(environ={variable: text}), name) == value


def test_a_flag_beats_its_environment_variable() -> None:
    environ = {"SAPWOOD_PORT": "8000", "SAPWOOD_DISABLE_RADIX_CACHE": "true"}
    chosen = parse("--port", "9000", "--no-disable-radix-cache", environ=environ)
    assert (chosen.port, chosen.disable_radix_cache) == (9000, False)


@pytest.mark.parametrize(
    ("variable", "text"),
    [("SAPWOOD_PORT", "http"), ("SAPWOOD_CPU_ISA", "neon"), ("SAPWOOD_DISABLE_RADIX_CACHE", "perhaps")],
)
def test_a_wrong_environment_variable_is_named(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} must be .*, got '{text}'"):
        parse(environ={variable: text})


@pytest.mark.parametrize(("name", "flag"), NUMBERS, ids=[name for name, _ in NUMBERS])
def test_a_number_beyond_its_limits_is_told_with_them(name: str, flag: config.Flag) -> None:
    for limit, wrong in ((flag.low, -1), (flag.high, +1)):
        if limit is None:
            continue
        kind = int if float(limit).is_integer() and name not in ("mem_fraction_static",) else float
        assert getattr(config.make(**{name: kind(limit)}), name) == limit
        with pytest.raises(ConfigError) as caught:
            config.make(**{name: kind(limit) + wrong})
        assert caught.value.param == name
        for part in (config.option(name), str(flag.low), str(flag.high), str(kind(limit) + wrong)):
            assert part in caught.value.message


@pytest.mark.parametrize("length", [1, 0, -1, 10**9])
def test_a_silly_context_length_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=f"--context-length must be from 2 to 16777216, got {length}"):
        parse("--context-length", str(length))


def test_what_nobody_chooses_is_as_the_device_wants_it() -> None:
    nobody, somebody = config.make(), config.make(max_running_requests=3, chunked_prefill_size=-1)
    assert (nobody.on("cpu").rows, nobody.on("cpu").chunk) == (64, 256)
    assert (nobody.on("cuda").rows, nobody.on("cuda").chunk) == (256, 2048)
    assert (somebody.on("cuda").rows, somebody.on("cuda").chunk) == (3, -1)
    assert nobody.on("cpu").device == "auto"
    assert nobody.only_on("cuda") == config.make(
        device="cuda", max_running_requests=256, chunked_prefill_size=2048
    )


def test_a_chunk_of_no_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="--served-model-name must not be empty"):
        config.make(served_model_name="")
    with pytest.raises(ConfigError, match="--chunked-prefill-size must be -1 or at least 1, got 0"):
        config.make(chunked_prefill_size=0)


def test_two_storages_at_once_are_refused() -> None:
    for quantization in ("w8", "gguf"):
        told = f"--quantization {quantization} and --dtype float16 both say"
        with pytest.raises(ConfigError, match=told) as caught:
            parse("--dtype", "half", "-q", quantization)
        assert caught.value.param == "quantization"
    assert parse("--quantization", "gguf", "--dtype", "auto").quantization == "gguf"
    assert parse("--quantization", "none", "--dtype", "float16").dtype == "float16"
    assert parse("--quantization", "fp8", "--dtype", "bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "--cuda-graph-max-bs 8 --disable-cuda-graph",
            "--cuda-graph-max-bs 8 and --disable-cuda-graph contr",
        ),
        (
            "--attention-backend reference --cuda-graph-max-bs 8",
            "--cuda-graph-max-bs 8 and --attention-backend reference do not go together",
        ),
        (
            "--attention-backend reference --deterministic",
            "--deterministic and --attention-backend reference do not go together",
        ),
    ],
)
def test_flags_that_cannot_both_be_had_are_refused(line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(*line.split())


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_is_refused(number: float) -> None:
    with pytest.raises(ConfigError):
        config.make(mem_fraction_static=number)


def test_python_values_are_checked_as_flags_are() -> None:
    with pytest.raises(ConfigError, match="unknown option 'tp_size'"):
        config.make(tp_size=2)
    with pytest.raises(ConfigError, match="port must be a whole number, got '30000'"):
        config.make(port="30000")
    with pytest.raises(ConfigError, match=r"schedule_policy must be lpm, .* priority or fair, got 'random'"):
        config.make(schedule_policy="random")
    with pytest.raises(ConfigError, match="model_path must be a text, got 5"):
        config.make(model_path=5)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        config.make().port = 1  # type: ignore[misc]


def test_a_configuration_travels_between_processes() -> None:
    chosen = config.make(model_path="/m", mem_fraction_static=0.25, random_seed=-(2**40))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(chosen), type=Config) == chosen


def test_the_docs_have_a_row_for_each_field() -> None:
    made = configuration.markdown()
    assert all(f"| `{config.option(name)}`" in made for name, _, _ in FIELDS)
    assert "| `--port` | `30000` | port to listen on |" in made
    page = Path(sapwood.__file__).resolve().parent.parent / "docs" / "configuration.md"
    assert page.read_text() == made, "run: python -m sapwood.srt.flags.configuration > docs/configuration.md"


def test_a_choice_is_offered_by_its_flag() -> None:
    parser = argparse.ArgumentParser()
    command_line.add_flags(parser)
    help_text = " ".join(parser.format_help().split())
    for name, kind, _flag in FIELDS:
        assert config.option(name) in help_text
        for choice in typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ():
            assert choice in help_text


def test_a_misspelt_environment_variable_is_an_error() -> None:
    with pytest.raises(ConfigError, match="SAPWOOD_PROT"):
        parse(environ={"SAPWOOD_PROT": "1"})
    assert parse(environ={"SAPWOOD_CACHE": "/x", "SAPWOOD_PORT": "5"}).port == 5


def test_every_field_is_read_somewhere() -> None:
    """A field that nothing reads would be a flag that is accepted and ignored."""
    root = Path(sapwood.__file__).resolve().parent.parent / "srt"
    text = "\n".join(
        path.read_text()
        for path in root.rglob("*.py")
        if path.parent.name != "flags" and path.name != "config.py"
    )
    read_as = {"max_running_requests": "rows", "chunked_prefill_size": "chunk"}
    unread = [
        n for n, _, _ in FIELDS if not re.search(rf"\b_?(?:config|chosen)\.{read_as.get(n, n)}\b", text)
    ]
    assert unread == []
