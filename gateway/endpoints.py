"""The clients' routes: all that there are. What is not in this table stops at the gateway.

The paths are vLLM 0.32's own public ones. Left out on purpose: whatever steers an instance (adapters, sleep, caches,
profiling, weights, scaling, metrics), what is made for a router behind the server (``/inference/v1/generate``, render
and derender, ``/invocations``), and the realtime WebSocket.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from gateway.openai.dialects import Dialect
from gateway.openai.terms import Work


class Kind(Enum):
    GENERATE = "generate"
    """A request that can move; its reply is taken apart event by event (serving/serve.py)."""
    FORWARD = "forward"
    """JSON that is passed on as it is to one instance (serving/forward.py)."""
    RESPOND = "respond"
    """The same, with a state that stays on its instance."""
    UPLOAD = "upload"
    """A form with a file in it."""
    STORED = "stored"
    """Without a body, about a response that some instance holds."""
    LOOK = "look"
    """Without a body, and any instance will do."""
    MODELS = "models"
    HEALTH = "health"
    OPENAPI = "openapi"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """``required``: the fields that vLLM insists on, for the page of the API; the gateway leaves judging to it."""

    path: str
    method: str
    kind: Kind
    summary: str
    required: tuple[str, ...] = ()
    dialect: Dialect = Dialect.OPENAI
    needs_key: bool = True
    work: Work = Work.GENERATES


ENDPOINTS = (
    Endpoint("/v1/chat/completions", "POST", Kind.GENERATE, "Chat", ("messages",)),
    Endpoint("/v1/completions", "POST", Kind.GENERATE, "Text completion", ("prompt",)),
    Endpoint("/v1/chat/completions/batch", "POST", Kind.FORWARD, "Several chats in one request", ("messages",)),
    Endpoint("/v1/responses", "POST", Kind.RESPOND, "Create a response", ("input",), Dialect.RESPONSES),
    Endpoint("/v1/responses/{response_id}", "GET", Kind.STORED, "Retrieve a response", (), Dialect.RESPONSES),
    Endpoint("/v1/responses/{response_id}/cancel", "POST", Kind.STORED, "Cancel a response", (), Dialect.RESPONSES),
    Endpoint("/v1/messages", "POST", Kind.FORWARD, "Anthropic's messages", ("messages",), Dialect.MESSAGES),
    Endpoint(
        "/v1/messages/count_tokens",
        "POST",
        Kind.FORWARD,
        "Count tokens",
        ("messages",),
        Dialect.MESSAGES,
        work=Work.PREPARES,
    ),
    Endpoint("/v1/embeddings", "POST", Kind.FORWARD, "Embeddings", ("input",), work=Work.COMPUTES),
    Endpoint("/v2/embed", "POST", Kind.FORWARD, "Cohere's embeddings", work=Work.COMPUTES),
    Endpoint("/pooling", "POST", Kind.FORWARD, "Pooled or raw hidden states", ("input",), work=Work.COMPUTES),
    Endpoint("/classify", "POST", Kind.FORWARD, "Classification", ("input",), work=Work.COMPUTES),
    Endpoint("/score", "POST", Kind.FORWARD, "Score pairs of texts", work=Work.COMPUTES),
    Endpoint("/v1/score", "POST", Kind.FORWARD, "Score pairs of texts", work=Work.COMPUTES),
    Endpoint("/rerank", "POST", Kind.FORWARD, "Rank documents", ("query", "documents"), work=Work.COMPUTES),
    Endpoint("/v1/rerank", "POST", Kind.FORWARD, "Rank documents", ("query", "documents"), work=Work.COMPUTES),
    Endpoint("/v2/rerank", "POST", Kind.FORWARD, "Rank documents", ("query", "documents"), work=Work.COMPUTES),
    Endpoint("/generative_scoring", "POST", Kind.FORWARD, "Score texts with a generating model", work=Work.COMPUTES),
    Endpoint("/v1/systemone", "POST", Kind.FORWARD, "Structured decisions", work=Work.COMPUTES),
    Endpoint("/tokenize", "POST", Kind.FORWARD, "Text to tokens", work=Work.PREPARES),
    Endpoint("/detokenize", "POST", Kind.FORWARD, "Tokens to text", ("tokens",), work=Work.PREPARES),
    Endpoint("/v1/audio/transcriptions", "POST", Kind.UPLOAD, "Speech to text", ("file",)),
    Endpoint("/v1/audio/translations", "POST", Kind.UPLOAD, "Speech to English text", ("file",)),
    Endpoint("/v1/models", "GET", Kind.MODELS, "Models and LoRA adapters of all instances"),
    Endpoint("/version", "GET", Kind.LOOK, "Version of vLLM"),
    Endpoint("/health", "GET", Kind.HEALTH, "Whether any instance is healthy", needs_key=False),
    Endpoint("/ping", "GET", Kind.HEALTH, "The same", needs_key=False),
    Endpoint("/ping", "POST", Kind.HEALTH, "The same", needs_key=False),
    Endpoint("/openapi.json", "GET", Kind.OPENAPI, "This page", needs_key=False),
)

_VARIABLE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Found:
    """What a path leads to: its endpoints by method, and the part of the path that is a response's id."""

    by_method: Mapping[str, Endpoint]
    response_id: str = ""


class Table:
    def __init__(self, endpoints: tuple[Endpoint, ...] = ENDPOINTS) -> None:
        self._exact: dict[str, dict[str, Endpoint]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Endpoint]]] = []
        for endpoint in endpoints:
            self._exact.setdefault(endpoint.path, {})[endpoint.method] = endpoint
        for path in [path for path in self._exact if "{" in path]:
            self._patterns.append((re.compile(_VARIABLE.sub(r"(?P<\1>[^/]+)", path)), self._exact.pop(path)))

    def find(self, path: str) -> Found | None:
        by_method = self._exact.get(path)
        if by_method is not None:
            return Found(by_method)
        for pattern, methods in self._patterns:
            if (found := pattern.fullmatch(path)) is not None:
                return Found(methods, found["response_id"])
        return None
