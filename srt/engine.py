"""The offline engine: the runtime inside a Python program, without HTTP."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, TypedDict, Unpack

import msgspec

from sapwood.srt import config, offline_door, offline_requests, offline_work, requirements
from sapwood.srt.errors import BadRequest
from sapwood.srt.flags.keywords import translate
from sapwood.srt.loader import sources
from sapwood.srt.offline import OfflineRuntime
from sapwood.srt.offline_requests import Sampling
from sapwood.srt.offline_work import Call
from sapwood.srt.progress import bar
from sapwood.srt.server import info
from sapwood.srt.server.native_protocol import Generated
from sapwood.srt.server.outcome import vector

Answer = dict[str, Any]
Prompt = str | list[int] | list[dict[str, Any]]
"""A text, token ids, or the messages of a chat."""

STREAM_BUFFER = 2**20
"""A program that looks away for a while is no slow reader: its stream holds more than any answer has."""


class Placing(TypedDict, total=False):
    """How requests are cached and ordered.

    Those with different `cache_salt` share no cached prefix. A higher `priority` goes first, with
    `schedule_policy="priority"`. What a request has put into the cache is kept for `keep` seconds after its
    end, if there is room for that. One that still waits after `queue_timeout` seconds raises
    DeadlineExceeded. Requests of one `program` share what is kept for it until it ends.
    """

    cache_salt: str | None
    priority: int | None
    keep: float | None
    queue_timeout: float | None
    program: str | None


class Fields(Placing, total=False):
    """Fields of `/generate` that the methods of Engine take as keyword arguments.

    With `return_logprob` the output's logprobs come, and the prompt's from `logprob_start_len` on (-1: none);
    at each place `top_logprobs_num` alternatives and the tokens `token_ids_logprob`: for all prompts, or a
    list with an entry for each. `rid` names the requests: one name (told apart by a number if there are
    several prompts) or a list. A request that has not ended after `timeout` seconds raises DeadlineExceeded.
    """

    return_logprob: bool | list[bool]
    logprob_start_len: int | list[int] | None
    top_logprobs_num: int | list[int]
    token_ids_logprob: list[int] | list[list[int]] | None
    rid: str | list[str] | None
    timeout: float | None


class ScoreFields(Placing, total=False):
    """Fields of `/generate` that go with choices. With `return_text_in_logprobs` each token's text comes."""

    return_text_in_logprobs: bool
    rid: str | None
    timeout: float | None


class ChatFields(Fields, total=False):
    """Those of a chat, and what concerns its template. The model's calls of `tools` are text."""

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any]
    tools: list[dict[str, Any]]


class Engine:
    """A model in processes of its own, as `sapwood serve` has them, for one Python program.

    `model_path` and `options` are the fields of the configuration (`sapwood serve --help`, with underscores),
    or SGLang's and vLLM's names for them. The constructor returns when the model is loaded; `shutdown`,
    leaving a `with` block, the collector or the program's end stop it. Methods may be called from any
    thread, in a notebook too. Raises ConfigError, ModelError, and ProcessDied, here or in any later call, if
    a process dies.

    An answer is a dict with `text`, `output_ids` and `meta_info` (`finish_reason`, `prompt_tokens`,
    `completion_tokens`, `cached_tokens`, `cache`, ...), as `/generate` has it. Sampling parameters are a
    dict with the names of `/generate` (at most 128 new tokens unless it says otherwise; `max_tokens` and
    `min_tokens` are other names of `max_new_tokens` and `min_new_tokens`), or SamplingParams. A list of
    prompts may have any length: what exceeds `max_queued_requests` waits here.
    """

    def __init__(self, model_path: str | None = None, **options: Any) -> None:
        self._runtime = start(model_path, options)
        self._stop = weakref.finalize(self, self._runtime.close)

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Sampling | list[Sampling] = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        input: list[Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        stream: bool = False,
        progress: bool = True,
        **fields: Unpack[Fields],
    ) -> Any:
        """Go on with `prompt` or `input_ids`, which may be a list, or with `input`, one prompt in parts, as
        `/generate` has it: texts, token ids, lists of them, and messages.

        Returns an answer, or a list of them for a list of prompts or n > 1 (prompt by prompt, choice by
        choice). With `stream` an iterator of answers, each with all of its choice so far, but output logprobs
        only of what is new in it. A list runs side by side, with a progress bar (`progress`) on a terminal.
        Raises BadRequest naming the field.
        """
        prompts = (prompt, input_ids, input, chat_template_kwargs)
        call = self._generate_call(prompts, sampling_params, stream, fields)
        return self._iterate(call) if stream else self._wait(call, progress)

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Sampling | list[Sampling] = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        input: list[Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        stream: bool = False,
        **fields: Unpack[Fields],
    ) -> Any:
        """`generate` for a running asyncio loop; with `stream` the result is an asynchronous iterator."""
        prompts = (prompt, input_ids, input, chat_template_kwargs)
        call = self._generate_call(prompts, sampling_params, stream, fields)
        return self._async_iterate(call) if stream else await self._async_wait(call)

    def chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: Sampling = None,
        *,
        stream: bool = False,
        **fields: Unpack[ChatFields],
    ) -> Any:
        """Answer a chat of OpenAI messages, rendered by the model's template; otherwise as `generate`."""
        call = self._chat_call(messages, sampling_params, stream, fields)
        return self._iterate(call) if stream else self._wait(call, False)

    async def async_chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: Sampling = None,
        *,
        stream: bool = False,
        **fields: Unpack[ChatFields],
    ) -> Any:
        """`chat` for a running asyncio loop; with `stream` the result is an asynchronous iterator."""
        call = self._chat_call(messages, sampling_params, stream, fields)
        return self._async_iterate(call) if stream else await self._async_wait(call)

    def score(
        self, prompt: str | list[int], choices: list[str | list[int]], **fields: Unpack[ScoreFields]
    ) -> Answer:
        """How likely each of `choices` is after `prompt`: an answer without output, whose `scores` has `ids`
        and `logprobs` (natural, of each token) for each, in order.

        A choice's text has tokens of its own: none is made of its beginning and the prompt's end. The prompt
        is computed once. Raises BadRequest naming the field.
        """
        return _builtin(self._runtime.run(self._scored(prompt, choices, fields)))

    async def async_score(
        self, prompt: str | list[int], choices: list[str | list[int]], **fields: Unpack[ScoreFields]
    ) -> Answer:
        """`score` for a running asyncio loop."""
        work = self._runtime.submit(self._scored(prompt, choices, fields))
        return _builtin(await asyncio.wrap_future(work))

    def encode(
        self,
        prompt: str | list[str] | list[int] | list[list[int]],
        *,
        pooling: Literal["last", "mean"] | None = None,
        progress: bool = True,
        **fields: Unpack[Placing],
    ) -> Any:
        """The prompt's hidden state as a vector of length 1: its last token's or the mean.

        Which, `pooling` says (default: the configuration's). Returns a dict with `embedding` (a list of
        floats) and `meta_info`, or a list of them for a list.
        """
        work = offline_requests.embedding(self._runtime.service, prompt, pooling, fields)
        answers = [
            {
                "embedding": vector(outcome.pooled[0]).tolist(),
                "meta_info": {"prompt_tokens": outcome.prompt_tokens(0)},
            }
            for outcome in self._runtime.outcomes(work, progress)
        ]
        return answers if offline_requests.is_list(prompt) else answers[0]

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """The ids that the model would read for `prompt`; raises BadRequest as `generate` does."""
        asked = offline_requests.one_prompt(self._runtime.service, prompt, add_special_tokens)
        client = self._runtime.service.client
        ids: list[int] = self._runtime.run(client.ask("tokenize", prompt=asked))["tokens"]
        return ids

    def cache_explain(self, prompt: Prompt, *, cache_salt: str | None = None) -> dict[str, Any]:
        """What the prefix cache would find for `prompt` now, and where and why it stops; changes nothing."""
        service = self._runtime.service
        asked = offline_requests.one_prompt(service, prompt)
        where = offline_requests.place(service, cache_salt=cache_salt)
        options = {"reveal": True, "unsalted": where.scheduling.unsalted}
        question = service.client.ask("explain", prompt=asked, namespace=where.namespace, options=options)
        return self._runtime.run(question)

    def flush_cache(self) -> dict[str, Any]:
        """Forget every cached prefix that no running request uses; says how many tokens that were."""
        return self._runtime.run(self._runtime.service.client.ask("flush"))

    def server_info(self) -> dict[str, Any]:
        """The configuration, the model, what was chosen at start and why, and the scheduler's state."""
        return self._runtime.run(info.server_info(self._runtime.service))

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """What the server would answer to this body at this path, as plain values: the engine is a door for
        `sapwood.lang`. There are `/generate`, `/programs/end`, `/flush_cache` and `/server_info`."""
        work = offline_door.post(self._runtime.service, self._runtime.gate, path, body)
        return await asyncio.wrap_future(self._runtime.submit(work))

    def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[Answer]:
        """The events of a streamed answer of `/generate`; closed early, it aborts the request."""
        return self._async_iterate(offline_door.call(self._runtime.service, path, body))

    def get_tokenizer(self) -> Any:
        """The model's `tokenizers.Tokenizer`, loaded anew; raises ModelError if it has none."""
        return self._runtime.tokenizer()

    def shutdown(self) -> None:
        """End the processes. What still runs raises Unavailable, and so does every later call."""
        self._stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _scored(self, prompt: Any, choices: Any, fields: Mapping[str, Any]) -> Coroutine[Any, Any, Generated]:
        service = self._runtime.service
        body = offline_requests.score(service, prompt, choices, fields)
        return offline_work.scored(service, self._runtime.gate, body)

    def _generate_call(
        self, prompts: tuple[Any, ...], sampling: Any, stream: bool, fields: Mapping[str, Any]
    ) -> Call:
        names = ("text", "input_ids", "input", "chat_template_kwargs")
        if sum(given is not None for given in prompts[:3]) != 1:
            raise BadRequest("exactly one of prompt, input_ids and input must be given", param="prompt")
        values = {**_answered(fields, stream), **dict(zip(names, prompts, strict=True))}
        return offline_requests.generate(self._runtime.service, values, sampling)

    def _chat_call(self, messages: Any, sampling: Any, stream: bool, fields: Mapping[str, Any]) -> Call:
        of_chat = ChatFields.__annotations__.keys() - Fields.__annotations__.keys()
        chat = {name: value for name, value in fields.items() if name in of_chat}
        rest = {name: value for name, value in fields.items() if name not in of_chat}
        return offline_requests.chat(
            self._runtime.service, _answered(rest, stream), {**chat, "messages": messages}, sampling
        )

    def _wait(self, call: Call, progress: bool) -> Answer | list[Answer]:
        with bar(len(call.prompts) if progress else 0) as advance:
            work = offline_work.gather(self._runtime.service, self._runtime.gate, call, advance)
            return _shaped(call, self._runtime.run(work))

    async def _async_wait(self, call: Call) -> Answer | list[Answer]:
        work = offline_work.gather(self._runtime.service, self._runtime.gate, call, lambda: None)
        return _shaped(call, await asyncio.wrap_future(self._runtime.submit(work)))

    def _iterate(self, call: Call) -> Iterator[Answer]:
        source = offline_work.pieces(self._runtime.service, self._runtime.gate, call)
        try:
            while (batch := self._runtime.run(_next(source))) is not None:
                yield from map(_builtin, batch)
        finally:
            self._runtime.discard(source)

    async def _async_iterate(self, call: Call) -> AsyncIterator[Answer]:
        source = offline_work.pieces(self._runtime.service, self._runtime.gate, call)
        try:
            while (batch := await asyncio.wrap_future(self._runtime.submit(_next(source)))) is not None:
                for generated in batch:
                    yield _builtin(generated)
        finally:
            self._runtime.discard(source)


def start(model_path: str | None, options: dict[str, Any]) -> OfflineRuntime:
    """A runtime for the options of a Python program: the configuration's fields, or other runtimes' names."""
    if model_path is not None:
        options = {**options, "model_path": model_path}
    chosen = config.make(**translate(options))
    requirements.check(http=False)
    chosen = msgspec.structs.replace(chosen, stream_buffer=STREAM_BUFFER)
    return OfflineRuntime(chosen, sources.resolve(chosen))


def _answered(fields: Mapping[str, Any], stream: bool) -> dict[str, Any]:
    """The fields of `/generate` that say how to answer."""
    wanted = fields.get("return_logprob")
    return {
        **fields,
        "return_text_in_logprobs": any(wanted) if isinstance(wanted, list) else bool(wanted),
        "stream": stream,
    }


async def _next(source: AsyncIterator[list[Generated]]) -> list[Generated] | None:
    return await anext(source, None)


def _shaped(call: Call, generated: list[Generated]) -> Answer | list[Answer]:
    answers = [_builtin(one) for one in generated]
    return answers if call.body.batched or len(answers) != 1 else answers[0]


def _builtin(generated: Generated) -> Answer:
    answer: Answer = msgspec.to_builtins(generated)
    return answer
