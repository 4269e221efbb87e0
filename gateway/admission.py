"""May this client do this now: its key, the terms that the key grants, and its place within the key's limits."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from gateway.access import Key, Keys
from gateway.cluster.limits import Limiter, Place
from gateway.errors import LimitReached
from gateway.openai.caps import Caps
from gateway.openai.terms import PRIORITY_HEADER, Asked, Terms, Work
from gateway.policy.limits import KeyLimits, Refused
from gateway.serving.reply import Reply

_WORDS = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "concurrent_requests": "requests at the same time",
}


class Admission:
    def __init__(self, keys: Keys, limiter: Limiter, caps: Caps, *, sends_priority: bool) -> None:
        self._keys = keys
        self._limiter = limiter
        self._caps = caps
        self._sends_priority = sends_priority

    def check(self, headers: Sequence[tuple[bytes, bytes]], path: str) -> Key:
        """Raises :class:`gateway.errors.Unauthorized`."""
        return self._keys.check(headers, path)

    def terms(self, key: Key, headers: Sequence[tuple[bytes, bytes]], work: Work = Work.GENERATES) -> Terms:
        name = PRIORITY_HEADER.encode()
        asked = next((value.decode("latin-1") for header, value in headers if header == name), None)
        key_id = key.short_id if self._keys.are_several else ""
        return Terms(self._caps, key.priority_max, asked, self._sends_priority, work, key_id)

    @contextlib.asynccontextmanager
    async def admitted(self, key: Key, request_id: str, asked: Asked, reply: Reply) -> AsyncIterator[None]:
        """Raises :class:`LimitReached`. A key without limits asks nobody."""
        if asked.chosen:
            reply.more_headers.append((PRIORITY_HEADER, asked.priority_class.word))
        if key.limits is None:
            yield
            return
        verdict = await self._limiter.admit(key.name, key.limits, request_id, asked.estimate.total)
        if isinstance(verdict, Refused):
            raise _limit_reached(key.limits, verdict)
        reply.more_headers += _headers(verdict).items()

        async def before_end() -> None:
            await self._limiter.release_and_wait(verdict, reply.meter.tokens(asked.estimate))

        reply.before_end = before_end
        try:
            yield
        finally:
            self._limiter.release(verdict, reply.meter.tokens(asked.estimate))


def _headers(place: Place) -> dict[str, str]:
    headers: dict[str, str] = {}
    if place.granted.requests_left is not None:
        headers["x-ratelimit-limit-requests"] = str(place.limits.requests_per_minute)
        headers["x-ratelimit-remaining-requests"] = str(place.granted.requests_left)
    if place.granted.tokens_left is not None:
        headers["x-ratelimit-limit-tokens"] = str(place.limits.tokens_per_minute)
        headers["x-ratelimit-remaining-tokens"] = str(place.granted.tokens_left)
    return headers


def _limit_reached(limits: KeyLimits, refused: Refused) -> LimitReached:
    bound, wait_s = getattr(limits, refused.limit), refused.retry_after_s
    details: dict[str, str] = {}
    if refused.limit != "concurrent_requests":
        what = refused.limit.partition("_")[0]
        details = {f"x-ratelimit-limit-{what}": str(bound), f"x-ratelimit-reset-{what}": f"{wait_s}s"}
    message = f"This key may have {bound} {_WORDS[refused.limit]}. Try again in {wait_s} s."
    return LimitReached(message, wait_s, details)
