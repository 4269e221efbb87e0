"""Who may call: keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.errors import Unauthorized
from gateway.policy.limits import KeyLimits
from gateway.wire import PriorityClass

X_API_KEY_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
"""Anthropic's clients send their key as ``x-api-key``."""


@dataclass(frozen=True, slots=True)
class Key:
    """``sha256``: of the key itself, which is kept nowhere. Without ``limits`` nothing is counted."""

    name: str
    sha256: bytes
    limits: KeyLimits | None = None
    priority_max: PriorityClass = PriorityClass.HIGH

    @property
    def short_id(self) -> str:
        """Tells it from all others, those without a name too. Not for logs."""
        return self.sha256[:16].hex()


ANYONE = Key("", b"")


class Keys:
    """``plain``: keys as such, without limits. ``open_if_empty``: with no key at all everyone may call, else nobody."""

    def __init__(self, plain: Sequence[str], named: Sequence[Key] = (), *, open_if_empty: bool) -> None:
        self._plain = [Key("", digest(key.encode())) for key in plain]
        self._keys = [*self._plain, *named]
        self._open = open_if_empty and not self._keys

    @property
    def are_several(self) -> bool:
        return len(self._keys) > 1

    def replace_named(self, named: Sequence[Key]) -> None:
        """The keys file has changed. What runs goes on. This never opens the gateway to everyone."""
        self._keys = [*self._plain, *named]

    def check(self, headers: Sequence[tuple[bytes, bytes]], path: str = "") -> Key:
        """Raises :class:`Unauthorized`. Every key is compared: the time says nothing about which is close."""
        if self._open:
            return ANYONE
        given = _given(headers, path)
        if given is None:
            raise Unauthorized("An API key is required: `Authorization: Bearer <key>`.", code="invalid_api_key")
        given_digest = digest(given)
        matches = [key for key in self._keys if hmac.compare_digest(given_digest, key.sha256)]
        if not matches:
            raise Unauthorized("The API key is not valid.", code="invalid_api_key")
        return matches[0]


def _given(headers: Sequence[tuple[bytes, bytes]], path: str) -> bytes | None:
    """The key, if there is one. A scheme other than Bearer gives none that is valid."""
    scheme, _, value = _header(headers, b"authorization").partition(b" ")
    if value.strip():
        return value.strip() if scheme.lower() == b"bearer" else b""
    return _header(headers, b"x-api-key").strip() or None if path in X_API_KEY_PATHS else None


def _header(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> bytes:
    return next((value for key, value in headers if key == name), b"")


def digest(key: bytes) -> bytes:
    """One round of SHA-256 is right for keys of 256 random bits: a slow hash protects only what can be guessed."""
    return hashlib.sha256(key).digest()
