"""`sapwood.LLM`: the offline engine as vLLM's users know it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

from sapwood.srt import client, offline_requests, params
from sapwood.srt.engine import start
from sapwood.srt.errors import BadRequest
from sapwood.srt.llm_outputs import (
    Embedding,
    EmbeddingRequestOutput,
    RequestOutput,
    request_output,
)
from sapwood.srt.llm_params import SamplingParams
from sapwood.srt.offline_work import Work
from sapwood.srt.server.demands import Demands
from sapwood.srt.server.outcome import vector
from sapwood.srt.server.sampling import check_patterns
from sapwood.srt.server.tenants import Place


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    cache_salt: NotRequired[str]


Prompt = str | TextPrompt | TokensPrompt
Messages = list[dict[str, Any]]
Sampling = SamplingParams | Sequence[SamplingParams] | None


_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class _Read(NamedTuple):
    """A prompt as it is sent, its text if it was given as one, and its cache_salt."""

    prompt: client.Prompt
    text: str | None
    cache_salt: str | None


class LLM:
    """A model in processes of its own, for one Python program.

    `options` are vLLM's names (`tensor_parallel_size`, `gpu_memory_utilization`, `max_model_len`, `dtype`,
    ...) or the fields of the configuration: each does its work or raises ConfigError with the reason. The
    constructor returns when the model is loaded; `shutdown`, leaving a `with` block, the collector or the
    program's end stop it. Methods may be called from any thread. Raises ModelError too, and ProcessDied, here
    or in any later call, if a process dies.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._runtime = start(model, options)
        self._numbers = itertools.count()
        self._tokenizer: Any = None
        self._stop = weakref.finalize(self, self._runtime.close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Sampling = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Go on with each prompt: a text, `{"prompt": text}` or `{"prompt_token_ids": ids}`.

        The outputs stand in the order of the prompts, whose number has no limit. Without `sampling_params`
        the model's own defaults count, and 16 tokens; a list has one for each prompt. `use_tqdm` shows a
        progress bar on a terminal. `priority` has one number for each prompt: the lowest go first, with
        `scheduling_policy="priority"`. Raises BadRequest naming the parameter; the first error ends the call.
        """
        given = [prompts] if isinstance(prompts, (str, dict)) else prompts
        each = self._params(sampling_params, len(given))
        read = [self._read(one) for one in given]
        order = _priorities(priority, len(given))
        checked = [self._checked(p) for p in each]
        items = [
            Work(one.prompt, p, self._place(one, number), Demands(constraint))
            for one, p, number, constraint in zip(read, checked, order, self._constraints(each), strict=True)
        ]
        outcomes = self._runtime.outcomes(items, use_tqdm)
        return [
            request_output(next(self._numbers), one.text, p, outcome)
            for one, p, outcome in zip(read, each, outcomes, strict=True)
        ]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Sampling = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer a chat of OpenAI messages, or several, rendered by the model's template; else as `generate`.

        `add_generation_prompt` is true unless the last message is to be continued (`continue_final_message`).
        The model is told of `tools`; its calls of them are text.
        """
        given: Any = [messages] if messages and isinstance(messages[0], dict) else messages
        if not given:
            raise BadRequest("messages must not be empty", param="messages")
        fields = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
            "tools": tools,
        }
        each = self._params(sampling_params, len(given))
        items = []
        for one, p, constraint in zip(given, each, self._constraints(each), strict=True):
            chat, demands = offline_requests.chat_of(
                self._runtime.service, {**fields, "messages": one}, constraint
            )
            offline_requests.check_encodable(chat)
            items.append(Work(chat, self._checked(p), demands=demands))
        outcomes = self._runtime.outcomes(items, use_tqdm)
        return [
            request_output(next(self._numbers), self._decode(outcome.prompt_ids(0)), p, outcome)
            for p, outcome in zip(each, outcomes, strict=True)
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling: Literal["last", "mean"] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Each prompt's hidden state as a vector of length 1: its last token's, or the mean (default: the
        configuration's `pooling`)."""
        service = self._runtime.service
        pooled = offline_requests.pooled(service, pooling)
        given = [prompts] if isinstance(prompts, (str, dict)) else prompts
        read = [self._read(one) for one in given]
        items = [Work(one.prompt, pooled, self._place(one)) for one in read]
        return [
            EmbeddingRequestOutput(
                str(next(self._numbers)),
                outcome.prompt_ids(0),
                Embedding(vector(outcome.pooled[0])),
                outcome.verdict(0).matched,
            )
            for outcome in self._runtime.outcomes(items, use_tqdm)
        ]

    encode = embed

    def get_tokenizer(self) -> Any:
        """The model's `tokenizers.Tokenizer` (not transformers': `encode(text)` has `.ids`), loaded anew."""
        return self._runtime.tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What counts when none are given: the model's own defaults, and 16 tokens."""
        defaults = self._runtime.service.source.sampling_defaults
        values: dict[str, Any] = {k: v for k, v in defaults.items() if k in SamplingParams.__struct_fields__}
        return SamplingParams(**values)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix that no running request uses."""
        self._runtime.run(self._runtime.service.client.ask("flush"))
        return True

    def shutdown(self) -> None:
        """End the processes. What still runs raises Unavailable, and so does every later call."""
        self._stop()

    close = shutdown

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _params(self, given: Sampling, count: int) -> list[SamplingParams]:
        """One for each of `count` prompts."""
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        each = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
        for one in each:
            if not isinstance(one, SamplingParams):
                raise BadRequest(
                    f"sampling_params must be SamplingParams or a list of them, got {type(one).__name__}",
                    param="sampling_params",
                )
        if len(each) != count:
            raise BadRequest(
                f"sampling_params must have one entry for each of the {count} prompts, got {len(each)}",
                param="sampling_params",
            )
        return each

    def _checked(self, given: SamplingParams) -> params.SamplingParams:
        return check_patterns(given.checked(self._runtime.service.source.vocab_size))

    def _constraints(self, each: Sequence[SamplingParams]) -> list[params.Constraint | None]:
        """One for each; what several share is read once."""
        service = self._runtime.service
        read = {
            key: offline_requests.constraint(service, one)
            for key, one in {id(one): one for one in each}.items()
        }
        return [read[id(one)] for one in each]

    def _read(self, given: Prompt | list[int]) -> _Read:
        """A prompt as vLLM's users write it. Raises BadRequest."""
        service = self._runtime.service
        if not isinstance(given, Mapping):
            text = given if isinstance(given, str) else None
            return _Read(offline_requests.one_prompt(service, given), text, None)
        unknown = sorted(given.keys() - set(_PROMPT_KEYS))
        if unknown or not given.keys() & {"prompt", "prompt_token_ids"}:
            raise BadRequest(
                f"a prompt is a text, or a dict with {', '.join(_PROMPT_KEYS)}; got "
                + (f"{unknown[0]!r}" if unknown else "neither a prompt nor its token ids"),
                param="prompts",
            )
        fields: Mapping[str, Any] = given
        text, ids = fields.get("prompt"), fields.get("prompt_token_ids")
        prompt = offline_requests.one_prompt(service, text if ids is None else ids)
        return _Read(prompt, text, fields.get("cache_salt"))

    def _place(self, read: _Read, priority: int | None = None) -> Place:
        return offline_requests.place(self._runtime.service, cache_salt=read.cache_salt, priority=priority)

    def _decode(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            self._tokenizer = self.get_tokenizer()
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def _priorities(given: Sequence[int] | None, count: int) -> Sequence[int | None]:
    """One for each of `count` prompts. Raises BadRequest."""
    if given is None:
        return [None] * count
    if isinstance(given, int) or len(given) != count:
        raise BadRequest(
            f"priority must have one entry for each of the {count} prompts, got "
            f"{given if isinstance(given, int) else len(given)}",
            param="priority",
        )
    return given
