"""Carries actions out, at the llumlets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from gateway import wire
from gateway.cluster.llumlet import LlumletClient
from gateway.cluster.members import Instance, Members
from gateway.counters import OTHER, Counters
from gateway.errors import LlumletRefused, LlumletUnreachable
from gateway.policy.decide import Action, Pair, Unpair
from gateway.policy.picking import PickRules
from gateway.telemetry import log


@dataclass(frozen=True, slots=True)
class MoveRules:
    """What a pairing lets its source move. ``protected``: the classes with headroom."""

    picking: PickRules = field(default_factory=PickRules)
    at_once: int = 1
    protected: tuple[wire.PriorityClass, ...] = ()


class Executor:
    def __init__(
        self,
        members: Members,
        llumlets: LlumletClient,
        pairing_lease_s: float,
        counters: Counters,
        rules: MoveRules = MoveRules(),
    ) -> None:
        self._rules = rules
        self._members = members
        self._llumlets = llumlets
        self._pairing_lease_ms = int(pairing_lease_s * 1000)
        self._counters = counters
        self.on_order: Callable[[str, Instance, Instance], None] = _nobody
        """Called before each order of an operator that moves a request: its id, from where and where to."""

    async def run(self, action: Action, fence: int) -> None:
        """An action that fails is counted and logged: the next tick decides from what is true by then.

        ``fence``: the token of the lease in whose name it is done.
        """
        try:
            match action:
                case Pair():
                    await self._pair(action, fence)
                case Unpair():
                    await self._unpair(action, fence)
                case _:
                    assert_never(action)
        except (LlumletUnreachable, LlumletRefused) as error:
            self._counters.add("actions_failed")
            log("action_failed", level=logging.WARNING, action=action, reason=error.message)

    async def migrate(
        self,
        source: Instance,
        request_id: str,
        destination: Instance,
        method: str = "live",
        fence: int | None = None,
    ) -> wire.MigrationResult:
        """Moves one request now. Raises what the source's llumlet answers. ``fence``: where the leader orders it."""
        if fence is None:
            self.on_order(request_id, source, destination)
        order = wire.MigrateOrder(request_id, destination.instance_id, destination.url, method, fence)
        try:
            result = await self._llumlets.migrate(source.url, order)
        except (LlumletUnreachable, LlumletRefused) as error:
            self._counters.add("ordered_migrations", method=method, outcome=error.label)
            raise
        self._count(method, result)
        return result

    def _count(self, method: str, result: wire.MigrationResult) -> None:
        """The outcome is an instance's word: one that is not in the contract is no label."""
        outcome = result.outcome if result.outcome in ("committed", "aborted") else OTHER
        self._counters.add("ordered_migrations", method=method, outcome=outcome)
        for name, value in (
            ("seconds", result.duration_ms / 1000),
            ("final_seconds", result.final_ms / 1000),
            ("stages", result.stages),
            ("blocks", result.blocks_sent),
            ("bytes", result.bytes_sent),
        ):
            self._counters.distribution(f"ordered_migration_{name}", method=method).observe(value)

    async def _pair(self, action: Pair, fence: int) -> None:
        source, destination = self._members.get(action.source_id), self._members.get(action.destination_id)
        if source is None or destination is None:
            return
        rules = self._rules
        pairing = wire.Pairing(
            destination.instance_id,
            destination.url,
            self._pairing_lease_ms,
            concurrency=rules.at_once,
            fence=fence,
            cool_down_s=rules.picking.cool_down_s,
            moves_max=rules.picking.moves_max,
            protected=[int(one) for one in rules.protected],
        )
        await self._llumlets.pair(source.url, pairing)

    async def _unpair(self, action: Unpair, fence: int) -> None:
        source = self._members.get(action.source_id)
        if source is not None:
            await self._llumlets.unpair(source.url, fence)


def _nobody(request_id: str, source: Instance, destination: Instance) -> None:
    pass
