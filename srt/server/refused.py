"""Fields that other servers obey and this one does not: refused with a reason, unless they ask for nothing.

They are known by name so that a client which always sends them, with null or with their default, is served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from sapwood.srt.errors import BadRequest

T = TypeVar("T", bound=msgspec.Struct)


class Refused(NamedTuple):
    """`quiet` are the values that ask for what happens anyway (by type too: 0 is not false)."""

    reason: str
    quiet: tuple[Any, ...] = (None,)


NOT_YET = "is not supported yet"
ONE_MODEL = "is not supported: one model without adapters is served"
NO_TRANSFER = "is not supported: prompts are computed and answered by one server"
TEXT_ONLY = "is not supported: the model reads text only"
NO_CODE = "is not supported: a request cannot bring code"
_WHITE_SPACE = "is not supported: json_whitespace bounds white space"
NO_SESSIONS = "is not supported: what a request shares with earlier ones is found by its prefix"

EVERYWHERE: dict[str, Refused] = {
    "lora_path": Refused(ONE_MODEL),
    "session_params": Refused(NO_SESSIONS),
    "return_hidden_states": Refused("is not supported: /v1/embeddings gives pooled ones", (None, False)),
    "custom_logit_processor": Refused(NO_CODE),
    "extra_key": Refused("is not supported: cache_salt keeps prefixes apart"),
    "data_parallel_rank": Refused("is not supported: there is one scheduler"),
    "bootstrap_host": Refused(NO_TRANSFER),
    "bootstrap_port": Refused(NO_TRANSFER),
    "bootstrap_room": Refused(NO_TRANSFER),
}
"""Of `/generate` and the OpenAI routes (from SGLang)."""

SAMPLING: dict[str, Refused] = {
    "no_stop_trim": Refused(
        "is not supported: the text ends before the stop string, which matched_stop has", (None, False)
    ),
    "spaces_between_special_tokens": Refused(
        "is not supported: tokens are joined as the model's tokenizer says", (None, True)
    ),
    "custom_params": Refused(NO_CODE),
}
"""Of SGLang's `sampling_params`, which its OpenAI routes take too."""

_NO_FORMAT = Refused("is not supported here: json_schema in sampling_params takes a schema")
NATIVE_SAMPLING: dict[str, Refused] = {
    **SAMPLING,
    "response_format": _NO_FORMAT,
    "guided_whitespace_pattern": Refused(_WHITE_SPACE),
}
"""Of the `sampling_params` of `/generate`."""

NATIVE: dict[str, Refused] = {
    **EVERYWHERE,
    "input_embeds": Refused("is not supported: a prompt is text or token ids"),
    "image_data": Refused(TEXT_ONLY, (None, [])),
    "video_data": Refused(TEXT_ONLY, (None, [])),
    "audio_data": Refused(TEXT_ONLY, (None, [])),
    "modalities": Refused(TEXT_ONLY, (None, [], ["text"])),
    "log_metrics": Refused("is not supported: every request counts", (None, True)),
    "background": Refused("is not supported: a request ends with its connection", (None, False)),
    "conversation_id": Refused(NO_SESSIONS),
    "response_format": _NO_FORMAT,
}

OPENAI: dict[str, Refused] = {
    **EVERYWHERE,
    **SAMPLING,
    "allowed_token_ids": Refused(NOT_YET),
    "bad_words": Refused("is not supported: logit_bias takes token ids", (None, [])),
    "use_beam_search": Refused("is not supported", (None, False)),
    "length_penalty": Refused("is not supported: there is no beam search", (None, 1, 1.0)),
    "include_stop_str_in_output": Refused(
        "is not supported: the text ends before the stop string, which matched_stop has", (None, False)
    ),
    "truncate_prompt_tokens": Refused("is not supported: cut the prompt before you send it"),
    "logits_processors": Refused(NO_CODE, (None, [])),
    "guided_whitespace_pattern": Refused(_WHITE_SPACE),
    "guided_decoding_backend": Refused(
        "is not supported: there is one engine", (None, "auto", "guidance", "llguidance", "xgrammar")
    ),
    "kv_transfer_params": Refused(NO_TRANSFER),
    "vllm_xargs": Refused(NO_CODE, (None, {})),
    "request_id": Refused("is not supported: the name of a request is rid"),
}

TEMPLATES: dict[str, Refused] = {
    "chat_template": Refused("cannot come with a request: templates come from --chat-template"),
    "documents": Refused("is not supported: put what the model shall read into the messages", (None, [])),
    "mm_processor_kwargs": Refused(TEXT_ONLY, (None, {})),
}
"""Of everything that takes chat messages."""

CHAT: dict[str, Refused] = {
    **OPENAI,
    **TEMPLATES,
    "add_special_tokens": Refused(
        "is not supported in a chat: the template writes special tokens", (None, False)
    ),
    "echo": Refused("is not supported in a chat: /v1/completions has it", (None, False)),
    "best_of": Refused("is not supported in a chat: /v1/completions has it", (None, 1)),
    "audio": Refused("is not supported: answers are text"),
    "function_call": Refused("is not supported: tool_choice is its newer name", (None, "none")),
    "functions": Refused("is not supported: tools is its newer name", (None, [])),
    "modalities": Refused("is not supported: answers are text", (None, ["text"])),
    "prediction": Refused("is not supported"),
    "reasoning_effort": Refused(
        "is not supported: what a template has is set in chat_template_kwargs", (None, "none")
    ),
    "separate_reasoning": Refused(
        "is not supported: --reasoning-parser none leaves the reasoning in the content", (None, True)
    ),
    "stream_reasoning": Refused("is not supported: the reasoning is streamed", (None, True)),
    "verbosity": Refused("is not supported", (None, "medium")),
    "web_search_options": Refused("is not supported: no URL is ever fetched"),
}

COMPLETION: dict[str, Refused] = {
    **OPENAI,
    "suffix": Refused("is not supported: the model is not asked to fill a gap", (None, "")),
}


def fields(table: Mapping[str, Refused]) -> Callable[[type[T]], type[T]]:
    """Adds the fields of `table` to a request's struct."""

    def widen(kind: type[T]) -> type[T]:
        return widened(kind, [(name, Any, None) for name in table], {"__refused__": table})

    return widen


def widened(
    kind: type[T], added: Sequence[tuple[str, Any, Any]], namespace: Mapping[str, Any] | None = None
) -> type[T]:
    """A request's struct with further fields (name, type, default)."""
    # msgspec makes a type only of what a class statement or this call names.
    return msgspec.defstruct(  # type: ignore[return-value]
        kind.__name__,
        [*added],
        bases=(kind,),
        module=kind.__module__,
        namespace={"__doc__": kind.__doc__, **(namespace or {})},
        forbid_unknown_fields=True,
        kw_only=True,
    )


def table_of(kind: type) -> Mapping[str, Refused]:
    """The fields that were added to a request's struct."""
    return getattr(kind, "__refused__", {})


def check(request: msgspec.Struct) -> None:
    """Raises BadRequest for the first refused field that asks for something."""
    for name, refused in table_of(type(request)).items():
        value = getattr(request, name)
        if not any(value == quiet and type(value) is type(quiet) for quiet in refused.quiet):
            raise unsupported(name, refused.reason)


def unsupported(name: str, reason: str = NOT_YET) -> BadRequest:
    return BadRequest(f"{name} {reason}", param=name, code="unsupported")
