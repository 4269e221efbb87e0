"""The leader's decision: a view in, actions out. No I/O, no clock, no randomness."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from gateway.policy.migration import MigrationSettings, pair_instances
from gateway.policy.view import ClusterView


@dataclass(frozen=True, slots=True)
class Pair:
    """Let the source move requests to the destination; said again on every tick, which renews the lease."""

    source_id: str
    destination_id: str


@dataclass(frozen=True, slots=True)
class Unpair:
    source_id: str


Action = Pair | Unpair


@dataclass(frozen=True, slots=True)
class Memory:
    """What the leader remembers from one tick to the next. A new leader begins with an empty one."""

    pairs: Mapping[str, str] = field(default_factory=dict)


class Policy(StrEnum):
    """Named sets of rules for the leader."""

    NONE = "none"
    """Nothing is moved but what is ordered by hand."""
    LLUMNIX = "llumnix"
    """The paper's: pairs of instances by freeness thresholds."""
    KVFERRY = "kvferry"
    """Those, and no move that would only turn the tables; the instance that is kept for a request is emptied."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    policy: Policy = Policy.LLUMNIX
    migration: MigrationSettings = field(default_factory=MigrationSettings)


def decide(
    view: ClusterView,
    memory: Memory,
    now: float,
    settings: PolicySettings,
) -> tuple[list[Action], Memory]:
    """``now`` (seconds) is there for rules that need a sustained time; pairing needs none."""
    match settings.policy:
        case Policy.NONE:
            pairs: dict[str, str] = {}
        case Policy.LLUMNIX:
            pairs = pair_instances(view, memory.pairs, settings.migration)
        case Policy.KVFERRY:
            guarded = dataclasses.replace(settings.migration, guards_destination=True, empties_kept=True)
            pairs = pair_instances(view, memory.pairs, guarded)
        case _:
            assert_never(settings.policy)
    known = {instance.instance_id for instance in view.instances}
    ended: list[Action] = [Unpair(source) for source in sorted(memory.pairs) if source not in pairs and source in known]
    return ended + [Pair(source, pairs[source]) for source in sorted(pairs)], Memory(pairs)
