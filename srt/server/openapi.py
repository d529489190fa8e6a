"""The OpenAPI document: FastAPI's list of routes with the schemas of our msgspec structs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from sapwood.srt.server import bounds
from sapwood.srt.server.refused import Refused, table_of
from sapwood.srt.server.service import Service

REF = "#/components/schemas/{name}"


class ErrorBody(msgspec.Struct):
    """`param` is the path of the field at fault."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorAnswer(msgspec.Struct):
    """Every answer whose status is not 200."""

    error: ErrorBody


def json_body(request: type, whole: type, chunk: type | None = None) -> dict[str, Any]:
    """`openapi_extra` of a route: its request, its answer, and the events of its stream."""
    content = {"application/json": {"schema": _ref(whole)}}
    if chunk is not None:
        content["text/event-stream"] = {"schema": _ref(chunk)}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
        "responses": {"200": {"description": "the answer", "content": content}},
    }


def json_answer(whole: type) -> dict[str, Any]:
    """`openapi_extra` of a route that takes no body."""
    content = {"application/json": {"schema": _ref(whole)}}
    return {"responses": {"200": {"description": "the answer", "content": content}}}


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": REF.format(name=kind.__name__)}


def install(app: FastAPI, kinds: list[type[msgspec.Struct]], service: Service) -> None:
    """Make `/openapi.json` list `kinds`, and what they are made of, as components."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _add_errors(app.openapi_schema)
            _schemas, components = msgspec.json.schema_components([*kinds, ErrorAnswer], ref_template=REF)
            requests = [kind.__name__ for kind in kinds if kind.__struct_config__.forbid_unknown_fields]
            bounds.tighten(components, requests, service)
            for kind in kinds:
                _limit(components[kind.__name__].get("properties", {}), table_of(kind))
            app.openapi_schema.setdefault("components", {})["schemas"] = components
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _limit(properties: dict[str, Any], table: Mapping[str, Refused]) -> None:
    for name, refused in table.items():
        properties[name] = {
            "default": None,
            "enum": [*refused.quiet],
            "description": f"any other value {refused.reason}",
        }


def _add_errors(document: dict[str, Any]) -> None:
    """Say of every route how it answers what it refuses, in place of the framework's 422."""
    content = {"application/json": {"schema": _ref(ErrorAnswer)}}
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {"description": "an error", "content": content}
