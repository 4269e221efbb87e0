"""How an error is said: the shapes of the OpenAI API, of its responses, and of Anthropic's messages."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, assert_never

from gateway.errors import GatewayError
from gateway.openai import sse

_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Dialect(Enum):
    OPENAI = "openai"
    RESPONSES = "responses"
    """Whole errors as OpenAI's; within a stream an event of its own, with its fields at the top."""
    MESSAGES = "messages"


def error_body(dialect: Dialect, error: GatewayError) -> dict[str, Any]:
    """Of an answer that is an error. Anthropic's shape holds OpenAI's as well, so that either's clients can read it."""
    value = error.to_json()
    if dialect is not Dialect.MESSAGES:
        return value
    kind = _ANTHROPIC_KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": value["error"] | {"type": kind}}


def error_event(dialect: Dialect, error: GatewayError, sequence_number: int) -> bytes:
    """The last event of a stream that cannot go on. ``sequence_number`` follows on the last one of a response."""
    match dialect:
        case Dialect.OPENAI:
            return sse.encode(json.dumps(error.to_json()).encode())
        case Dialect.RESPONSES:
            said = error.to_json()["error"]
            value = {"type": "error", "code": str(said["code"]), "message": said["message"], "param": said["param"]}
            value["sequence_number"] = sequence_number
        case Dialect.MESSAGES:
            value = error_body(dialect, error)
        case _:
            assert_never(dialect)
    return b"event: error\n" + sse.encode(json.dumps(value).encode())
