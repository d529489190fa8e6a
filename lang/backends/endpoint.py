"""`RuntimeEndpoint`: a Sapwood server that runs somewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from sapwood.lang.backends.answers import reading
from sapwood.lang.backends.http import Http

_READ = ("/server_info", "/model_info")
"""Routes that are asked for by GET."""
_LONG = "/generate"
"""The route whose answers take a while."""


class RuntimeEndpoint:
    """The server at `url` (`sapwood serve`), as a backend of programs.

    Nothing is sent before it is needed. `verify`: a file of certificates to trust, or False to trust any.
    `timeout`: seconds for which the server may send nothing (default: any number). `owner` is kept alive with
    the endpoint. Its methods raise RequestFailed, with the server's message, status, code and param.

    >>> RuntimeEndpoint("http://127.0.0.1:30000")
    RuntimeEndpoint('http://127.0.0.1:30000')
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        verify: str | bool | None = None,
        chat_template_name: str | None = None,
        *,
        timeout: float | None = None,
        owner: object = None,
    ) -> None:
        if chat_template_name is not None:
            raise ValueError(
                "chat_template_name is not supported: messages are rendered by the server "
                "(sapwood serve --chat-template)"
            )
        self.url = url.rstrip("/")
        self._http = Http(url, api_key, verify, timeout)
        self._owner = owner
        self._model_info: dict[str, Any] | None = None

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer of a route, as plain values."""
        if path in _READ:
            return await self._http.send("GET", path, brief=True)
        return await self._http.send("POST", path, body, brief=path != _LONG)

    def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed answer; closed early, it cancels the request."""
        return self._http.events(path, body)

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self._http.aclose()

    def get_model_name(self) -> str:
        """The path or name of the served model, asked for once."""
        if self._model_info is None:
            self._model_info = self._http.send_now("GET", "/model_info")
        with reading("/model_info", self._model_info):
            return str(self._model_info["model_path"])

    def get_server_info(self) -> dict[str, Any]:
        """The configuration, the model, what was chosen at start, and the scheduler's state."""
        info: dict[str, Any] = self._http.send_now("GET", "/server_info")
        return info

    def flush_cache(self) -> None:
        """Forget every cached prefix that no running request uses."""
        self._http.send_now("POST", "/flush_cache", {})

    def cache_prefix(self, prefix_str: str) -> None:
        """Compute a text now, so that what begins with it finds it cached."""
        body = {"text": prefix_str, "sampling_params": {"max_new_tokens": 0}}
        self._http.send_now("POST", "/generate", body)

    def __repr__(self) -> str:
        return f"RuntimeEndpoint({self.url!r})"
