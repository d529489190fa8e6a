"""What a prefix lookup found, for a person: its tokens as text, and one sentence that says why it stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sapwood.srt import messages
from sapwood.srt.messages import Ask, ChatPrompt, Ids
from sapwood.srt.tokenizer.places import place_of
from sapwood.srt.tokenizer.requests import Texts

SHOWN_TOKENS = 20
"""Tokens that are shown on each side of the place where a lookup stopped."""

Token = dict[str, Any]


def tokens(ids: Sequence[int], texts: Texts) -> list[Token]:
    return [{"id": token, "text": texts.describe(token)[0]} for token in ids]


def joined(ids: Sequence[int], texts: Texts) -> str:
    """The text of tokens that stand side by side; what is no whole character is U+FFFD."""
    return b"".join(texts.describe(token)[1] for token in ids).decode(errors="replace")


def explained(
    asked: Ask, ids: Ids, data: dict[str, Any], texts: Texts, render: Callable[[ChatPrompt], str]
) -> dict[str, Any]:
    """The scheduler's answer about the prompt `ids`, with texts, a reason, and the place in a chat."""
    prompt, matched = messages.unpack(ids), data["matched"]
    ahead = prompt[matched : matched + SHOWN_TOKENS].tolist()
    others: list[list[int]] = data.get("cached_instead") or []
    place = None
    if isinstance(asked.prompt, ChatPrompt):
        offset = len(joined(prompt[:matched].tolist(), texts))
        place = place_of(asked.prompt, offset, render)
    answer = {
        "prompt_tokens": len(prompt),
        "matched": matched,
        "stopped": data["stopped"],
        "reason": _reason(asked, data, len(prompt), joined(ahead[:1], texts), place),
        "place": place,
        "matched_text_tail": tokens(prompt[max(0, matched - SHOWN_TOKENS) : matched].tolist(), texts),
        "next": tokens(ahead, texts),
    }
    if others:
        answer["reason"] += _difference(joined(ahead, texts), joined(others[0], texts))
    if "segments" in data:
        answer["segments"] = data["segments"]
        answer["cached_instead"] = [tokens(branch, texts) for branch in others]
    return answer


def _reason(asked: Ask, data: dict[str, Any], total: int, ahead: str, place: str | None) -> str:
    matched, where = data["matched"], f", {place}" if place else ""
    own = _whose(asked)
    this = f"token {matched} ({ahead!r}{where})"
    match data["stopped"]:
        case "disabled":
            return "The server runs with --disable-radix-cache: nothing is kept between requests."
        case "last_token":
            return "All of the prompt is cached but its last token, which is always computed."
        case "logprobs":
            start = asked.options.get("logprob_start_len")
            return (
                f"Logprobs of the prompt from token {start} on are asked for: they have to be computed, so at"
                f" most {matched} tokens can come from the cache."
            )
        case "namespace":
            cache = "cache of this API key" if asked.options.get("unsalted") else "shared cache"
            return (
                f"The {cache} (of requests without a cache_salt) has more of this prompt, but a request"
                " with a cache_salt only uses what requests with the same one have left."
            )
        case "evicted":
            return (
                f"The cache once went on with {this}, but that was evicted to make room for other requests."
            )
        case "cold":
            if data["goes_on"]:
                return f"No prompt that is cached {own} begins with {this}."
            return f"Nothing is cached {own}."
    if data["goes_on"]:
        return (
            f"What is cached {own} goes on otherwise at {this}: the first {matched} of {total} tokens agree."
        )
    return (
        f"What is cached {own} of this prompt ends before {this}: from there on it is new. (The last token"
        " of an answer is never computed, so never cached.)"
    )


def _whose(asked: Ask) -> str:
    """Which cache was looked into. The option "unsalted" is the namespace without the salt."""
    unsalted = asked.options.get("unsalted", "")
    salt = "without a cache_salt" if asked.namespace == unsalted else "with this cache_salt"
    return f"under this API key {salt}" if unsalted else salt


def _difference(ahead: str, other: str) -> str:
    """What can be said of two ways on: their common mistakes have names."""
    n = min(len(ahead), len(other))
    if n and ahead[:n] == other[:n]:
        return (
            " The text is the same as what is cached, but cut into other tokens: this happens when generated"
            " text is sent back as text."
        )
    bare, other_bare = "".join(ahead.split()), "".join(other.split())
    n = min(len(bare), len(other_bare))
    if n and bare[:n] == other_bare[:n]:
        return " Only white space differs."
    return f" Cached is {other!r}, the prompt has {ahead!r}."


def pictured(data: dict[str, Any], texts: Texts) -> dict[str, Any]:
    """The scheduler's answer to "tree", with the text of each node's ids (null where no ids are shown)."""
    waiting: list[dict[str, Any]] = list(data["namespaces"])
    while waiting:
        node = waiting.pop()
        waiting += node["children"]
        if "ids" in node:
            node["text"] = joined(node["ids"], texts) if node["ids"] else None
    return data


def tokenized(ids: Ids, texts: Texts, with_texts: bool) -> dict[str, Any]:
    """The answer to "tokenize"."""
    found: list[int] = messages.unpack(ids).tolist()
    data: dict[str, Any] = {"tokens": found}
    if with_texts:
        data["texts"] = [texts.describe(token)[0] for token in found]
    return data


def detokenized(ids: Ids, texts: Texts, skip_special_tokens: bool) -> dict[str, Any]:
    """The answer to "detokenize": the same text as a stream of these tokens has."""
    stream = texts.stream(skip_special_tokens)
    parts = [stream.push(token) for token in messages.unpack(ids).tolist()]
    return {"text": "".join([*parts, stream.finish()])}
