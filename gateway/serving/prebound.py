"""The leg that waits at a destination while its request still runs at the source."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from gateway import wire
from gateway.serving.backend import Leg, Resumption
from gateway.serving.session import Session

OpenLeg = Callable[[Session, str, Resumption], Leg | None]
"""Opens a leg at an instance by id; ``None`` if there is no such instance."""


class Prebound:
    """At most one at a time. The source's stream alone says what becomes of it; what it says itself is not shown."""

    def __init__(self, session: Session, open_leg: OpenLeg) -> None:
        self._session = session
        self._open_leg = open_leg
        self._migration_id: str | None = None
        self._leg: Leg | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def bind(self, prebind: wire.Prebind) -> None:
        self.close()
        self._migration_id = prebind.migration_id
        # How many tokens it will have to follow on is known when the source says that it has moved.
        self._leg = self._open_leg(self._session, prebind.destination_id, Resumption(prebind.migration_id, -1))

    def unbind(self, unbind: wire.Unbind) -> None:
        if unbind.migration_id == self._migration_id:
            self._session.visit.counters.add("migrations_withdrawn")
            self.close()

    def take(self, moved: wire.Moved, output_tokens: int) -> Leg | None:
        """The leg of this migration, now in the caller's hands; opened now if the source never said ``prebind``."""
        resumption = Resumption(moved.migration_id, output_tokens)
        leg, self._leg = self._leg, None
        if leg is not None and (moved.migration_id, moved.destination_id) == (self._migration_id, leg.instance_id):
            leg.resumption = resumption
            return leg
        if leg is not None:
            leg.close()
        return self._open_leg(self._session, moved.destination_id, resumption)

    def close(self) -> None:
        leg, self._leg, self._migration_id = self._leg, None, None
        if leg is not None:
            leg.close()
