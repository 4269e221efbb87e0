"""Ownership and migration records on their way to Redis: put down at once, written in the background.

A request only ever calls the synchronous methods, so Redis, slow or gone, cannot hold it up.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from typing import Any

from gateway.cluster.store import Owner, Store
from gateway.counters import Counters
from gateway.errors import StoreUnavailable
from gateway.telemetry import log

PENDING_MAX = 10_000
MIGRATIONS_PENDING_MAX = 1_000


class Records:
    def __init__(self, store: Store, refresh_s: float, counters: Counters) -> None:
        self._store = store
        self._refresh_s = refresh_s
        self._counters = counters
        self._live: dict[str, Owner] = {}
        self._pending: dict[str, Owner | None] = {}
        self._told: set[str] = set()
        """Requests under way of which Redis knows: most are over before the next round."""
        self._migrations: deque[dict[str, Any]] = deque(maxlen=MIGRATIONS_PENDING_MAX)
        self._refreshed_at = time.monotonic()
        self._down = False

    def own(self, request_id: str, owner: Owner) -> None:
        self._live[request_id] = owner
        self._put(request_id, owner)

    def forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        if request_id in self._told:
            self._told.discard(request_id)
            self._put(request_id, None)
        else:
            self._pending.pop(request_id, None)

    def refresh(self) -> None:
        """With the next round everything is written again: Redis may have lost it."""
        self._refreshed_at = -math.inf

    def migrated(self, record: dict[str, Any]) -> None:
        self._migrations.append(record)

    async def flush(self) -> None:
        """One round of the background loop. What could not be written is tried again; the bound drops the oldest."""
        if time.monotonic() - self._refreshed_at >= self._refresh_s:
            self._refreshed_at = time.monotonic()
            for request_id, owner in self._live.items():
                self._put(request_id, owner)
        pending, self._pending = self._pending, {}
        self._told.update(request_id for request_id, owner in pending.items() if owner is not None)
        migrations = list(self._migrations)
        self._migrations.clear()
        try:
            if pending:
                await self._store.write_owners(pending)
            if migrations:
                await self._store.add_migrations(migrations)
        except asyncio.CancelledError:
            self._keep(pending, migrations)  # The loop ends with the gateway, which flushes once more after it.
            raise
        except StoreUnavailable as error:
            self._keep(pending, migrations)
            self._note(down=True, reason=error.message)
        else:
            if pending or migrations:
                self._note(down=False)

    def _keep(self, pending: dict[str, Owner | None], migrations: list[dict[str, Any]]) -> None:
        self._pending = pending | self._pending
        self._migrations.extendleft(reversed(migrations[: MIGRATIONS_PENDING_MAX - len(self._migrations)]))

    def _put(self, request_id: str, owner: Owner | None) -> None:
        if len(self._pending) >= PENDING_MAX and request_id not in self._pending:
            self._pending.pop(next(iter(self._pending)))
            self._counters.add("records_dropped")
        self._pending[request_id] = owner

    def _note(self, *, down: bool, reason: str = "") -> None:
        """Changes of state only: one line when Redis goes, one when it is back."""
        if down != self._down:
            self._down = down
            log("store_lost" if down else "store_back", level=logging.WARNING, reason=reason or "-")
