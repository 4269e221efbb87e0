"""Who may call: keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from gateway.errors import Unauthorized


class Keys:
    """``open_if_empty``: with no key configured everyone may call, else nobody."""

    def __init__(self, keys: Sequence[str], *, open_if_empty: bool) -> None:
        self._digests = [_digest(key.encode()) for key in keys]
        self._open = open_if_empty and not self._digests

    def check(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Raises :class:`Unauthorized`. Every key is compared: the time says nothing about which is close."""
        if self._open:
            return
        scheme, _, given = _authorization(headers).partition(b" ")
        if not given:
            raise Unauthorized("An API key is required: `Authorization: Bearer <key>`.", code="invalid_api_key")
        digest = _digest(given.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            raise Unauthorized("The API key is not valid.", code="invalid_api_key")


def _authorization(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    return next((value for name, value in headers if name == b"authorization"), b"")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
