"""Gives up the legs that wait for an instance that will not answer."""

from __future__ import annotations

import time

from gateway.cluster.members import Members, Patience
from gateway.config import Budgets
from gateway.serving.backend import Backend

TOLD_S = 1.0
"""An instance's last words may still be on their way when it is known to be lost."""


class Watch:
    """The leg is then a lost one, and made good like any other (serve.py).

    A stopped process or a machine without power leaves its connections open. A prebound leg is not watched while it
    waits, for the source may still keep its request; once taken, it is.
    """

    def __init__(self, backend: Backend, members: Members, budgets: Budgets, interval_s: float) -> None:
        self._backend = backend
        self._members = members
        self._patience = Patience(min(TOLD_S, budgets.hang_s), budgets.hang_s, budgets.event_gap_s)
        self._interval_s = interval_s
        self._looked_at = time.monotonic()

    async def look(self) -> None:
        """One round of the loop that runs every ``interval_s``."""
        now = time.monotonic()
        late, self._looked_at = now - self._looked_at > 2 * self._interval_s, now
        if late:  # It is this gateway that stood still: what the instances have said meanwhile is not read yet.
            return
        for leg in self._backend.legs():
            if leg.read_at is not None:
                self._members.progressed(leg.instance, leg.read_at)
            if (silent_s := leg.silent_s(now)) > 0:
                self._members.silent(leg.instance, silent_s, now)
                why = self._members.why_gone(leg.instance, silent_s, self._patience, now)
                if why is not None:
                    leg.give_up(why)
