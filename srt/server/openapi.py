"""The OpenAPI document: FastAPI's list of routes with the schemas of our msgspec structs."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

REF = "#/components/schemas/{name}"


def json_body(request: type, whole: type, chunk: type | None = None) -> dict[str, Any]:
    """`openapi_extra` of a route: its request, its answer, and the events of its stream."""
    content = {"application/json": {"schema": _ref(whole)}}
    if chunk is not None:
        content["text/event-stream"] = {"schema": _ref(chunk)}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
        "responses": {"200": {"description": "the answer", "content": content}},
    }


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": REF.format(name=kind.__name__)}


def install(app: FastAPI, kinds: list[type]) -> None:
    """Make `/openapi.json` list `kinds`, and what they are made of, as components."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _schemas, components = msgspec.json.schema_components(kinds, ref_template=REF)
            app.openapi_schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
