"""The page of the clients' routes, from the one table of them (OpenAPI 3.1)."""

from __future__ import annotations

from functools import cache
from typing import Any

from gateway.endpoints import ENDPOINTS, Endpoint, Kind

_FIELDS: dict[str, dict[str, Any]] = {
    "model": {"type": "string", "description": "Of those that /v1/models lists."},
    "stream": {"type": "boolean"},
    "messages": {"type": "array", "items": {"type": "object"}},
    "prompt": {"type": ["string", "array"]},
    "input": {"type": ["string", "array"]},
    "tokens": {"type": "array", "items": {"type": "integer"}},
    "query": {"type": "string"},
    "documents": {"type": "array"},
    "file": {"type": "string", "format": "binary"},
}
_ERROR = {"$ref": "#/components/schemas/Error"}
_ERRORS = {
    "4XX": "Refused, by the gateway or by vLLM itself",
    "5XX": "Nobody could answer; with Retry-After where it may help to ask again",
}


@cache
def openapi_page() -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvferry",
            "version": "1",
            "description": "Fields that are not named here reach vLLM as they are.",
        },
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _error_schema()},
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": _responses()}
    if endpoint.needs_key:
        operation["security"] = [{"key": []}, {}]
    if "{response_id}" in endpoint.path:
        operation["parameters"] = [
            {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if endpoint.kind is Kind.STORED and endpoint.method == "GET":
        for name, kind in (("stream", "boolean"), ("starting_after", "integer")):
            operation["parameters"].append({"name": name, "in": "query", "schema": {"type": kind}})
    if endpoint.kind in (Kind.GENERATE, Kind.FORWARD, Kind.RESPOND, Kind.UPLOAD):
        media_type = "multipart/form-data" if endpoint.kind is Kind.UPLOAD else "application/json"
        operation["requestBody"] = {"required": True, "content": {media_type: {"schema": _body(endpoint)}}}
    return operation


def _body(endpoint: Endpoint) -> dict[str, Any]:
    properties = {name: _FIELDS[name] for name in ("model", "stream", *endpoint.required)}
    return {"type": "object", "properties": properties, "required": list(endpoint.required)}


def _responses() -> dict[str, Any]:
    refused = {
        status: {"description": meaning, "content": {"application/json": {"schema": _ERROR}}}
        for status, meaning in _ERRORS.items()
    }
    return {"200": {"description": "As vLLM answers"}, **refused}


def _error_schema() -> dict[str, Any]:
    properties = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "code": {"type": ["integer", "string", "null"]},
    }
    error = {"type": "object", "properties": properties, "required": ["message", "type"]}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}
