"""`sapwood.Runtime`: a server of this program's own, as SGLang's users know it."""

from __future__ import annotations

import json
import weakref
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import httpx
import msgspec

from sapwood.srt import config, offline_requests, requirements, serve
from sapwood.srt.config import Config
from sapwood.srt.errors import BadRequest, ErrorInfo, ProcessDied, SapwoodError, Unavailable, from_info
from sapwood.srt.flags.keywords import translate
from sapwood.srt.launch_thread import LaunchThread
from sapwood.srt.lifeline import ROLES
from sapwood.srt.loader import sources
from sapwood.srt.offline import tokenizer_of
from sapwood.srt.offline_requests import Sampling


class Runtime:
    """A server on 127.0.0.1 (or `host`), in processes that end with this program, whatever ends it.

    `options` are the configuration's fields or SGLang's names for them (`tp_size`, `mem_fraction_static`,
    ...). Without `port` a free one is taken. The constructor returns when requests are served; `shutdown`,
    leaving a `with` block, the collector or the program's end stop it. Raises ConfigError, ModelError, and
    ProcessDied with what the process said.

    `url` (also `endpoint`) is where any client reaches it, with `api_key` if it has one; programs of the
    language take a Runtime as their backend. `generate` and `encode` return JSON text, as
    SGLang's do. An error answer is raised as the Engine raises it.
    """

    def __init__(self, model_path: str | None = None, **options: Any) -> None:
        if model_path is not None:
            options["model_path"] = model_path
        chosen = config.make(**{"log_level": "warning", "port": 0, **translate(options)})
        requirements.check()
        self._died: list[ProcessDied] = []
        self._source = sources.resolve(chosen)
        with serve.listen(chosen.host, chosen.port) as listener:
            self.host, self.port = chosen.host, int(listener.getsockname()[1])
            thread = LaunchThread(chosen, self._source, ROLES, self._died.append, listener)
            self._stop = weakref.finalize(self, thread.close)
            try:
                thread.launch()
            except BaseException:
                self._stop()
                raise
        self.url = serve.url(chosen.host, self.port)
        self.endpoint = self.url
        self.api_key = _key(chosen)
        self._options: dict[str, Any] = {
            "base_url": self.url,
            "headers": _headers(self.api_key),
            # An answer takes as long as it takes; that it is on its way the server itself looks after.
            "timeout": httpx.Timeout(None, connect=10.0),
            # A proxy of the environment is not for this machine.
            "trust_env": False,
        }

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Sampling | list[Sampling] = None,
        **fields: Any,
    ) -> str:
        """The JSON text of what `/generate` answers for `prompt`, a text or a list of them.

        `fields` are others of that route: `input_ids` in place of `prompt`, `return_logprob`,
        `logprob_start_len`, `top_logprobs_num`, `token_ids_logprob`, `rid`, `cache_salt`, `priority`, `keep`,
        `queue_timeout`, `program`.
        """
        return json.dumps(self._post("/generate", _body(prompt, sampling_params, fields)))

    async def async_generate(
        self, prompt: str | list[int], sampling_params: Sampling = None, **fields: Any
    ) -> AsyncIterator[str]:
        """The answer's text, piece by piece, for a running asyncio loop; left early, it is aborted."""
        body = _json({**_body(prompt, sampling_params, fields), "stream": True})
        length = 0
        try:
            async with (
                httpx.AsyncClient(**self._options) as client,
                client.stream("POST", "/generate", content=body) as answer,
            ):
                if answer.status_code != 200:
                    raise _error(answer.status_code, await answer.aread())
                async for line in _lines(answer.aiter_bytes()):
                    data = line.removeprefix(b"data: ")
                    if data in (b"", b"[DONE]"):
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise _error(answer.status_code, data)
                    if len(event["text"]) > length:
                        yield event["text"][length:]
                        length = len(event["text"])
        except httpx.TransportError as e:
            raise self._gone(e) from None

    add_request = async_generate

    def encode(self, prompt: str | list[str]) -> str:
        """JSON text: the vector of `prompt` as `embedding`, or a list of such objects for a list."""
        answer = self._post("/v1/embeddings", {"model": "default", "input": prompt})
        vectors = [{"embedding": item["embedding"]} for item in answer["data"]]
        return json.dumps(vectors if isinstance(prompt, list) else vectors[0])

    def cache_prefix(self, prefix: str) -> None:
        """Compute `prefix` now, so that later prompts that begin with it find it cached."""
        self.generate(prefix, {"max_new_tokens": 1, "temperature": 0})

    def flush_cache(self) -> None:
        """Forget every cached prefix that no running request uses."""
        self._post("/flush_cache", {})

    def get_server_info(self) -> dict[str, Any]:
        """The configuration, the model, what was chosen at start and why, and the scheduler's state."""
        info: dict[str, Any] = self._send("GET", "/server_info", None)
        return info

    def get_tokenizer(self) -> Any:
        """The model's `tokenizers.Tokenizer` (not transformers': `encode(text)` has `.ids`), loaded anew."""
        return tokenizer_of(self._source)

    def shutdown(self) -> None:
        """End the processes; what still runs is cut off. Safe to repeat."""
        self._stop()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._send("POST", path, body)

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """The JSON value that a route answers with. Raises the error that it answers with."""
        try:
            # One a call: a client may be used neither in a fork nor in two threads at once.
            with httpx.Client(**self._options) as client:
                answer = client.request(method, path, content=None if body is None else _json(body))
        except httpx.TransportError as e:
            raise self._gone(e) from None
        if answer.status_code != 200:
            raise _error(answer.status_code, answer.content)
        return answer.json()

    def _gone(self, error: httpx.TransportError) -> SapwoodError:
        """Why the server cannot be reached."""
        if self._died:
            return self._died[0]
        if not self._stop.alive:
            return Unavailable("the runtime has been shut down", code="closed")
        return Unavailable(f"the server at {self.url} does not answer: {error!r}")


def _body(prompt: Any, sampling: Sampling | list[Sampling], fields: dict[str, Any]) -> dict[str, Any]:
    """A body of `/generate`. Raises BadRequest."""
    named = fields if prompt is None else {**fields, "text": prompt}
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], str):
        named = {**fields, "input_ids": prompt}
    params: Any
    if isinstance(sampling, (list, tuple)):
        params = [offline_requests.native(one) for one in sampling]
    else:
        params = offline_requests.native(sampling)
    body: dict[str, Any] = msgspec.to_builtins({**named, "sampling_params": params}, str_keys=True)
    return body


def _json(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise BadRequest("a text has a lone surrogate") from None
    except (TypeError, ValueError) as e:
        raise BadRequest(f"an argument is no JSON value: {e}") from None


def _key(chosen: Config) -> str | None:
    for keys in (chosen.admin_api_key, chosen.api_key):
        if keys:
            return config.split_keys(keys)[0]
    return None


def _headers(api_key: str | None) -> dict[str, str]:
    json_body = {"Content-Type": "application/json"}
    return {**json_body, "Authorization": f"Bearer {api_key}"} if api_key else json_body


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines without their new lines. httpx's own end at U+2028 too, which may stand in a JSON text."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


def _error(status: int, content: bytes) -> SapwoodError:
    """The exception for an error answer."""
    try:
        told = json.loads(content)["error"]
        info = ErrorInfo(status, told["type"], told["code"], told["message"], told.get("param"))
    except (ValueError, KeyError, TypeError):
        return SapwoodError(f"the server answered {status}: {content[:200]!r}")
    return from_info(info)
