"""What a request's types do not say of it, for the OpenAPI document: ranges, and which fields go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sapwood.srt.params import (
    MAX_BIASES,
    MAX_LOGPROB_IDS,
    MAX_N,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
)
from sapwood.srt.server.chat_prompt import MAX_MESSAGES
from sapwood.srt.server.constraints import KINDS, MAX_WHITESPACE
from sapwood.srt.server.parts import MAX_PARTS
from sapwood.srt.server.sampling import MAX_NAME_CHARS, MAX_TIMEOUT
from sapwood.srt.server.score import MAX_CHOICES, OF_OUTPUT
from sapwood.srt.server.service import ANY_MODEL, Service
from sapwood.srt.server.tenants import (
    MAX_KEEP,
    MAX_PRIORITY,
    MAX_PROGRAM_CHARS,
    MAX_QUEUE_TIMEOUT,
    MAX_SALT_CHARS,
    MIN_PRIORITY,
)
from sapwood.srt.server.tools import MAX_TOOLS

Schema = dict[str, Any]

_INT32 = 2**31 - 1
_CHOICES = {"minimum": 1, "maximum": MAX_N}
_LOGPROBS = {"minimum": 0, "maximum": MAX_TOP_LOGPROBS}
_TOKENS = {"minimum": 0, "maximum": _INT32}
_AT_LEAST_ONE = {"minimum": 1, "maximum": _INT32}
_STOP = {"minLength": 1, "maxLength": MAX_STOP_CHARS}
_STOPS: Schema = {**_STOP, "maxItems": MAX_STOPS, "items": {"type": "string", **_STOP}}

_TYPES = ("text", "json_object")
_RESPONSE_FORMAT: Schema = {
    "anyOf": [
        {"type": "null"},
        *({"required": ["type"], "properties": {"type": {"const": kind}}, "additionalProperties": False}
          for kind in _TYPES),
        {"required": ["type", "json_schema"],
         "properties": {"type": {"const": "json_schema"}, "json_schema": {"required": ["schema"]}},
         "additionalProperties": False},
        {"required": ["type"], "properties": {"type": {"const": "structural_tag"}}},
    ]
}  # fmt: skip

_FIELDS: dict[str, Schema] = {
    "n": _CHOICES,
    "best_of": _CHOICES,
    "max_tokens": _TOKENS,
    "max_completion_tokens": _AT_LEAST_ONE,
    "max_new_tokens": _TOKENS,
    "min_tokens": _TOKENS,
    "min_new_tokens": _TOKENS,
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**62},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"minimum": MIN_REPETITION_PENALTY, "maximum": 100},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "logit_bias": {
        "maxProperties": MAX_BIASES,
        "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "stop": _STOPS,
    "stop_regex": _STOPS,
    "logprobs": _LOGPROBS,
    "top_logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "top_logprobs_num": _LOGPROBS,
    "logprob_start_len": {"minimum": -1, "maximum": _INT32},
    "timeout": {"exclusiveMinimum": 0, "maximum": MAX_TIMEOUT},
    "queue_timeout": {"exclusiveMinimum": 0, "maximum": MAX_QUEUE_TIMEOUT},
    "priority": {"minimum": MIN_PRIORITY, "maximum": MAX_PRIORITY},
    "keep": {"minimum": 0, "maximum": MAX_KEEP},
    "rid": {"pattern": f"^[!-~]{{1,{MAX_NAME_CHARS}}}$"},
    "cache_salt": {"minLength": 1, "maxLength": MAX_SALT_CHARS},
    "program": {"pattern": f"^[!-~]{{1,{MAX_PROGRAM_CHARS}}}$"},
    "messages": {"minItems": 1, "maxItems": MAX_MESSAGES},
    "tools": {"maxItems": MAX_TOOLS},
    "json_whitespace": {"minimum": 0, "maximum": MAX_WHITESPACE},
    "choices": {"minItems": 1},
    "guided_choice": {"minItems": 1},
    "response_format": _RESPONSE_FORMAT,
    "score": {"minItems": 1, "maxItems": MAX_CHOICES},
}
"""Of the fields of that name in every request; null is allowed all the same."""


_NULL: Schema = {"type": "null"}
_NOTHING: Schema = {"enum": [None, {}]}
_TRUE: Schema = {"const": True}


def _fields(**schemas: Schema) -> Schema:
    """A request whose fields fit, where they are there."""
    return {"properties": schemas}


def _with(name: str, **schemas: Schema) -> Schema:
    """A request that has `name`, not null."""
    return {"required": [name], **_fields(**{name: {"not": _NULL}, **schemas})}


def _needs(name: str, other: str) -> Schema:
    """`name` only with `other`: true."""
    return {"anyOf": [_with(other, **{other: _TRUE}), _fields(**{name: _NULL})]}


def _prompt_or_chat(add_special_tokens: Schema) -> Schema:
    """A text or a chat, whose `add_special_tokens` must fit."""
    chat = _with("messages", prompt=_NULL, add_special_tokens=add_special_tokens)
    return {"oneOf": [_with("prompt", messages=_NULL, **_OF_CHATS), chat]}


_OF_CHATS = {
    "add_generation_prompt": _NULL, "continue_final_message": _NULL, "chat_template_kwargs": _NULL,
}  # fmt: skip
_ONE_END = {
    "not": _with("continue_final_message", continue_final_message=_TRUE, add_generation_prompt=_TRUE)
    | {"required": ["continue_final_message", "add_generation_prompt"]}
}


def _at_most_one(names: Sequence[str]) -> Schema:
    """A request has at most one of these."""
    free = [_fields(**{name: _NULL for name in names if name != one}) for one in names]
    return {"anyOf": free}


_ONE_CONSTRAINT = _at_most_one([*KINDS, "structured_outputs"])
_SCORED: Schema = {
    "anyOf": [
        _fields(score=_NULL),
        _fields(
            text={"not": {"type": "array"}},
            input_ids={"not": {"type": "array", "minItems": 1, "items": {"type": "array"}}},
            **{name: {"enum": [*neutral]} for name, neutral in OF_OUTPUT.items()},
        ),
    ]
}
"""Choices come after one prompt, and nothing is drawn."""
_ONE_PROMPT: Schema = {
    "oneOf": [
        _with("text", input_ids=_NULL, input=_NULL, chat_template_kwargs=_NOTHING),
        _with("input_ids", text=_NULL, input=_NULL, chat_template_kwargs=_NOTHING),
        _with("input", text=_NULL, input_ids=_NULL),
    ]
}
_SPECIAL_OR_MESSAGE: Schema = {
    "oneOf": [
        _with("special", role=_NULL, text=_NULL, content=_NULL, open={"const": False}),
        _with("role", special=_NULL)
        | {"oneOf": [_with("text", content=_NULL), _with("content", text=_NULL)]},
    ]
}
_STREAMED = [_needs("stream_options", "stream")]

_TOGETHER: dict[str, list[Schema]] = {
    "AbortRequest": [{"oneOf": [_with("rid"), _with("abort_all", abort_all=_TRUE)]}],
    "ChatMessage": [{"anyOf": [_with("content"), _fields(role={"const": "assistant"})]}],
    "ChatRequest": [_ONE_END, _needs("top_logprobs", "logprobs"), _ONE_CONSTRAINT, *_STREAMED],
    "CompletionRequest": [_ONE_CONSTRAINT, *_STREAMED],
    "NativeSampling": [_ONE_CONSTRAINT],
    "GenerateRequest": [_ONE_PROMPT, _SCORED],
    "TokenizeRequest": [_prompt_or_chat({"enum": [None, False]}), _ONE_END],
    "ExplainRequest": [_prompt_or_chat(_NULL), _ONE_END],
}


def tighten(components: dict[str, Schema], requests: Sequence[str], service: Service) -> None:
    """Say more of the `requests` among `components`, which `service` answers."""
    token: Schema = {"type": "integer", "minimum": 0, "maximum": service.source.vocab_size - 1}
    ids = {"type": "array", "minItems": 1, "items": token}
    lists = {"type": "array", "minItems": 1, "items": ids}
    texts = {"type": "array", "minItems": 1, "items": {"type": "string"}}
    prompts = {"anyOf": [{"type": "string"}, texts, ids, lists]}
    fields = _FIELDS | {
        "model": {"enum": [*dict.fromkeys((None, "", ANY_MODEL, service.model))]},
        "dimensions": {"enum": [*dict.fromkeys((None, service.hidden_size))]},
        "stop_token_ids": {"maxItems": MAX_LOGPROB_IDS, "items": token},
        "token_ids_logprob": {"maxItems": MAX_LOGPROB_IDS},
        "tokens": {"items": token},
        "input": prompts,
        "input_ids": {"anyOf": [ids, lists, _NULL]},
    }
    if not service.tenants.orders_by_priority:
        fields["priority"] = {"enum": [None, 0]}
    if service.config.disable_radix_cache:
        fields["keep"] = {"enum": [None, 0]}
    for name in requests:
        properties = components[name]["properties"]
        for field in properties.keys() & fields.keys():
            properties[field].update(fields[field])
        if name in _TOGETHER:
            components[name]["allOf"] = _TOGETHER[name]
    components["CompletionRequest"]["properties"]["prompt"] = prompts
    choice = {"anyOf": [{"type": "string", "minLength": 1}, ids]}
    components["GenerateRequest"]["properties"]["score"]["items"] = choice
    _tighten_parts(components, token)
    components["ExplainRequest"]["properties"]["prompt"].update(minItems=1, items=token)
    components["ChatRequest"]["properties"]["max_tokens"].update(_AT_LEAST_ONE)


def _tighten_parts(components: dict[str, Schema], token: Schema) -> None:
    pieces: list[Schema] = [{"type": "string"}, {"type": "array", "items": token}]
    contents = {"type": "array", "maxItems": MAX_PARTS, "items": {"anyOf": pieces}}
    components["InputPart"]["allOf"] = [_SPECIAL_OR_MESSAGE]
    components["InputPart"]["properties"]["content"]["anyOf"] = [{"type": "string"}, contents, _NULL]
    items = {"anyOf": [*pieces, token, {"$ref": "#/components/schemas/InputPart"}]}
    parts = {"type": "array", "minItems": 1, "maxItems": MAX_PARTS, "items": items}
    components["GenerateRequest"]["properties"]["input"]["anyOf"] = [parts, _NULL]
