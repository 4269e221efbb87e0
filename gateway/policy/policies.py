"""Policies by name: where a request starts and when, what moves, and who comes first. The simulator runs each of them.

``llumnix`` is the paper's, ``kvferry`` ours; ``late-binding`` is ours without its moves, so that each part's share is
seen. The others are what they are compared with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from gateway.policy.decide import Policy, PolicySettings
from gateway.policy.dispatch import Sent, choose_instance, choose_least_loaded, choose_next, choose_protecting
from gateway.policy.migration import MigrationSettings
from gateway.policy.picking import PickRules
from gateway.policy.view import ClusterView
from gateway.policy.waiting import GROWTH_TOKENS, WaitingRules

STABLE_STEPS = 48.0
"""The paper's threshold for most of its traces: 3 blocks of 16 for each running request."""


class Start(StrEnum):
    """When, and where, a request is given to an instance."""

    FREEST = "freest"
    """At once, to the freest one, in whose queue it may wait."""
    LEAST_LOADED = "least_loaded"
    """At once, to the one whose memory is least used and asked for."""
    IN_TURN = "in_turn"
    WHEN_ROOM = "when_room"
    """Late binding: to the freest one that can start it now; until there is one, it waits at the gateway."""


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    name: str
    start: Start
    leader: PolicySettings = field(default_factory=lambda: PolicySettings(Policy.NONE))
    picking: PickRules = field(default_factory=PickRules)
    waiting: WaitingRules = field(default_factory=WaitingRules)
    growth_tokens: int = GROWTH_TOKENS
    """What each running request must be able to grow by when another one enters (policy/waiting.py)."""
    moves_at_once: int = 1
    """Out of an instance."""
    knows_classes: bool = True
    """Else every request is a normal one."""

    def start_at(
        self,
        view: ClusterView,
        model: str | None,
        sent: Mapping[str, Sent],
        last: str | None = None,
        protected_tokens: int | None = None,
    ) -> str | None:
        """Of those policies that start requests at once. ``last``: where the one before has been started.
        ``protected_tokens``: of a request with headroom."""
        match self.start:
            case Start.FREEST:
                joined = None
                if protected_tokens is not None:
                    joined = choose_protecting(view, model, sent, protected_tokens)
                return joined or choose_instance(view, model, sent)
            case Start.LEAST_LOADED:
                return choose_least_loaded(view, model, sent)
            case Start.IN_TURN:
                return choose_next(view, model, last)
            case Start.WHEN_ROOM:
                raise ValueError("a request that is bound late is allotted (policy/waiting.py)")
            case _:
                assert_never(self.start)


_STABLE = MigrationSettings(low_freeness_steps=STABLE_STEPS, high_freeness_steps=STABLE_STEPS)
_KVFERRY = NamedPolicy(
    "kvferry",
    Start.WHEN_ROOM,
    PolicySettings(
        Policy.KVFERRY,
        MigrationSettings(low_freeness_steps=STABLE_STEPS, high_freeness_steps=STABLE_STEPS, guards_destination=True),
    ),
    picking=PickRules(cool_down_s=5.0, moves_max=3),
    growth_tokens=16,
    moves_at_once=2,
)

POLICIES: Mapping[str, NamedPolicy] = {
    one.name: one
    for one in (
        _KVFERRY,
        dataclasses.replace(_KVFERRY, name="kvferry-base", knows_classes=False),
        dataclasses.replace(_KVFERRY, name="late-binding", leader=PolicySettings(Policy.NONE)),
        NamedPolicy("llumnix", Start.FREEST, PolicySettings(Policy.LLUMNIX, _STABLE)),
        NamedPolicy("llumnix-base", Start.FREEST, PolicySettings(Policy.LLUMNIX, _STABLE), knows_classes=False),
        NamedPolicy("infaas++", Start.LEAST_LOADED, knows_classes=False),
        NamedPolicy("round-robin", Start.IN_TURN, knows_classes=False),
    )
}
