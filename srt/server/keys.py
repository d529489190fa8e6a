"""Who may call what: one table of routes, two kinds of keys, and a gate before every route.

A route that is not in the table is closed to all but the holders of the admin key. A page of another origin
needs a key for all but public routes: a browser sends some requests of any page (an image, a body without a
type) unasked.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from typing import Literal, NamedTuple

from starlette.requests import Request
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from sapwood.srt.config import Config, split_keys
from sapwood.srt.errors import ErrorInfo, Forbidden, Unauthorized
from sapwood.srt.server.reply import error_answer

Level = Literal["none", "user", "admin"]
"""What a request has shown: no key, one of `--api-key`, or the admin's.

Without `--admin-api-key` a user's key opens the admin's routes, and without any key everything is open, but
"admin" is only who has shown an admin key, or, on a server without keys, calls from the same machine.
"""

Access = Literal["public", "user", "admin", "prompts"]
"""Who a route is for. "prompts" shows what others have sent: only for level "admin"."""

ACCESS: dict[str, Access] = {
    "/health": "public",
    "/live": "public",
    "/health_generate": "user",
    "/v1/chat/completions": "user",
    "/v1/completions": "user",
    "/v1/embeddings": "user",
    "/v1/models": "user",
    "/v1/models/{model:path}": "user",
    "/generate": "user",
    "/tokenize": "user",
    "/detokenize": "user",
    "/abort_request": "user",
    "/cache/explain": "user",
    "/programs/end": "user",
    "/programs/{program:path}": "user",
    "/structured/support": "user",
    "/version": "user",
    "/openapi.json": "user",
    "/model_info": "user",
    "/get_model_info": "user",
    "/flush_cache": "admin",
    "/server_info": "admin",
    "/get_server_info": "admin",
    "/metrics": "admin",
    "/cache/tree": "prompts",
}
"""The access of every route by its path, whatever the method."""

LEVEL = "sapwood.level"
KEY = "sapwood.key"
ADMIN_ROUTES = "sapwood.admin_routes"


def level_of(request: Request) -> Level:
    """What the request has shown."""
    level: Level = request.scope.get(LEVEL, "none")
    return level


def key_of(request: Request) -> bytes:
    """Whose the request is: the digest of the key that it has shown (see Shown); empty without one."""
    key: bytes = request.scope.get(KEY, b"")
    return key


def is_admin(request: Request) -> bool:
    """Whether the request may see what others have sent.

    It has shown the admin key; or the server has no keys at all, and the request comes from this machine,
    under a local name, and through no proxy.
    """
    return level_of(request) == "admin"


def require_admin(request: Request) -> None:
    """For what only some bodies of a user's route ask for. Raises Forbidden as an admin route would."""
    if not request.scope.get(ADMIN_ROUTES, False):
        raise _needs_admin()


class Shown(NamedTuple):
    """What the keys of a request are worth. `key` is the digest of the one whose cache it uses: an API key
    goes before the admin's, so that who shows both sees as the admin what that API key finds."""

    level: Level
    key: bytes = b""


class Keys:
    """The configured keys. Presented ones are compared with all of them in constant time, as digests."""

    def __init__(self, config: Config) -> None:
        self._users = [_digest(key.encode()) for key in split_keys(config.api_key)]
        self._admins = [_digest(key.encode()) for key in split_keys(config.admin_api_key)]

    @property
    def any(self) -> bool:
        return bool(self._users or self._admins)

    @property
    def admin(self) -> bool:
        return bool(self._admins)

    @property
    def user(self) -> bool:
        return bool(self._users)

    def shown(self, presented: Iterable[bytes]) -> Shown:
        """The best level among the presented keys, and whose they are."""
        user = admin = b""
        for key in presented:
            digest = _digest(key)
            # Every comparison is made: how long it takes must not tell which key came close.
            for mine in self._users:
                user = mine if hmac.compare_digest(digest, mine) else user
            for mine in self._admins:
                admin = mine if hmac.compare_digest(digest, mine) else admin
        return Shown("admin" if admin else "user" if user else "none", user or admin)


class Gate:
    """ASGI middleware: decides before the body is read, and notes the level in the scope."""

    def __init__(self, app: ASGIApp, keys: Keys, access: dict[str, Access] | None = None) -> None:
        self._app = app
        self._keys = keys
        table = ACCESS if access is None else access
        self._table = [(compile_path(path)[0], kind) for path, kind in table.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http":
            presented = list(_presented(scope["headers"])) if self._keys.any else []
            shown, scope[KEY] = self._keys.shown(presented)
            scope[LEVEL] = level = self._level(shown, scope)
            scope[ADMIN_ROUTES] = level == "admin" or (level == "user" and not self._keys.admin)
            refusal = self._refusal(scope, shown, bool(presented))
            if refusal is not None:
                await error_answer(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _level(self, shown: Level, scope: Scope) -> Level:
        if not self._keys.any:
            return "admin" if _from_this_machine(scope) else "user"
        # With an admin key alone, users need none, and a client that sends one all the same is a user.
        return "user" if shown == "none" and not self._keys.user else shown

    def _refusal(self, scope: Scope, shown: Level, presented: bool) -> ErrorInfo | None:
        """Why the request gets no further; None if it may. `shown` is what its keys alone are worth."""
        path, level, admin_routes = scope["path"], scope[LEVEL], scope[ADMIN_ROUTES]
        access = next((kind for pattern, kind in self._table if pattern.match(path)), None)
        if access == "public":
            return None
        if shown == "none" and _from_another_site(scope):
            return Forbidden("a page of another site must show a key", code="cross_origin").info()
        if level == "none":
            return _unauthorized(presented).info()
        if access == "user" or (admin_routes and access != "prompts") or level == "admin":
            return None
        if access is None:
            return _not_found(scope)
        # Who has shown a good key is told that it is not enough; who has not, that one is needed.
        if shown == "user" or not self._keys.admin:
            return _needs_admin().info()
        return _unauthorized(presented).info()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _presented(headers: list[tuple[bytes, bytes]]) -> Iterable[bytes]:
    for name, value in headers:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            yield key.strip() if scheme.lower() == b"bearer" else b""


def _from_this_machine(scope: Scope) -> bool:
    client = scope.get("client")
    headers = dict(scope["headers"])
    forwarded = any(name in headers for name in (b"x-forwarded-for", b"forwarded", b"x-real-ip"))
    # A foreign name means a page in a browser whose own name was pointed at this address.
    return (
        client is not None
        and not forwarded
        and _is_local(client[0])
        and _is_local(_host(headers.get(b"host", b"").decode("latin-1")))
    )


def _from_another_site(scope: Scope) -> bool:
    """Whether a browser says that a page of another origin asks; others send neither header."""
    headers = {name: value.decode("latin-1").lower() for name, value in scope["headers"]}
    if headers.get(b"sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    origin = headers.get(b"origin")
    return origin is not None and origin.partition("://")[2] != headers.get(b"host", "")


def _host(header: str) -> str:
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _is_local(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _unauthorized(given: bool) -> Unauthorized:
    what = "the API key is not known" if given else "an API key is needed"
    return Unauthorized(f"{what}; send it as `Authorization: Bearer KEY`")


def _needs_admin() -> Forbidden:
    return Forbidden("this needs the admin key (--admin-api-key)")


def _not_found(scope: Scope) -> ErrorInfo:
    message = f"{scope['method']} {scope['path']}: Not Found"
    return ErrorInfo(404, "invalid_request_error", "not_found", message)
