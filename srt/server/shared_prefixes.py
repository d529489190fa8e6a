"""The prompts of `--shared-prefixes`: computed before anything is served, and shared by all keys and salts.

    file ──read──► prompts ──tokenize──► ids ──► a request each, in the namespace that only the server writes

Needs no web framework: the offline Engine lists prompts too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sapwood.srt import namespaces
from sapwood.srt.client import Client, Prompt
from sapwood.srt.errors import BadRequest, ConfigError, Overloaded, SapwoodError, Unavailable, from_info
from sapwood.srt.messages import Ended, IdsPrompt, TextPrompt, pack, unpack
from sapwood.srt.params import SamplingParams, Scheduling
from sapwood.srt.server.chat_prompt import prompt_of
from sapwood.srt.server.protocol import ChatMessage
from sapwood.srt.server.service import Service
from sapwood.srt.server.tools import Tool, wanted

logger = logging.getLogger("sapwood.server")

MAX_PREFIXES = 64
MAX_SHARE = 0.25
"""Of the KV pool's slots that all prefixes together may take: they are never evicted."""
LOADING_SECONDS = 86_400.0
ATTEMPTS, RETRY_SECONDS = 120, 1.0
"""No limit of its own: whoever watches the processes ends them if they do not get ready."""
_OF_TEXTS = ("add_special_tokens",)
_OF_CHATS = ("add_generation_prompt", "chat_template_kwargs", "tools")


class Line(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A line of the file: exactly one of `text`, `messages` and `ids`, with what makes tokens of it.

    Unlike a request's, the messages have no generation prompt after them unless it is asked for.
    """

    text: str | None = None
    add_special_tokens: bool | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    ids: list[int] | None = None


class Prefix(NamedTuple):
    """A prompt and the number of its line."""

    number: int
    prompt: Prompt


def read(service: Service) -> list[Prefix]:
    """The prompts of the file; none without a file. Raises ConfigError naming the line."""
    path = service.config.shared_prefixes
    if path is None:
        return []
    if service.config.disable_radix_cache:
        raise ConfigError(
            "--shared-prefixes needs the prefix cache, and --disable-radix-cache is set",
            param="shared_prefixes",
        )
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as e:
        raise ConfigError(f"--shared-prefixes {path}: {e.strerror}", param="shared_prefixes") from None
    found: list[Prefix] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(found) == MAX_PREFIXES:
            raise _wrong(service, number, f"there may be {MAX_PREFIXES} prefixes, and this is one more")
        try:
            found.append(Prefix(number, _prompt(service, msgspec.json.decode(line, type=Line))))
        except BadRequest as e:
            raise _wrong(service, number, e.message) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise _wrong(service, number, str(e)) from None
    if not found:
        raise ConfigError(f"--shared-prefixes {path} holds no prompt", param="shared_prefixes")
    return found


async def compute(service: Service, prefixes: Sequence[Prefix]) -> dict[str, str]:
    """Have the prompts computed and listed, one after the other; what is to be told of them at the start.

    Waits until the other processes are ready. Raises ConfigError naming the line and the limit if a prompt
    cannot be tokenised or is too long.
    """
    if not prefixes:
        return {}
    client = service.client
    state = await client.ask("state", LOADING_SECONDS)
    slots, longest = state["slots_total"], state["max_request_tokens"]
    every: list[list[int]] = []
    for number, prompt in prefixes:
        every.append(await _ids(service, number, prompt))
        if len(every[-1]) > longest:
            raise _wrong(service, number, f"it has {len(every[-1])} tokens; a prompt may have {longest}")
        taken, limit = tokens_of(every), int(slots * MAX_SHARE)
        if taken > limit:
            raise _wrong(
                service,
                number,
                f"with it the prefixes take {taken} tokens; they may take {limit}, {MAX_SHARE:.0%} of the KV"
                f" pool ({slots} slots)",
            )
    for (number, _prompt), ids in zip(prefixes, every, strict=True):
        try:
            await _list(client, ids)
        except BadRequest as e:
            raise _wrong(service, number, e.message) from None
    facts = {"shared prefixes": f"{len(every)}, of {tokens_of(every)} tokens together"}
    state = await client.ask("state", LOADING_SECONDS)
    service.max_request_tokens = state["max_request_tokens"]
    if service.max_request_tokens < longest:
        facts["longest request"] = (
            f"{service.max_request_tokens} tokens, prompt and output together: what the shared prefixes leave"
            f" of the KV pool ({slots} slots)"
        )
    return facts


async def compute_again(service: Service, prefixes: Sequence[Prefix]) -> None:
    """The same when the cache has begun empty again: others are served meanwhile. A queue that is full is
    tried again for a while; an error is logged."""
    for attempt in range(ATTEMPTS):
        try:
            await compute(service, prefixes)
        except (Overloaded, Unavailable) as e:
            if attempt < ATTEMPTS - 1 and service.client.failure is None:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            _log_loss(e)
        except SapwoodError as e:
            _log_loss(e)
        return


def _log_loss(error: SapwoodError) -> None:
    logger.error("the prompts of --shared-prefixes are not cached any more: %s", error.message)


def tokens_of(prompts: Iterable[list[int]]) -> int:
    """How many tokens the prompts take in the cache, where they share what they begin with."""
    total = 0
    before: list[int] = []
    for ids in sorted(prompts):
        pairs = enumerate(zip(before, ids, strict=False))
        total += len(ids) - next((i for i, (a, b) in pairs if a != b), min(len(before), len(ids)))
        before = ids
    return total


def _prompt(service: Service, line: Line) -> Prompt:
    """Raises BadRequest naming the field."""
    if sum(value is not None for value in (line.text, line.messages, line.ids)) != 1:
        raise BadRequest("exactly one of text, messages and ids must be given")
    for owner, names in (("text", _OF_TEXTS), ("messages", _OF_CHATS)):
        for name in names:
            if getattr(line, owner) is None and getattr(line, name) is not None:
                raise BadRequest(f"{name} needs {owner}", param=name)
    if line.ids is not None:
        return service.ids_prompt(line.ids, "ids")
    if line.messages is not None:
        generation_prompt = line.add_generation_prompt is True
        kwargs, tools = line.chat_template_kwargs, wanted(line.tools)
        return prompt_of(service, line.messages, generation_prompt, template_kwargs=kwargs, wanted=tools)
    return TextPrompt(line.text or "", line.add_special_tokens is not False)


async def _ids(service: Service, number: int, prompt: Prompt) -> list[int]:
    if isinstance(prompt, IdsPrompt):
        ids: list[int] = unpack(prompt.ids).tolist()
        return ids
    try:
        answer = await service.client.ask("tokenize", prompt=prompt, options={"texts": False})
    except BadRequest as e:
        raise _wrong(service, number, e.message) from None
    ids = answer["tokens"]
    if not ids:
        raise _wrong(service, number, "it has no tokens; at least one is needed")
    return ids


async def _list(client: Client, ids: list[int]) -> None:
    """Raises the request's error."""
    stream = client.submit(
        IdsPrompt(pack(ids)),
        SamplingParams(max_tokens=0, temperature=0.0),
        namespaces.LISTED,
        scheduling=Scheduling(unsalted=namespaces.LISTED),
    )
    if stream.deadline is not None:
        stream.deadline.cancel()  # --request-timeout is meant for clients
    async for event in stream:
        if isinstance(event, Ended) and event.error is not None:
            raise from_info(event.error)


def _wrong(service: Service, number: int, what: str) -> ConfigError:
    path = service.config.shared_prefixes
    return ConfigError(f"--shared-prefixes {path}, line {number}: {what}", param="shared_prefixes")
