"""Calls in OpenAI's shapes: bodies of chats and completions, and what they are answered with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from sapwood.lang.backend import Generate, Ids, Logprobs, Output, Sampling, Scored, Segments, Text, Turn
from sapwood.lang.errors import LangError, Unsupported

Kind = Literal["openai", "sapwood", "sglang", "vllm"]
"""What an endpoint takes: OpenAI's own fields, or those of a server that adds to them."""

_PLAIN = {
    "n": "n", "temperature": "temperature", "top_p": "top_p", "seed": "seed", "stop": "stop",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
}  # fmt: skip
_ADDED = {
    "min_new_tokens": "min_tokens", "top_k": "top_k", "min_p": "min_p", "stop_token_ids": "stop_token_ids",
    "repetition_penalty": "repetition_penalty", "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
}  # fmt: skip
_QUIET: dict[str, tuple[Any, ...]] = {
    "min_new_tokens": (0,), "top_k": (-1, 0), "min_p": (0,), "repetition_penalty": (1,),
    "ignore_eos": (False,), "skip_special_tokens": (True,),
}  # fmt: skip
"""Values that ask for what happens anyway."""

_CONSTRAINTS: dict[Kind, dict[str, str]] = {
    "openai": {},
    "sapwood": {"regex": "regex", "ebnf": "ebnf", "choices": "choices"},
    "sglang": {"regex": "regex", "ebnf": "ebnf"},
    "vllm": {"regex": "regex", "ebnf": "grammar", "choices": "choice"},
}


def sampling_fields(sampling: Sampling, server: Kind, chat: bool) -> dict[str, Any]:
    """All of `sampling` but its token limit. Raises Unsupported naming the field that it has not."""
    fields = {new: _value(sampling, name) for name, new in _PLAIN.items() if _given(sampling, name)}
    for name, new in _ADDED.items():
        if _given(sampling, name) and _value(sampling, name) not in _QUIET.get(name, ()):
            if server == "openai":
                raise _unsupported(name, server)
            fields[new] = _value(sampling, name)
    if sampling.stop_regex:
        if server not in ("sapwood", "sglang"):
            raise _unsupported("stop_regex", server)
        fields["stop_regex"] = [*sampling.stop_regex]
    if sampling.json_schema is not None:
        if server == "openai" and not chat:
            raise _unsupported("json_schema", server, " of completions")
        fields["response_format"] = _response_format(sampling.json_schema)
    return {**fields, **_constraint(sampling, server)}


def _constraint(sampling: Sampling, server: Kind) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in ("regex", "ebnf", "choices"):
        if _given(sampling, name):
            if name not in _CONSTRAINTS[server]:
                raise _unsupported(name, server)
            fields[_CONSTRAINTS[server][name]] = _value(sampling, name)
    return {"structured_outputs": fields} if fields and server == "vllm" else fields


def _given(sampling: Sampling, name: str) -> bool:
    return getattr(sampling, name) not in (None, ())


def _value(sampling: Sampling, name: str) -> Any:
    value = getattr(sampling, name)
    return [*value] if isinstance(value, tuple) else value


def _response_format(schema: str) -> dict[str, Any]:
    named = {"name": "output", "schema": json.loads(schema), "strict": True}
    return {"type": "json_schema", "json_schema": named}


def _unsupported(name: str, server: Kind, of: str = "") -> Unsupported:
    hint = "; for a server that has more than OpenAI's fields say which: OpenAI(..., server='vllm')"
    return Unsupported(
        f"{name} is not supported by an endpoint{of} of kind {server!r}{hint if server == 'openai' else ''}",
        field=name,
    )


def reading_fields(logprobs: Logprobs | None, chat: bool) -> dict[str, Any]:
    """Raises Unsupported for a prompt's logprobs."""
    if logprobs is None:
        return {}
    if logprobs.start is not None:
        raise Unsupported(
            "logprob_start_len is not supported by an OpenAI endpoint: it tells an output's logprobs only",
            field="logprob_start_len",
        )
    return {"logprobs": True, "top_logprobs": logprobs.top} if chat else {"logprobs": logprobs.top}


def messages_of(segments: Segments, server: Kind) -> dict[str, Any]:
    """`messages` of a chat whose last message, the assistant's, is open. Raises Unsupported."""
    turns = [segment for segment in segments if isinstance(segment, Turn)]
    last = turns[-1]
    if not last.open or last.role != "assistant":
        raise Unsupported(
            "a chat endpoint answers as the assistant only: gen must stand in an assistant's message",
            field="role",
        )
    messages = [{"role": turn.role, "content": text_of(turn.content)} for turn in turns]
    if not messages[-1]["content"]:
        return {"messages": messages[:-1]}
    if server == "openai":
        raise Unsupported(
            "text before gen in an assistant's message is not supported by an endpoint of kind 'openai', "
            "which begins each message itself; for a server that can go on with one say which: "
            "OpenAI(..., server='vllm')",
            field="role",
        )
    return {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}


def text_of(parts: Iterable[Any]) -> str:
    """The text of raw segments or of a message's content. Raises Unsupported for token ids without one."""
    texts = []
    for part in parts:
        if isinstance(part, Ids) and part.ids and not part.text:
            raise Unsupported("token ids are not supported by an OpenAI endpoint", field="ids")
        if isinstance(part, Text) and part.special:
            raise Unsupported("special text is not supported by an OpenAI endpoint", field="special")
        texts.append(part.text)
    return "".join(texts)


def outputs_of(answer: dict[str, Any], call: Generate) -> list[Output]:
    """The outputs of a whole answer, in the order of their index."""
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    every = zip(choices, range(call.sampling.n or 1), strict=True)
    return [output_of(choice, answer, call) for choice, _ in every]


def output_of(choice: dict[str, Any], answer: dict[str, Any], call: Generate) -> Output:
    message = choice.get("message")
    text = msgspec.convert((choice.get("text") if message is None else message.get("content")) or "", str)
    usage = answer.get("usage") or {}
    matched = choice.get("matched_stop", choice.get("stop_reason"))
    meta: dict[str, Any] = {
        "id": answer.get("id"),
        "finish_reason": {"type": choice.get("finish_reason"), "matched": matched},
    }
    if "prompt_tokens" in usage:
        meta["prompt_tokens"] = usage["prompt_tokens"]
        meta["cached_tokens"] = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        if (call.sampling.n or 1) == 1:
            meta["completion_tokens"] = usage["completion_tokens"]
    if message is not None and message.get("reasoning_content"):
        meta["reasoning_content"] = message["reasoning_content"]
    if choice.get("logprobs"):
        meta |= _logprobs(choice["logprobs"])
    return Output(text=text, content=(Text(text),) if text else (), meta=meta)


def _logprobs(told: dict[str, Any]) -> dict[str, Any]:
    """A chat's or a completion's logprobs as `/generate` has them; ids are not told."""
    if told.get("content") is not None:
        items = told["content"]
        tops = [
            [[top["logprob"], None, top["token"]] for top in item.get("top_logprobs", ())] for item in items
        ]
        chosen = [[item["logprob"], None, item["token"]] for item in items]
    else:
        chosen = [
            [value, None, token] for value, token in zip(told["token_logprobs"], told["tokens"], strict=True)
        ]
        each = told.get("top_logprobs") or [None] * len(chosen)
        tops = [[[value, None, token] for token, value in (top or {}).items()] for top in each]
    return {"output_token_logprobs": chosen, "output_top_logprobs": tops}


def scored_of(choice: dict[str, Any], context: int) -> Scored:
    """The logprobs of the echoed tokens that reach beyond the first `context` characters."""
    told = choice.get("logprobs") or {}
    if not all(told.get(name) is not None for name in ("tokens", "token_logprobs", "text_offset")):
        raise LangError("the endpoint does not tell the logprobs of an echoed prompt, which select needs")
    places = zip(told["tokens"], told["text_offset"], told["token_logprobs"], strict=True)
    values = [value for token, offset, value in places if offset + len(token) > context and value is not None]
    return Scored(ids=(), logprobs=tuple(values))
