"""Keys: every route is closed until its access says otherwise, and what a key opens is told by one table."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Mount

from sapwood.srt import config, log
from sapwood.srt.client import Client
from sapwood.srt.errors import ConfigError
from sapwood.srt.metrics import Metrics
from sapwood.srt.server import app, keys
from sapwood.srt.server.keys import ACCESS, Gate, Keys
from sapwood.srt.server.service import Service
from tests.api.scripted import Harness, source

USER, OTHER, ADMIN = "user-key-1", "user-key-2", "admin-key-9"
BOTH = {"api_key": f"{USER},{OTHER}", "admin_api_key": ADMIN}


def application(**options: Any) -> FastAPI:
    chosen = config.make(**options)
    metrics = Metrics()
    return app.create(Service(chosen, source(), Client(chosen, "/nowhere", metrics)), metrics)


def leaves(routes: list[BaseRoute]) -> Iterator[tuple[str, set[str]]]:
    """(path, methods) of every route that an application has, in included routers too."""
    for route in routes:
        path = getattr(route, "path", None)
        if path is None or isinstance(route, Mount):
            inner = getattr(route, "original_router", None)
            nested = inner.routes if inner is not None else getattr(route, "routes", [])
            assert nested, f"{route!r} cannot be looked into"
            yield from leaves(nested)
        else:
            yield path, set(getattr(route, "methods", None) or {"GET"})


ROUTES = sorted((path, method) for path, methods in leaves(application().routes) for method in methods)


def concrete(path: str) -> str:
    return path.replace("{model:path}", "org/tiny")


def ask(
    harness: FastAPI, method: str, path: str, headers: list[tuple[bytes, bytes]], **scope: Any
) -> tuple[int, dict[str, str], Any]:
    """One call of the ASGI application, without a socket: (status, headers, body)."""
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    full = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": headers if dict(headers).get(b"host") else [(b"host", b"127.0.0.1"), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        **scope,
    }
    asyncio.run(harness(full, receive, send))
    body = b"".join(m.get("body", b"") for m in sent[1:])
    answered = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    is_json = body and answered["content-type"] == "application/json"
    return sent[0]["status"], answered, msgspec.json.decode(body) if is_json else None


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


def test_every_route_is_in_the_table_and_the_table_has_no_other() -> None:
    assert {path for path, _method in ROUTES} == set(ACCESS)
    assert {path for path, kind in ACCESS.items() if kind == "public"} == {"/health", "/live"}


@pytest.mark.parametrize(("path", "method"), ROUTES)
def test_each_route_is_closed_without_its_key(path: str, method: str) -> None:
    served = application(**BOTH)
    access = ACCESS[path]
    if access == "public":
        assert ask(served, method, concrete(path), [])[0] in (200, 503)
        return
    for headers in ([], bearer("wrong"), bearer(""), [(b"x-api-key", b"wrong")]):
        status, answered, body = ask(served, method, concrete(path), headers)
        assert status == 401
        assert answered["www-authenticate"] == "Bearer"
        assert body["error"]["type"] == "authentication_error"
        assert set(body["error"]) == {"message", "type", "code", "param"}
    if access != "user":
        status, _answered, body = ask(served, method, concrete(path), bearer(USER))
        assert status == 403
        assert body["error"]["code"] == "permission_denied"


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "NOPE"])
@pytest.mark.parametrize(
    "path",
    [
        "/", "", "/nope", "/docs", "/redoc", "/openapi.json", "/openapi.json/", "/v1/models/", "/v1",
        "//health", "/health/", "/health/x", "/HEALTH", "/./health", "/live/../metrics", "/metrics/",
        "/metrics\n",
        "/metrics;x", "/health;/metrics", "/health%2F..%2Fmetrics", "/v1/chat/completions/", "/é", "*",
    ],
)  # fmt: skip
def test_no_other_path_gets_past_the_gate(path: str, method: str) -> None:
    served = application(**BOTH)
    assert ask(served, method, path, [])[0] == 401
    assert ask(served, method, path, bearer("wrong"))[0] == 401
    assert ask(served, method, path, bearer(USER))[0] in (200, 403, 404, 405)


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "DELETE"])
def test_other_methods_of_public_routes_do_nothing(method: str) -> None:
    assert ask(application(**BOTH), method, "/health", [])[0] == 405


def closed() -> FastAPI:
    """An application with routes that nobody has put into the table: one plain, one mounted."""
    served = application(**BOTH)
    router = APIRouter()

    @router.get("/new")
    async def new(request: Request) -> JSONResponse:
        return JSONResponse("reached")

    inner = FastAPI()
    inner.include_router(router)
    served.include_router(router)
    served.mount("/mounted", inner)
    return served


@pytest.mark.parametrize("path", ["/new", "/mounted/new"])
def test_a_route_without_an_entry_is_the_admins(path: str) -> None:
    served = closed()
    assert ask(served, "GET", path, [])[0] == 401
    status, _headers, body = ask(served, "GET", path, bearer(USER))
    assert (status, body["error"]["code"]) == (404, "not_found")
    assert ask(served, "GET", path, bearer(ADMIN))[::2] == (200, "reached")


def test_nothing_is_closed_without_keys_but_prompts_to_strangers() -> None:
    served = application()
    assert ask(served, "GET", "/metrics", [])[0] == 200
    assert ask(served, "GET", "/v1/models", bearer("anything"))[0] == 200
    foreign: list[tuple[list[tuple[bytes, bytes]], dict[str, Any]]] = [
        ([], {"client": ("10.0.0.7", 5)}),
        ([], {"client": None}),
        ([(b"host", b"evil.example")], {}),
        ([(b"x-forwarded-for", b"10.0.0.7")], {}),
    ]
    for headers, change in foreign:
        assert ask(served, "GET", "/cache/tree", headers, **change)[0] == 403
        assert ask(served, "GET", "/metrics", headers, **change)[0] == 200
    for host in (b"127.0.0.1:30000", b"localhost", b"[::1]:30000", b"127.8.8.8"):
        # 503: it has got past the gate, and nothing is ready behind it.
        assert ask(served, "GET", "/cache/tree", [(b"host", host)])[0] == 503


ELSEWHERE: list[list[tuple[bytes, bytes]]] = [
    [(b"origin", b"https://evil.example")],
    [(b"origin", b"null")],
    [(b"origin", b"")],
    [(b"origin", b"http://127.0.0.1:8080")],
    [(b"origin", b"http://127.0.0.1.evil.example")],
    [(b"sec-fetch-site", b"cross-site")],
    [(b"sec-fetch-site", b"same-site")],
    [(b"sec-fetch-site", b"Cross-Site"), (b"origin", b"http://127.0.0.1")],
]
HERE: list[list[tuple[bytes, bytes]]] = [
    [(b"origin", b"http://127.0.0.1")],
    [(b"origin", b"https://Tiny.Example:8443"), (b"host", b"tiny.example:8443")],
    [(b"sec-fetch-site", b"same-origin")],
    [(b"sec-fetch-site", b"none")],
]


@pytest.mark.parametrize(("path", "method"), [route for route in ROUTES if route[1] != "HEAD"])
def test_a_page_of_another_site_reaches_no_route(path: str, method: str) -> None:
    """An image asks without leave, and so does a body that has no type."""
    public = ACCESS[path] == "public"
    for headers in ELSEWHERE:
        status, _headers, body = ask(application(), method, concrete(path), headers)
        if public:
            assert status in (200, 503)
        else:
            assert (status, body["error"]["code"]) == (403, "cross_origin")
    for headers in HERE:
        if method == "GET" and ACCESS[path] != "prompts":
            assert ask(application(), method, concrete(path), headers)[0] in (200, 404, 503)


def test_a_page_of_another_site_may_show_a_key() -> None:
    for headers in ELSEWHERE:
        assert ask(application(**BOTH), "GET", "/v1/models", [*headers, *bearer(USER)])[0] == 200
        assert ask(application(**BOTH), "GET", "/v1/models", [*headers, *bearer("wrong")])[0] == 403
        assert ask(application(admin_api_key=ADMIN), "GET", "/v1/models", headers)[0] == 403
        # A key is nothing where none is asked for.
        assert ask(application(), "GET", "/v1/models", [*headers, *bearer(USER)])[0] == 403


def test_a_page_cannot_flush_the_cache(new_server: Callable[..., Harness]) -> None:
    harness = new_server()
    harness.tokenizer.answers = {"flush": {"success": True}}
    with httpx.Client(base_url=harness.url, trust_env=False, verify=False) as http:
        image = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
        assert http.get("/flush_cache", headers=image).status_code == 403
        blob = http.post(
            "/v1/completions", content=b'{"prompt": "x"}', headers={"origin": "http://evil.example"}
        )
        assert blob.status_code == 403
        assert harness.tokenizer.received == []
        assert http.get("/flush_cache", headers={"origin": harness.url}).status_code == 200
        assert http.get("/flush_cache").status_code == 200


def test_an_api_key_alone_opens_all_but_what_others_have_sent() -> None:
    served = application(api_key=USER)
    assert ask(served, "GET", "/metrics", [])[0] == 401
    assert ask(served, "GET", "/metrics", bearer(USER))[0] == 200
    assert ask(served, "GET", "/nope", bearer(USER))[0] == 404
    assert ask(served, "GET", "/cache/tree", [])[0] == 401
    status, _headers, body = ask(served, "GET", "/cache/tree", bearer(USER))
    assert status == 403
    assert "--admin-api-key" in body["error"]["message"]


def test_an_admin_key_alone_closes_only_the_admins_routes() -> None:
    served = application(admin_api_key=ADMIN)
    for headers in ([], bearer("EMPTY")):
        assert ask(served, "GET", "/v1/models", headers)[0] == 200
        assert ask(served, "GET", "/metrics", headers)[0] == 401
        assert ask(served, "GET", "/cache/tree", headers)[0] == 401
    assert ask(served, "GET", "/metrics", bearer(ADMIN))[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        bearer(USER), bearer(OTHER), bearer(ADMIN), [(b"x-api-key", USER.encode())],
        [(b"authorization", b"bearer   " + USER.encode() + b" ")],
        [(b"authorization", b"BEARER " + USER.encode())], [*bearer("wrong"), (b"x-api-key", USER.encode())],
    ],
)  # fmt: skip
def test_ways_to_send_a_key(headers: list[tuple[bytes, bytes]]) -> None:
    assert ask(application(**BOTH), "GET", "/v1/models", headers)[0] == 200


@pytest.mark.parametrize(
    "value",
    [
        b"", b"Bearer", b"Bearer ", USER.encode(), b"Basic " + USER.encode(), b"Bearer" + USER.encode(),
        b"Bearer " + USER.encode()[:-1], b"Bearer " + USER.encode() + b"x",
        b"Bearer " + USER.upper().encode(),
        b"Bearer \xff\xfe\x00", "Bearer ключ".encode(), b"Bearer " + f"{USER},{OTHER}".encode(),
        b"Bearer " + b"x" * 60_000,
    ],
)  # fmt: skip
def test_what_is_no_key(value: bytes) -> None:
    assert ask(application(**BOTH), "GET", "/v1/models", [(b"authorization", value)])[0] == 401


def test_all_keys_are_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = keys.hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        assert len(a) == len(b) == 32
        seen.append(real(a, b))
        return seen[-1]

    monkeypatch.setattr(keys.hmac, "compare_digest", compare)
    mine = Keys(config.make(api_key="a,b,c", admin_api_key="d"))
    for key, level in ((b"a", "user"), (b"c", "user"), (b"d", "admin"), (b"x", "none"), (b"", "none")):
        seen.clear()
        assert mine.shown([key]).level == level
        assert len(seen) == 4


@pytest.mark.parametrize("value", ["", " ", "a,,b", ",", "a,", "a b", "ключ", "a\nb", "a\x00"])
def test_bad_keys_are_refused_at_start_without_being_told(value: str) -> None:
    for name in ("api_key", "admin_api_key"):
        with pytest.raises(ConfigError, match=name.replace("_", "-")) as caught:
            config.make(**{name: value})
        assert "visible ASCII" in caught.value.message
        assert "ключ" not in caught.value.message


def test_the_level_is_told_to_routes() -> None:
    seen: list[tuple[str, bool]] = []

    async def look(request: Request) -> JSONResponse:
        seen.append((keys.level_of(request), keys.is_admin(request)))
        return JSONResponse("ok")

    inner = FastAPI()
    inner.add_route("/x", look)
    inner.add_middleware(Gate, keys=Keys(config.make(**BOTH)), access={"/x": "public"})
    for headers in ([], bearer(USER), bearer(ADMIN)):
        ask(inner, "GET", "/x", headers)
    assert seen == [("none", False), ("user", False), ("admin", True)]


def test_an_abort_of_all_is_the_admins(new_server: Callable[..., Harness]) -> None:
    harness = new_server(config.make(**BOTH))
    with httpx.Client(base_url=harness.url, trust_env=False, verify=False) as http:
        mine = {"authorization": f"Bearer {USER}"}
        assert http.post("/abort_request", json={"rid": "x"}, headers=mine).json() == {"aborted": 0}
        assert http.post("/abort_request", json={"abort_all": True}, headers=mine).status_code == 403
        admin = {"authorization": f"Bearer {ADMIN}"}
        assert http.post("/abort_request", json={"abort_all": True}, headers=admin).json() == {"aborted": 0}


def test_the_body_of_a_refused_request_is_not_waited_for(new_server: Callable[..., Harness]) -> None:
    harness = new_server(config.make(**BOTH))
    with socket.create_connection(("127.0.0.1", harness.port)) as sock:
        sock.settimeout(20)
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n{"
        sock.sendall(head.encode())
        assert sock.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_keys_are_shown_nowhere(new_server: Callable[..., Harness], caplog: pytest.LogCaptureFixture) -> None:
    harness = new_server(config.make(**BOTH, log_requests=True))
    caplog.set_level(logging.DEBUG)
    with httpx.Client(base_url=harness.url, trust_env=False, verify=False) as http:
        texts = []
        for key in (USER, ADMIN, "wrong-key-7"):
            headers = {"authorization": f"Bearer {key}", "x-api-key": key}
            for path in (
                "/server_info",
                "/metrics",
                "/v1/models",
                "/openapi.json",
                "/nope",
                "/get_model_info",
            ):
                response = http.get(path, headers=headers)
                texts.append(response.text + str(response.headers))
            texts.append(http.post("/v1/completions", json={"prompt": "x"}, headers=headers).text)
            texts.append(http.post("/v1/completions", json={"nope": 1}, headers=headers).text)
        info = http.get("/server_info", headers={"x-api-key": ADMIN}).json()
    assert info["config"]["api_key"] == info["config"]["admin_api_key"] == "***"
    lines = [form.format(record) for form in (log._JsonLines("server"), log._TextLines("server"))
             for record in caplog.records if record.name.startswith("sapwood")]  # fmt: skip
    for route in ("GET /nope", "POST /v1/completions"):
        assert sum(route in line for line in lines) >= 2
    everything = "\n".join([*texts, *lines, caplog.text])
    for key in (USER, OTHER, ADMIN, "wrong-key-7"):
        assert key not in everything
