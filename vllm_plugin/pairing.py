"""What the leader's lease lets a llumlet move by itself: where to, how many at a time, and which requests.

The rules come with the lease, so that one setting at the gateways is all there is to it, and what decides is
``gateway.policy.picking``. Knows nothing of vLLM: the fake instance (``loadtest/fake_vllm``) obeys the very same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from gateway import wire
from gateway.policy.picking import Movable, PickRules, pick
from vllm_plugin.settings import MIGRATIONS_OUT_MAX, MOVES_COUNTED_MAX, SETTLE_S


def counted_moves(said: int) -> int:
    """A peer's or a gateway's word for how often a request has moved: more than that are not told apart."""
    return max(0, min(said, MOVES_COUNTED_MAX))


class Paired:
    """``now`` is this process's monotonic clock in seconds, everywhere."""

    def __init__(self) -> None:
        self._pairing: wire.Pairing | None = None
        self._until = 0.0
        self._rests_until = -math.inf

    def set(self, pairing: wire.Pairing | None, now: float) -> None:
        """``None``: nothing moves from now on."""
        self._pairing = pairing
        self._until = now + pairing.lease_ms / 1000 if pairing is not None else 0.0

    def current(self, now: float) -> wire.Pairing | None:
        if now > self._until:
            self._pairing = None
        return self._pairing

    def places(self, out: int, now: float) -> int:
        """How many more may leave now, with ``out`` on their way."""
        pairing = self.current(now)
        if pairing is None or now < self._rests_until:
            return 0
        return max(0, min(pairing.concurrency, MIGRATIONS_OUT_MAX) - out)

    def rest(self, now: float) -> None:
        """A destination that has just refused, or failed, is not asked again at once."""
        self._rests_until = now + SETTLE_S

    def movable(
        self, request_id: str, priority: int, tokens: int, *, is_running: bool, moves: int, settled_s: float | None
    ) -> Movable:
        """``priority``: vLLM's. ``settled_s``: since it has arrived by a move; ``None``: it has begun here."""
        protected = self._pairing.protected if self._pairing is not None else ()
        return Movable(
            request_id,
            wire.execution_priority(priority),
            tokens,
            is_running,
            moves,
            math.inf if settled_s is None else settled_s,
            wire.class_of(priority) in protected,
        )

    def choose(self, candidates: Iterable[Movable], places: int, *, draining: bool) -> list[wire.MigrateOrder]:
        """At most ``places`` of them, the first to leave first."""
        pairing = self._pairing
        if pairing is None:
            return []
        cool_down_s = SETTLE_S if pairing.cool_down_s is None else pairing.cool_down_s
        rules = PickRules(cool_down_s, pairing.moves_max)
        left = {one.request_id: one for one in candidates}
        orders: list[wire.MigrateOrder] = []
        while len(orders) < places and (chosen := pick(left.values(), rules, draining=draining)) is not None:
            del left[chosen]
            orders.append(wire.MigrateOrder(chosen, pairing.destination_id, pairing.destination_url))
        return orders
