"""`POST /tokenize` and `POST /detokenize`, in vLLM's shape: what the model's tokenizer makes of a prompt."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from sapwood.srt.client import Prompt
from sapwood.srt.errors import BadRequest
from sapwood.srt.messages import TextPrompt
from sapwood.srt.server import guard, refused
from sapwood.srt.server.chat_prompt import prompt_of
from sapwood.srt.server.openapi import json_body
from sapwood.srt.server.protocol import ChatMessage
from sapwood.srt.server.reply import JsonAnswer, while_here
from sapwood.srt.server.service import Service
from sapwood.srt.server.tools import Tool, wanted


@refused.fields(refused.TEMPLATES)
class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of `prompt` and `messages`, with what makes their tokens in a request."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class Tokenized(msgspec.Struct):
    """`max_model_len` is the longest request in tokens, prompt and output together."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


class Detokenized(msgspec.Struct):
    prompt: str


KINDS: list[type[msgspec.Struct]] = [TokenizeRequest, Tokenized, DetokenizeRequest, Detokenized]


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", openapi_extra=json_body(TokenizeRequest, Tokenized), response_class=Response)
    async def tokenize(request: Request) -> Response:
        """The token ids that a prompt or a chat is made of."""
        service.require_ready()
        body = await guard.read(request, TokenizeRequest, service.config.max_body_bytes)
        service.require_model(body.model)
        found = await while_here(request, service.client.ask("tokenize", prompt=_prompt(service, body)))
        tokens, texts = found["tokens"], found["texts"] if body.return_token_strs else None
        return JsonAnswer(Tokenized(len(tokens), service.longest, tokens, texts))

    @router.post(
        "/detokenize", openapi_extra=json_body(DetokenizeRequest, Detokenized), response_class=Response
    )
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens included."""
        service.require_ready()
        body = await guard.read(request, DetokenizeRequest, service.config.max_body_bytes)
        service.require_model(body.model)
        prompt = service.packed(body.tokens, "tokens")
        (text,) = await while_here(request, service.texts_of([prompt]))
        return JsonAnswer(Detokenized(text))

    return router


def _prompt(service: Service, body: TokenizeRequest) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("exactly one of prompt and messages must be given", param="prompt")
    refused.check(body)
    if body.messages is None:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
            if getattr(body, name) is not None:
                raise BadRequest(f"{name} needs messages", param=name)
        return TextPrompt(body.prompt or "", body.add_special_tokens is not False)
    if body.add_special_tokens:
        raise refused.unsupported("add_special_tokens", refused.CHAT["add_special_tokens"].reason)
    return prompt_of(
        service,
        body.messages,
        body.add_generation_prompt,
        body.continue_final_message,
        body.chat_template_kwargs,
        wanted(body.tools),
    )
