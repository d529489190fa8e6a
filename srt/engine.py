"""The offline engine: the runtime inside a Python program, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any

import msgspec

from sapwood.srt import config, offline_requests, requirements
from sapwood.srt.errors import BadRequest
from sapwood.srt.loader import sources
from sapwood.srt.offline import OfflineRuntime
from sapwood.srt.offline_requests import Call
from sapwood.srt.params import SamplingParams
from sapwood.srt.server import info
from sapwood.srt.server.native_protocol import Generated

Answer = dict[str, Any]
Sampling = dict[str, Any] | SamplingParams | None

STREAM_BUFFER = 2**20
"""A program that looks away for a while is no slow reader: its stream holds more than any answer has."""


class Engine:
    """A model in processes of its own, as `sapwood serve` has them, for one Python program.

    `model_path` and `options` are the fields of the configuration (`sapwood serve --help`, with underscores).
    The constructor returns when the model is loaded; `shutdown`, leaving a `with` block, the collector or the
    program's end stop it. Methods may be called from any thread. Raises ConfigError, ModelError, and
    ProcessDied, here or in any later call, if a process dies.

    An answer is a dict with `text`, `output_ids` and `meta_info` (`finish_reason`, `prompt_tokens`,
    `completion_tokens`, `cached_tokens`, `cache`, ...), as `/generate` has it. Sampling parameters are a
    dict with the names of `/generate` (at most 128 new tokens unless it says otherwise) or SamplingParams.
    """

    def __init__(self, model_path: str | None = None, **options: Any) -> None:
        if model_path is not None:
            options["model_path"] = model_path
        chosen = config.make(**options)
        requirements.check(http=False)
        chosen = msgspec.structs.replace(chosen, stream_buffer=STREAM_BUFFER)
        self._runtime = OfflineRuntime(chosen, sources.resolve(chosen))
        self._gate = asyncio.Semaphore(chosen.max_queued_requests)
        self._stop = weakref.finalize(self, self._runtime.close)

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Sampling | list[Sampling] = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        stream: bool = False,
        rid: str | list[str] | None = None,
        cache_salt: str = "",
        progress: bool = True,
    ) -> Any:
        """Go on with `prompt` or `input_ids`: one of them, which may be a list.

        Returns an answer, or a list of them for a list of prompts or n > 1 (prompt by prompt, choice by
        choice). With `stream` an iterator of answers, each with all of its choice so far. A list runs side
        by side, with a progress bar (`progress`) on a terminal. Raises BadRequest naming the field.
        """
        fields = self._fields(return_logprob, top_logprobs_num, stream, rid, cache_salt)
        call = self._generate_call(prompt, input_ids, sampling_params, fields)
        return self._iterate(call) if stream else self._wait(call, progress)

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Sampling | list[Sampling] = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        stream: bool = False,
        rid: str | list[str] | None = None,
        cache_salt: str = "",
    ) -> Any:
        """`generate` for a running asyncio loop; with `stream` the result is an asynchronous iterator."""
        fields = self._fields(return_logprob, top_logprobs_num, stream, rid, cache_salt)
        call = self._generate_call(prompt, input_ids, sampling_params, fields)
        return self._async_iterate(call) if stream else await self._async_wait(call)

    def chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: Sampling = None,
        *,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        stream: bool = False,
        rid: str | None = None,
        cache_salt: str = "",
        **template: Any,
    ) -> Any:
        """Answer a chat of OpenAI messages, rendered by the model's template; otherwise as `generate`.

        `template` are the fields of a chat request that concern it: `add_generation_prompt`,
        `continue_final_message`, `chat_template_kwargs`.
        """
        fields = self._fields(return_logprob, top_logprobs_num, stream, rid, cache_salt)
        call = self._chat_call(messages, template, sampling_params, fields)
        return self._iterate(call) if stream else self._wait(call, progress=False)

    async def async_chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: Sampling = None,
        *,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        stream: bool = False,
        rid: str | None = None,
        cache_salt: str = "",
        **template: Any,
    ) -> Any:
        """`chat` for a running asyncio loop; with `stream` the result is an asynchronous iterator."""
        fields = self._fields(return_logprob, top_logprobs_num, stream, rid, cache_salt)
        call = self._chat_call(messages, template, sampling_params, fields)
        return self._async_iterate(call) if stream else await self._async_wait(call)

    def flush_cache(self) -> dict[str, Any]:
        """Forget every cached prefix that no running request uses; says how many tokens that were."""
        return self._runtime.run(self._runtime.service.client.ask("flush"))

    def server_info(self) -> dict[str, Any]:
        """The configuration, the model, what was chosen at start and why, and the scheduler's state."""
        return self._runtime.run(info.server_info(self._runtime.service))

    def shutdown(self) -> None:
        """End the processes. What still runs raises Unavailable, and so does every later call."""
        self._stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    @staticmethod
    def _fields(
        return_logprob: bool, top_logprobs_num: int, stream: bool, rid: object, cache_salt: str
    ) -> dict[str, Any]:
        """The fields of `/generate` that say how to answer."""
        return {
            "return_logprob": return_logprob,
            "return_text_in_logprobs": return_logprob,
            "top_logprobs_num": top_logprobs_num,
            "stream": stream,
            "rid": rid,
            "cache_salt": cache_salt or None,
        }

    def _generate_call(self, prompt: Any, input_ids: Any, sampling: Any, fields: dict[str, Any]) -> Call:
        if (prompt is None) == (input_ids is None):
            raise BadRequest("exactly one of prompt and input_ids must be given", param="prompt")
        values = {**fields, "text": prompt, "input_ids": input_ids}
        return offline_requests.generate(self._runtime.service, values, sampling)

    def _chat_call(self, messages: Any, template: Any, sampling: Any, fields: dict[str, Any]) -> Call:
        chat = {**template, "messages": messages}
        return offline_requests.chat(self._runtime.service, fields, chat, sampling)

    def _wait(self, call: Call, progress: bool) -> Answer | list[Answer]:
        with _bar(len(call.prompts) if progress else 0) as advance:
            work = offline_requests.gather(self._runtime.service, self._gate, call, advance)
            return _shaped(call, self._runtime.run(work))

    async def _async_wait(self, call: Call) -> Answer | list[Answer]:
        work = offline_requests.gather(self._runtime.service, self._gate, call, lambda: None)
        return _shaped(call, await asyncio.wrap_future(self._runtime.submit(work)))

    def _iterate(self, call: Call) -> Iterator[Answer]:
        source = offline_requests.pieces(self._runtime.service, self._gate, call)
        try:
            while (batch := self._runtime.run(_next(source))) is not None:
                yield from map(_builtin, batch)
        finally:
            self._runtime.discard(source)

    async def _async_iterate(self, call: Call) -> AsyncIterator[Answer]:
        source = offline_requests.pieces(self._runtime.service, self._gate, call)
        try:
            while (batch := await asyncio.wrap_future(self._runtime.submit(_next(source)))) is not None:
                for generated in batch:
                    yield _builtin(generated)
        finally:
            self._runtime.discard(source)


async def _next(source: AsyncIterator[list[Generated]]) -> list[Generated] | None:
    return await anext(source, None)


def _shaped(call: Call, generated: list[Generated]) -> Answer | list[Answer]:
    answers = [_builtin(one) for one in generated]
    return answers if call.body.batched or len(answers) != 1 else answers[0]


def _builtin(generated: Generated) -> Answer:
    answer: Answer = msgspec.to_builtins(generated)
    return answer


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[], None]]:
    """A progress bar over `total` prompts, if there are several and somebody sees it."""
    if total < 2 or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda: bar.advance(task)
