"""Counts what is answered, by route, method and status."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sapwood.srt.metrics import Metrics

METHODS = frozenset(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"))
UNROUTED = "unrouted"
"""The route of what no route has seen: unknown paths, and what was refused for want of a key."""
GONE = 499
"""The status of a request whose client went away before there was an answer."""


class Counted:
    """ASGI middleware, outside of all others. Labels are few: a path counts as its route's template."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = GONE

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            route = getattr(scope.get("route"), "path", UNROUTED)
            method = scope["method"] if scope["method"] in METHODS else "other"
            self._metrics.on_answer(route, method, status)
