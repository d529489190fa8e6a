"""The configuration: one frozen struct, from which flags, environment variables, help and docs come."""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from sapwood.srt.errors import ConfigError

_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_NO_GRAPHS = "contradict each other: give one of them"
_NOT_CAPTURED = "do not go together: no step in plain torch is captured"
_NOT_EXACT = "do not go together: sums in plain torch depend on how many rows there are"


Device = Literal["cuda", "cpu"]

_OF_DEVICE: Mapping[Device, Mapping[str, int]] = {
    # A step of them takes a tenth of a second on two cores, and some 50 ms of an 8B model on an H100.
    "cpu": {"max_running_requests": 64, "chunked_prefill_size": 256},
    "cuda": {"max_running_requests": 256, "chunked_prefill_size": 2048},
}


class Flag(msgspec.Struct, frozen=True):
    """What the command line says of one field: help text and range."""

    help: str
    low: float | None = None
    high: float | None = None


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be chosen at start. Lengths are in tokens, times in seconds."""

    model_path: Annotated[
        str | None,
        Flag("a Hugging Face folder, a .gguf file, org/name on the hub, or a name of `sapwood models`"),
    ] = None
    served_model_name: Annotated[str | None, Flag("the name that requests use (default: the model's)")] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"],
        Flag("`dummy` makes seeded random weights from the config alone"),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cuda", "cpu"], Flag("what the model runs on; auto: an NVIDIA GPU if there is one")
    ] = "auto"
    tensor_parallel_size: Annotated[
        int, Flag("workers, one a GPU (or, on a CPU, a process each), that share every layer", 1, 64)
    ] = 1
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Flag(
            "storage of the weights; auto on a CPU: a GGUF's own types, float16 for float16, float32 for "
            "float32 and bfloat16; auto on a GPU: float16 for float16, else bfloat16"
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "gguf", "w8", "w4", "fp8"],
        Flag(
            "w8, w4 (CPU): round float weights to 8 or 4 bits at load, in blocks of 32; gguf (CPU): asks for "
            "a GGUF's own types; fp8 (GPU): weights and activations in 8-bit floats"
        ),
    ] = "none"
    weight_cache: Annotated[
        bool,
        Flag("keep quantised weights as they were packed in the cache folder: the next start maps them"),
    ] = True
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16", "fp8_e4m3"],
        Flag(
            "storage of K and V; auto on a CPU: float32 if all weights are stored so, else float16; auto on "
            "a GPU: as the activations; bfloat16, fp8_e4m3: GPU"
        ),
    ] = "auto"
    context_length: Annotated[
        int | None, Flag("longest prompt plus output (default: the model's)", 2, 2**24)
    ] = None
    skip_tokenizer_init: Annotated[bool, Flag("serve token ids only")] = False
    split_special_tokens: Annotated[
        bool, Flag("encode special-token strings inside a chat message's text as plain text")
    ] = True

    host: Annotated[str, Flag("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Flag("port to listen on", 0, 65535)] = 30000
    tokenizer_workers: Annotated[int, Flag("tokenizer processes", 1, 64)] = 1
    max_body_bytes: Annotated[int, Flag("largest request body in bytes", 1024, 2**31)] = 4 * 2**20
    stream_buffer: Annotated[
        int, Flag("tokens a slow reader may lag behind before its request ends with an error", 16, 2**20)
    ] = 4096
    api_key: Annotated[
        str | None, Flag("key that every request must bring; several are separated by commas")
    ] = None
    admin_api_key: Annotated[
        str | None,
        Flag("key of the routes that look into or change the server (default: those take --api-key)"),
    ] = None
    request_timeout: Annotated[
        float | None,
        Flag(
            "seconds after which a request that has not ended gets an error; a request may ask for less",
            0.001,
            86400,
        ),
    ] = None
    log_requests: Annotated[bool, Flag("log each request's parameters and lengths, but no text")] = False
    log_stats: Annotated[bool, Flag("log rates and load every 10 s while there is something to do")] = True
    log_format: Annotated[Literal["text", "json"], Flag("one line an event, for people or for programs")] = (
        "text"
    )
    chat_template: Annotated[
        str | None, Flag("a file with the chat template to use instead of the model's")
    ] = None
    pooling: Annotated[
        Literal["last", "mean"], Flag("what /v1/embeddings makes of a prompt's hidden states")
    ] = "last"
    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3_json", "mistral", "pythonic"],
        Flag("the format of the model's tool calls; auto: what the chat template shows"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "think"],
        Flag("the format of the model's reasoning; auto: what the chat template shows"),
    ] = "auto"
    json_whitespace: Annotated[
        int,
        Flag(
            "characters of white space that a constrained JSON document may have between two tokens; "
            '0: its separators are ", " and ": "',
            0,
            64,
        ),
    ] = 0
    stream_interval: Annotated[
        int,
        Flag(
            "tokens that a stream's piece holds at least, but for its first and its last; "
            "fewer with many logprobs",
            1,
            1024,
        ),
    ] = 1
    drain_timeout: Annotated[float, Flag("seconds that running requests get after SIGTERM", 0, 86400)] = 30.0
    heartbeat_timeout: Annotated[
        float, Flag("seconds without a heartbeat after which a process counts as dead", 1, 3600)
    ] = 30.0
    restart_worker: Annotated[
        bool, Flag("when the worker dies, end what runs with an error and start another one")
    ] = False

    max_running_requests: Annotated[
        int | None, Flag("rows of a step (default: 64 on a CPU, 256 on a GPU)", 1, 4096)
    ] = None
    max_queued_requests: Annotated[int, Flag("waiting requests; one more is answered 429", 1, 1_000_000)] = (
        4096
    )
    max_total_tokens: Annotated[
        int | None, Flag("KV slots in the pool (default: see --mem-fraction-static)", 2, 2**31 - 1)
    ] = None
    mem_fraction_static: Annotated[
        float | None,
        Flag(
            "share of the memory that is left which the KV pool takes (default: on a CPU 4 contexts, at most "
            "half; on a GPU 0.9)",
            0.01,
            0.99,
        ),
    ] = None
    chunked_prefill_size: Annotated[
        int | None,
        Flag(
            "token budget of a step; longer prompts are split; -1: never split (default: 256 on a CPU, 2048 "
            "on a GPU)",
            -1,
            2**20,
        ),
    ] = None
    schedule_policy: Annotated[
        Literal["lpm", "fcfs", "dfs-weight", "lof", "priority", "fair"],
        Flag(
            "who goes next: lpm: longest cached prefix; fcfs: first come; dfs-weight: the heaviest branch of "
            "the prefix tree; lof: longest output; priority: the requests' own; fair: tenants (API keys) by "
            "what they have used. How far any request is overtaken is bounded"
        ),
    ] = "lpm"
    schedule_low_priority_values_first: Annotated[
        bool, Flag("with --schedule-policy priority, lower numbers go first")
    ] = False
    schedule_conservativeness: Annotated[
        float,
        Flag(
            "factor on the output that running requests are expected to need room for: higher admits fewer "
            "and retracts less",
            0.01,
            100,
        ),
    ] = 1.0
    queue_timeout: Annotated[
        float | None,
        Flag(
            "seconds after which a request that still waits gets an error; a request may ask for less",
            0.001,
            86400,
        ),
    ] = None
    program_timeout: Annotated[
        float,
        Flag(
            "seconds without a request after which a program (field `program`) ends, and what is kept for it "
            "may go",
            0.001,
            86400,
        ),
    ] = 60.0
    radix_eviction_policy: Annotated[
        Literal["lru", "lfu", "slru", "priority"],
        Flag(
            "what is evicted first: lru: used the longest time ago; lfu: by the fewest requests; "
            "slru: by one request only; priority: by requests of the lowest priority"
        ),
    ] = "lru"
    cache_isolation: Annotated[
        Literal["key", "none"],
        Flag("key: with several --api-key, each has a cache of its own; none: they share one"),
    ] = "key"
    shared_prefixes: Annotated[
        str | None,
        Flag(
            "a file of prompts (JSON lines) that are computed at start, stay cached, and are shared by "
            "all keys and salts"
        ),
    ] = None
    speculative_algorithm: Annotated[
        Literal["auto", "none", "ngram", "radix"],
        Flag(
            "where drafts of the next tokens come from, which never change an answer; auto: a grammar's "
            "forced text, the prefix cache, the request's own text; ngram, radix: forced text and that one"
        ),
    ] = "auto"
    speculative_num_draft_tokens: Annotated[
        int, Flag("longest draft of a row in one step; forced text may be longer", 1, 64)
    ] = 16
    disable_radix_cache: Annotated[bool, Flag("keep nothing between requests")] = False
    disable_overlap_schedule: Annotated[bool, Flag("plan a step only after the result of the last")] = False

    cpu_isa: Annotated[
        Literal["auto", "amx", "avx512", "avx2", "portable"], Flag("CPU: instruction set of the kernels")
    ] = "auto"
    num_threads: Annotated[
        int | None,
        Flag("threads of the worker, or of each rank (default: one a core, within the quota)", 1, 1024),
    ] = None
    attention_backend: Annotated[
        Literal["auto", "flashinfer", "cpu", "reference"],
        Flag("auto: flashinfer on a GPU, else cpu; reference: plain torch, slow, for checking"),
    ] = "auto"
    deterministic: Annotated[
        bool,
        Flag("GPU: attention that does not depend on the batch, somewhat slower (a CPU is always exact)"),
    ] = False
    disable_cuda_graph: Annotated[
        bool, Flag("GPU: launch each kernel of a decode step by itself (a CPU has no graphs)")
    ] = False
    cuda_graph_max_bs: Annotated[
        int | None, Flag("GPU: rows of the largest decode step that is captured (default: 256)", 1, 4096)
    ] = None
    random_seed: Annotated[
        int | None, Flag("seed of the seeds drawn for requests without one (default: from the system)")
    ] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Flag("what is logged")] = "info"

    def on(self, device: Device) -> Config:
        """With what nobody chose, and depends on what the model runs on."""
        of_device = _OF_DEVICE[device].items()
        return msgspec.structs.replace(self, **{k: v for k, v in of_device if getattr(self, k) is None})

    def only_on(self, device: Device) -> Config:
        """The same where nothing but `device` will do."""
        return msgspec.structs.replace(self.on(device), device=device)

    @property
    def rows(self) -> int:
        """Of a step, at most; of a configuration that is `on` a device."""
        assert self.max_running_requests is not None, "the device is not known yet"
        return self.max_running_requests

    @property
    def chunk(self) -> int:
        """Token budget of a step, -1 for none; of a configuration that is `on` a device."""
        assert self.chunked_prefill_size is not None, "the device is not known yet"
        return self.chunked_prefill_size

    def check(self) -> Config:
        """Return self, or raise ConfigError naming the flag, its value and the limit."""
        for name, _kind, flag in fields():
            value = getattr(self, name)
            if value is None or isinstance(value, (str, bool)):
                continue
            # Written so that NaN fails too.
            if not ((flag.low is None or value >= flag.low) and (flag.high is None or value <= flag.high)):
                raise ConfigError(
                    f"{option(name)} must be from {flag.low} to {flag.high}, got {value}", param=name
                )
        for name in ("api_key", "admin_api_key"):
            for key in split_keys(getattr(self, name)):
                # The key itself stays out of the message, which may be logged.
                if not key or not (key.isascii() and key.isprintable()) or " " in key:
                    raise ConfigError(
                        f"{option(name)}: a key must be visible ASCII without spaces, and not empty",
                        param=name,
                    )
        for name in ("model_path", "served_model_name"):
            if getattr(self, name) == "":
                raise ConfigError(f"{option(name)} must not be empty", param=name)
        if self.chunked_prefill_size == 0:
            raise ConfigError(
                "--chunked-prefill-size must be -1 or at least 1, got 0", param="chunked_prefill_size"
            )
        self._check_pairs()
        return self

    def _check_pairs(self) -> None:
        """Each field may have its value, but not beside the other's."""
        # With fp8 the dtype is that of what the weights are multiplied with.
        dtype = self.quantization not in ("none", "fp8") and self.dtype != "auto"
        sized = self.cuda_graph_max_bs is not None
        reference = self.attention_backend == "reference"
        for found, one, other, why in (
            (dtype, "quantization", "dtype", "both say how weights are stored: give one of them"),
            (sized and self.disable_cuda_graph, "cuda_graph_max_bs", "disable_cuda_graph", _NO_GRAPHS),
            (sized and reference, "cuda_graph_max_bs", "attention_backend", _NOT_CAPTURED),
            (self.deterministic and reference, "deterministic", "attention_backend", _NOT_EXACT),
        ):
            if found:
                raise ConfigError(f"{self._shown(one)} and {self._shown(other)} {why}", param=one)

    def _shown(self, name: str) -> str:
        value = getattr(self, name)
        return option(name) if value is True else f"{option(name)} {value}"


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """A model found on this machine: what every process needs to know of it, read without torch.

    `config` has the keys of a Hugging Face config.json, whatever the source. `tokenizer_file` is a
    tokenizer.json (for a GGUF one is made once and cached). `eos_ids` is the union of all the places that
    name one. `template_vars` are the strings a chat template may use (`bos_token`, `eos_token`, ...).
    """

    name: str
    format: Literal["safetensors", "gguf", "dummy"]
    path: str
    files: list[str]
    architecture: str
    config: dict[str, Any]
    vocab_size: int
    context_length: int
    eos_ids: list[int]
    tokenizer_file: str | None
    chat_template: str | None
    template_vars: dict[str, str]
    sampling_defaults: dict[str, float]


@functools.cache
def fields() -> tuple[tuple[str, Any, Flag], ...]:
    """(name, type, flag) of every field, in order."""
    hints = typing.get_type_hints(Config, include_extras=True)
    return tuple((name, *typing.get_args(hints[name])) for name in Config.__struct_fields__)


def split_keys(text: str | None) -> list[str]:
    """The keys of `--api-key` or `--admin-api-key`."""
    return [] if text is None else [key.strip() for key in text.split(",")]


def default(name: str) -> Any:
    """The value of a field that nobody chooses."""
    return Config.__struct_defaults__[Config.__struct_fields__.index(name)]


def option(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def wrong(name: str, written: str, value: Any) -> ConfigError:
    """What a field must be, and what was given as `written`."""
    listed = choices(kind_of(name))
    wanted = f"{', '.join(listed[:-1])} or {listed[-1]}" if listed else _WANTED[plain(kind_of(name))]
    return ConfigError(f"{written} must be {wanted}, got {value!r}", param=name)


def kind_of(name: str) -> Any:
    """The type of a field."""
    return next(kind for other, kind, _flag in fields() if other == name)


def make(**values: Any) -> Config:
    """A checked configuration from Python values; an unknown name or a wrong type raises ConfigError."""
    unknown = sorted(set(values) - set(Config.__struct_fields__))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}; see sapwood serve --help", param=unknown[0])
    for name, value in values.items():
        try:
            msgspec.convert(value, kind_of(name))
        except msgspec.ValidationError:
            raise wrong(name, name, value) from None
    return msgspec.convert(values, Config).check()


def plain(kind: Any) -> Any:
    """The type of a field that may be None."""
    kinds = [k for k in typing.get_args(kind) if k is not type(None)]
    return kinds[0] if kinds else kind


def choices(kind: Any) -> tuple[str, ...]:
    """The texts that a field may have; none of a field that may have others."""
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
