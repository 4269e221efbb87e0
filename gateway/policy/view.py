"""What a decision sees: one instant of the cluster, as numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelGroup:
    """Instances that serve ``name`` from the same ``root`` on the same ``parent``: a request can go on at any of them.

    One name may stand for two models, and then they are two groups. ``parent`` is the base model of a LoRA adapter.
    """

    name: str
    root: str | None = None
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class InstanceView:
    """``virtual_usage_blocks`` counts the head of the line alone; ``queued_blocks`` is the whole queue's demand."""

    instance_id: str
    groups: frozenset[ModelGroup]
    healthy: bool
    stale: bool
    """No report for too long: its load is unknown, which is not the same as idle."""
    draining: bool
    kv_format: str | None
    block_size: int
    blocks_total: int
    virtual_usage_blocks: float
    head_of_line_blocks: int
    queued_blocks: int
    requests_running: int
    requests_waiting: int
    freeness_steps: float
    requests_running_max: int = 0
    """0: not known."""
    managed: bool = True
    """It has the plugin: requests can be moved to it and from it."""
    load_known: bool = True
    """Without the plugin it may be served although the numbers above are not known."""
    room_blocks: int | None = None
    """For the prompt of one more request (policy/waiting.py); ``None``: it does not say."""
    room_places: int = 0
    protects: bool = False
    """A request of a class with headroom runs there, and the headroom is counted."""
    blocks_used: int | None = None
    """By its requests, without any headroom; ``None``: not known."""

    @property
    def usable(self) -> bool:
        return self.healthy and not self.stale and not self.draining

    def serves(self, model: str) -> bool:
        return any(group.name == model for group in self.groups)

    def can_take_over_from(self, source: InstanceView) -> bool:
        """Whether it has the base models of ``source``. Requests of adapters do not move, so those need not be here."""
        return all(group in self.groups for group in source.groups if group.parent is None)

    def can_take_kv_from(self, source: InstanceView) -> bool:
        return self.kv_format is not None and self.kv_format == source.kv_format


@dataclass(frozen=True, slots=True)
class ClusterView:
    instances: tuple[InstanceView, ...]
    kept_ids: frozenset[str] = frozenset()
    """Instances that take nobody else until the request that has waited longest fits there (policy/waiting.py): of each
    model one at most."""
    waiting_tokens: int = 0
    """Of prompts that wait at the gateways."""


def unknown_load(instance_id: str, groups: frozenset[ModelGroup], healthy: bool) -> InstanceView:
    """An instance that has not reported yet."""
    return InstanceView(
        instance_id=instance_id,
        groups=groups,
        healthy=healthy,
        stale=True,
        draining=False,
        kv_format=None,
        block_size=1,
        blocks_total=0,
        virtual_usage_blocks=math.inf,
        head_of_line_blocks=0,
        queued_blocks=0,
        requests_running=0,
        requests_waiting=0,
        freeness_steps=-math.inf,
    )
