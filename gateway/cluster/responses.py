"""Which instance holds a stored response: known to all gateways through Redis, and to this one without asking."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

from gateway.cluster import keys
from gateway.cluster.members import Instance
from gateway.cluster.store import Store
from gateway.counters import Counters
from gateway.errors import StoreUnavailable
from gateway.telemetry import log

KNOWN_MAX = 4_096
WRITING_MAX = 256
WRITE_WAIT_S = 0.25
"""For so long the client waits for Redis, so that its next request finds the response through any gateway."""


@dataclass(frozen=True, slots=True)
class Home:
    """One life of an instance: what it stores is gone with it."""

    instance_id: str
    boot_id: str


class StoredResponses:
    def __init__(self, store: Store, counters: Counters) -> None:
        self._store = store
        self._counters = counters
        self._known: OrderedDict[str, tuple[Home, float]] = OrderedDict()
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
        await asyncio.wait({writing}, timeout=WRITE_WAIT_S)

    async def find(self, response_id: str) -> Home | None:
        """Raises :class:`StoreUnavailable` when only Redis could tell, and does not."""
        known = self._known.get(response_id)
        if known is not None and known[1] > time.monotonic():
            return known[0]
        found = await self._store.response_home(response_id)
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
            log("response_not_shared", level=logging.WARNING, response=response_id, reason=error.message)
