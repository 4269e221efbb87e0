"""One tick: hold the lease, look, decide, act, publish."""

from __future__ import annotations

import asyncio
import logging
import time

from gateway.cluster.members import Members
from gateway.cluster.store import Lease, Store
from gateway.counters import Counters
from gateway.errors import StoreUnavailable
from gateway.policy.decide import Action, Memory, Pair, PolicySettings, decide
from gateway.scheduler.executor import Executor
from gateway.telemetry import log


class Leader:
    """Without Redis there is no lease, and without a lease nothing is moved by policy; requests go on as they are."""

    def __init__(
        self,
        gateway_id: str,
        store: Store,
        members: Members,
        executor: Executor,
        settings: PolicySettings,
        lease_s: float,
        counters: Counters,
    ) -> None:
        self._gateway_id = gateway_id
        self._store = store
        self._members = members
        self._executor = executor
        self._settings = settings
        self._lease_s = lease_s
        self._counters = counters
        self._lease: Lease | None = None
        self._memory = Memory()

    @property
    def is_leading(self) -> bool:
        return self._lease is not None and time.monotonic() < self._lease.ends_at

    async def tick(self) -> None:
        lease = await self._hold_lease()
        if lease is None:
            self._memory = Memory()
            return
        began_at = time.monotonic()
        before = self._memory
        actions, self._memory = decide(self._members.view(time.monotonic()), before, time.monotonic(), self._settings)
        for action in actions:
            self._say(action, before)
        await self._act(actions, lease)
        await self._publish(lease)
        self._counters.distribution("leader_tick_seconds").observe(time.monotonic() - began_at)

    async def _act(self, actions: list[Action], lease: Lease) -> None:
        """At once, so that one that hangs delays none of the others; never past the lease's end by our own clock."""
        try:
            async with asyncio.timeout(max(0.0, lease.ends_at - time.monotonic())):
                await asyncio.gather(*(self._executor.run(action) for action in actions))
        except TimeoutError:
            log("leader_late", level=logging.WARNING, gateway=self._gateway_id, token=lease.token)

    async def release(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            try:
                await self._store.drop_lease(lease)
            except StoreUnavailable:
                return  # It ends by itself.

    async def _hold_lease(self) -> Lease | None:
        previous = self._lease
        try:
            self._lease = await self._store.take_lease(self._gateway_id, self._lease_s)
        except StoreUnavailable as error:
            self._lease = None
            if previous is not None:
                log("leader_lost", level=logging.WARNING, gateway=self._gateway_id, reason=error.message)
            return None
        if self._lease is not None and (previous is None or previous.token != self._lease.token):
            log("leader", gateway=self._gateway_id, token=self._lease.token)
            self._memory = Memory()
        return self._lease

    async def _publish(self, lease: Lease) -> None:
        reports = [member.report.to_json() for member in self._members.all() if member.report is not None]
        try:
            await self._store.publish_snapshot(lease, {"token": lease.token, "reports": reports})
        except StoreUnavailable as error:
            log("snapshot_lost", level=logging.WARNING, reason=error.message)

    def _say(self, action: Action, before: Memory) -> None:
        """One line a decision; a renewal is none."""
        if isinstance(action, Pair) and before.pairs.get(action.source_id) == action.destination_id:
            return
        self._counters.add("leader_actions", action=type(action).__name__.lower())
        log("decide", action=action)
