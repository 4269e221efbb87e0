"""Which instance holds a stored response: known to all gateways through Redis, and to this one without asking."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from gateway.cluster import keys
from gateway.cluster.budget import Breaker
from gateway.cluster.members import Instance
from gateway.cluster.store import Store
from gateway.counters import Counters
from gateway.errors import StoreUnavailable
from gateway.telemetry import Changes

KNOWN_MAX = 4_096
WRITING_MAX = 256


@dataclass(frozen=True, slots=True)
class Home:
    """One life of an instance: what it stores is gone with it."""

    instance_id: str
    boot_id: str


class StoredResponses:
    """A client waits ``budget_s`` for Redis, so that its next request finds the response through any gateway."""

    def __init__(self, store: Store, budget_s: float, is_away: Callable[[], bool], counters: Counters) -> None:
        self._store = store
        self._breaker = Breaker(store, budget_s, is_away)
        self._counters = counters
        self._known: OrderedDict[str, tuple[Home, float]] = OrderedDict()
        self._changes = Changes()
        self._writing: set[asyncio.Task[None]] = set()

    async def keep(self, response_id: str, instance: Instance) -> None:
        """Called before the client learns the id."""
        home = Home(instance.instance_id, instance.boot_id)
        self._remember(response_id, home)
        if len(self._writing) >= WRITING_MAX:
            self._counters.add("stored_responses_dropped")
            return
        writing = asyncio.create_task(self._write(response_id, home))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        await self._breaker.answered(writing)

    async def find(self, response_id: str) -> Home | None:
        """Raises :class:`StoreUnavailable` when only Redis could tell, and does not."""
        known = self._known.get(response_id)
        if known is not None and known[1] > time.monotonic():
            return known[0]
        if self._breaker.is_open:
            raise StoreUnavailable("Redis does not answer.")
        asking = asyncio.create_task(self._store.response_home(response_id))
        try:
            if not await self._breaker.answered(asking):
                raise StoreUnavailable("Redis does not answer in time.")
        finally:
            asking.cancel()
        found = asking.result()
        if found is None:
            return None
        home = Home(*found)
        self._remember(response_id, home)
        return home

    async def close(self) -> None:
        await asyncio.gather(*self._writing)

    def _remember(self, response_id: str, home: Home) -> None:
        self._known[response_id] = home, time.monotonic() + keys.RESPONSES_TTL_S
        self._known.move_to_end(response_id)
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    async def _write(self, response_id: str, home: Home) -> None:
        try:
            await self._store.keep_response(response_id, home.instance_id, home.boot_id)
        except StoreUnavailable as error:
            self._counters.add("stored_responses_dropped")
            self._changes("stored_responses", "not shared", reason=error.message, level=logging.WARNING)
        else:
            self._changes("stored_responses", "shared")
