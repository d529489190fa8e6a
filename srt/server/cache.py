"""What the prefix cache would do for a prompt, and what is in it. Neither route changes anything."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response

from sapwood.srt import namespaces
from sapwood.srt.client import Prompt
from sapwood.srt.errors import BadRequest
from sapwood.srt.messages import TextPrompt
from sapwood.srt.server import chat_prompt, guard, keys
from sapwood.srt.server.openapi import json_body
from sapwood.srt.server.protocol import ChatMessage
from sapwood.srt.server.reply import JsonAnswer, while_here
from sapwood.srt.server.service import Service
from sapwood.srt.server.tools import Tool, wanted

MAX_SHOWN_IDS = 65_536
_TREE_QUERY = frozenset(("depth", "limit", "ids", "max_nodes", "namespace"))


class ExplainRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of `prompt` (a text or token ids) and `messages`, with what makes tokens of it in a request
    and what decides how many of them may come from the cache."""

    model: str | None = None
    prompt: str | list[int] | None = None
    add_special_tokens: bool | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    cache_salt: str | None = None
    logprob_start_len: int | None = None


class ShownToken(msgspec.Struct):
    id: int
    text: str


class Segment(msgspec.Struct):
    """An edge of the tree on the prompt's way: `tokens` of it, from the prompt's token `start` on.

    `hits` requests have found it, `locks` running ones use it, `last_use` is a tick of the tree's clock.
    """

    start: int
    tokens: int
    hits: int
    locks: int
    last_use: int


class Explanation(msgspec.Struct, omit_defaults=True):
    """What a request would find now: `matched` of `prompt_tokens`, and why it stops there.

    `place` says of a chat to which message the first token that misses belongs. `segments` and
    `cached_instead` (what is cached there, for each way on, the most recently used first) belong to other
    requests too, and are shown to the admin alone.
    """

    prompt_tokens: int
    matched: int
    stopped: str
    reason: str
    namespace: str
    matched_text_tail: list[ShownToken]
    next: list[ShownToken]
    place: str | None = None
    segments: list[Segment] | None = None
    cached_instead: list[list[ShownToken]] | None = None


class TreeNode(msgspec.Struct):
    """An edge of `tokens` tokens, of which `text` shows the first `ids`. `depth` is in tokens, at its end."""

    text: str | None
    ids: list[int]
    tokens: int
    depth: int
    hits: int
    locks: int
    last_use: int
    num_children: int
    children: list[TreeNode]


class TreeNamespace(msgspec.Struct):
    """`nodes` and `tokens` count all of the namespace, shown or not."""

    namespace: str
    nodes: int
    tokens: int
    num_children: int
    children: list[TreeNode]


class Tree(msgspec.Struct):
    """The cache as it is now; `clock` is what `last_use` is measured by. `truncated`: there was more to show
    within `depth` and `limit` than one answer may hold."""

    nodes: int
    tokens: int
    evictable: int
    slots_total: int
    clock: int
    num_namespaces: int
    truncated: bool
    namespaces: list[TreeNamespace]


KINDS: list[type[msgspec.Struct]] = [ExplainRequest, Explanation, Tree]


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/cache/explain", openapi_extra=json_body(ExplainRequest, Explanation), response_class=Response
    )
    async def explain(request: Request) -> Response:
        """What of this prompt is cached, and why no more. A question: nothing counts as used."""
        service.require_ready()
        body = await guard.read(request, ExplainRequest, service.config.max_body_bytes)
        service.require_model(body.model)
        namespace, unsalted = service.tenants.caches(body.cache_salt, keys.key_of(request))
        options: dict[str, Any] = {"reveal": keys.is_admin(request), "unsalted": unsalted}
        if body.logprob_start_len not in (None, -1):
            options["logprob_start_len"] = _at_least_zero("logprob_start_len", body.logprob_start_len)
        question = service.client.ask(
            "explain", prompt=_prompt(service, body), namespace=namespace, options=options
        )
        found = await while_here(request, question)
        return JsonAnswer(
            msgspec.convert({**found, "namespace": namespaces.label(namespace)}, Explanation, strict=True)
        )

    @router.get("/cache/tree", response_class=Response)
    async def tree(
        request: Request,
        depth: Annotated[int, Query(ge=0, le=64)] = 3,
        limit: Annotated[int, Query(ge=1, le=1000)] = 16,
        ids: Annotated[int, Query(ge=0, le=256)] = 16,
        max_nodes: Annotated[int, Query(ge=1, le=5_000)] = 1000,
        namespace: Annotated[str | None, Query(max_length=64)] = None,
    ) -> Response:
        """What is cached: `depth` levels, of each node its `limit` most recent children and first `ids`."""
        service.require_ready()
        if unknown := sorted(request.query_params.keys() - _TREE_QUERY):
            raise BadRequest(f"unknown query parameter {unknown[0][:100]!r}", code="unknown_field")
        if ids * max_nodes > MAX_SHOWN_IDS:
            raise BadRequest(
                f"ids times max_nodes may be {MAX_SHOWN_IDS}, got {ids} times {max_nodes}", param="ids"
            )
        options = {"depth": depth, "limit": limit, "ids": ids, "max_nodes": max_nodes, "namespace": namespace}
        return JsonAnswer(msgspec.convert(await service.client.ask("tree", options=options), Tree))

    return router


def _prompt(service: Service, body: ExplainRequest) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("exactly one of prompt and messages must be given", param="prompt")
    if body.messages is not None:
        if body.add_special_tokens is not None:
            raise BadRequest("add_special_tokens needs a text prompt", param="add_special_tokens")
        return chat_prompt.prompt_of(
            service,
            body.messages,
            body.add_generation_prompt,
            body.continue_final_message,
            body.chat_template_kwargs,
            wanted(body.tools),
        )
    for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
        if getattr(body, name) is not None:
            raise BadRequest(f"{name} needs messages", param=name)
    if isinstance(body.prompt, str):
        return TextPrompt(body.prompt, body.add_special_tokens is not False)
    if body.add_special_tokens is not None:
        raise BadRequest("add_special_tokens needs a text prompt", param="add_special_tokens")
    assert body.prompt is not None
    return service.ids_prompt(body.prompt, "prompt")


def _at_least_zero(name: str, value: int | None) -> int:
    assert value is not None
    if not 0 <= value < 2**31:
        raise BadRequest(f"{name} must be from 0 to {2**31 - 1}, got {value}", param=name)
    return value
