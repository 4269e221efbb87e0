"""What the path of a request says to a tracer. These classes say nothing: tracing is off unless otel.py is loaded."""

from __future__ import annotations

from collections.abc import Sequence

Headers = tuple[tuple[str, str], ...]


class LegTrace:
    """One leg. ``end`` may be called again."""

    def headers(self, headers: Headers) -> Headers:
        """What the instance is sent: a client's own trace context passes unchanged while tracing is off."""
        return headers

    def outcome(self, outcome: str) -> None:
        """How it went, if nothing more is said before its end."""

    def end(self) -> None: ...


class Trace:
    """One request of a client."""

    trace_id: str | None = None

    def leg(self, instance_id: str, boot_id: str, kind: str) -> LegTrace:
        return NO_LEG_TRACE

    def event(self, name: str, **attributes: str | int | float) -> None: ...

    def end(self, name: str, failed: bool, **attributes: str | int | float) -> None: ...


class Tracer:
    def begin(self, headers: Sequence[tuple[bytes, bytes]]) -> Trace:
        """``headers``: as they came; a client's ``traceparent`` in them is continued."""
        return NO_TRACE

    async def stop(self) -> None:
        """Sends what is left, in a bounded time."""


NO_LEG_TRACE = LegTrace()
NO_TRACE = Trace()
NO_TRACER = Tracer()
