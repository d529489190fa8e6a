"""Prompts to token ids."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer

from sapwood.srt import messages
from sapwood.srt.config import ModelSource
from sapwood.srt.errors import BadRequest, require_unicode
from sapwood.srt.messages import AnyPrompt, ChatPrompt, Ids, IdsPrompt, PartsPrompt, TextPrompt
from sapwood.srt.tokenizer.isolation import IsolatedTemplate
from sapwood.srt.tokenizer.parts import Encoded, PartsEncoder
from sapwood.srt.tokenizer.specials import SpecialStrings, encode

Prompt = AnyPrompt


class PromptEncoder:
    """Turns prompts into ids, from any thread; without a tokenizer only ids are taken.

    With `split_special_tokens` a special token's string in a chat message is text (see specials.py). In a
    TextPrompt it is the token: whoever writes a raw prompt writes its control tokens.
    """

    def __init__(self, source: ModelSource, tokenizer: Tokenizer | None, split_special_tokens: bool) -> None:
        self._vocab_size = source.vocab_size
        self._model = source.name
        self._tokenizer = tokenizer
        self._template: IsolatedTemplate | None = None
        self._specials: SpecialStrings | None = None
        self._parts: PartsEncoder | None = None
        if tokenizer is None:
            return
        specials = SpecialStrings(tokenizer)
        if source.chat_template is not None:
            self._template = IsolatedTemplate(source.chat_template, source.template_vars)
            self._specials = specials if split_special_tokens else None
        self._parts = PartsEncoder(source, tokenizer, specials, self._template)

    def close(self) -> None:
        """End the processes that render; from any thread."""
        if self._template is not None:
            self._template.close()

    def stop(self, prompt: Prompt) -> None:
        """Break off what is done for this very prompt now, if it waits for the template: it raises. From any
        thread."""
        if self._template is not None:
            self._template.stop(prompt)

    def encode(self, prompt: Prompt) -> Ids:
        """The prompt's ids, at least one; raises BadRequest naming the field and the value."""
        if isinstance(prompt, PartsPrompt):
            return self.encode_parts(prompt).ids
        ids = self.tokenize(prompt)
        if not ids:
            param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
            raise BadRequest(f"{param} is empty; at least one token is needed", param=param)
        return ids

    def encode_parts(self, prompt: PartsPrompt, namespace: str = "") -> Encoded:
        """`encode`, and what is told of parts; `namespace` keeps what is known of chats apart."""
        encoded = self.tokenize_parts(prompt, namespace)
        if not encoded.ids:
            raise BadRequest("input is empty; at least one token is needed", param="input")
        return encoded

    def tokenize_parts(self, prompt: PartsPrompt, namespace: str = "") -> Encoded:
        """`tokenize`, and what is told of parts."""
        if self._parts is None:
            self._need_tokenizer("input")
            raise AssertionError
        try:
            encoded = self._parts.encode(prompt, namespace)
        except RecursionError:
            raise BadRequest("input is nested too deeply", param="input") from None
        except BadRequest as e:
            # Which parts they are that the template refuses it does not say.
            param = "input" if e.param == "messages" else e.param
            raise BadRequest(e.message, param=param, code=e.code) from None
        self._checked(encoded.ids, "input")
        return encoded

    def tokenize(self, prompt: Prompt) -> Ids:
        """The prompt's ids, which may be none; raises BadRequest naming the field and the value."""
        if isinstance(prompt, PartsPrompt):
            return self.tokenize_parts(prompt).ids
        if isinstance(prompt, IdsPrompt):
            return self._checked(prompt.ids, "prompt")
        if isinstance(prompt, TextPrompt):
            ids = self._encode(prompt.text, prompt.add_special_tokens, "prompt")
            return self._checked(messages.pack(ids), "prompt")
        try:
            return self._checked(messages.pack(self._chat(prompt)), "messages")
        except RecursionError:
            raise BadRequest("messages are nested too deeply", param="messages") from None

    def render(self, prompt: ChatPrompt, owner: object = None) -> str:
        """The text that the template makes of a chat; raises BadRequest. `owner` is what can be told to
        `stop` instead of the prompt."""
        template = self._need_template()
        chat = template.prepare(prompt.messages)
        return template.render(
            chat,
            prompt.add_generation_prompt,
            prompt.continue_final,
            prompt.template_kwargs,
            prompt.tools,
            owner=owner or prompt,
        )

    def _chat(self, prompt: ChatPrompt) -> list[int]:
        template = self._need_template()
        specials = self._specials
        chat, kwargs, tools = template.prepare(prompt.messages), prompt.template_kwargs, prompt.tools
        if specials is not None and not any(map(specials.within, (chat, kwargs, tools))):
            specials = None
        if specials is not None:
            chat, kwargs, tools = specials.mark(chat), specials.mark(kwargs), specials.mark(tools)
        text = template.render(
            chat, prompt.add_generation_prompt, prompt.continue_final, kwargs, tools, owner=prompt
        )
        if specials is None:
            return self._encode(text, False, "messages")
        return specials.encode(require_unicode(text, "messages"))

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        tokenizer = self._need_tokenizer(param)
        return encode(tokenizer, require_unicode(text, param), add_special_tokens)

    def _need_template(self) -> IsolatedTemplate:
        self._need_tokenizer("messages")
        if self._template is None:
            raise BadRequest(
                f"model {self._model} has no chat template; use the completions route", param="messages"
            )
        return self._template

    def _need_tokenizer(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            raise BadRequest(
                f"{param}: this server takes token ids only (--skip-tokenizer-init)", param=param
            )
        return self._tokenizer

    def _checked(self, ids: Ids, param: str) -> Ids:
        if len(ids) % 4:
            raise BadRequest(f"{param} is not a list of token ids", param=param)
        values = messages.unpack(ids)
        wrong = np.flatnonzero((values < 0) | (values >= self._vocab_size))
        if len(wrong):
            raise BadRequest(
                f"{param} holds token id {values[wrong[0]]} at position {wrong[0]};"
                f" ids must be from 0 to {self._vocab_size - 1}",
                param=param,
            )
        return ids
