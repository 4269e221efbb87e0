"""How many instances there are: the mean freeness is kept within a band (Llumnix, section 4.4.4). Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gateway.policy.view import ClusterView, InstanceView


@dataclass(frozen=True, slots=True)
class ScaleSettings:
    """In decode steps, as for migration: 10 and 60 blocks of 16 are 160 and 960 steps."""

    low_steps: float = 160.0
    high_steps: float = 960.0
    sustained_s: float = 10.0
    """The mean must have been outside for so long; after each step it is counted anew."""
    instances_min: int = 1
    instances_max: int = 16


@dataclass(frozen=True, slots=True)
class ScaleMemory:
    below_since_s: float | None = None
    above_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class Add:
    """One instance more."""


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Let an instance that drains go on instead: it is warm."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Nothing new goes there, what runs moves away or ends, and then it stops."""

    instance_id: str


Scaling = Add | TakeBack | Drain


def scale(
    view: ClusterView, starting: int, memory: ScaleMemory, now_s: float, settings: ScaleSettings
) -> tuple[Scaling | None, ScaleMemory]:
    """At most one step in ``sustained_s``. ``starting``: instances that are not ready yet. More may be added meanwhile,
    since a burst does not wait for a cold start; while there are any, none is drained."""
    serving = [one for one in view.instances if one.usable]
    if not serving:
        return (Add() if not starting else None), ScaleMemory()
    mean_steps = mean_freeness_steps(view)
    below = _since(memory.below_since_s, mean_steps < settings.low_steps, now_s)
    above = _since(memory.above_since_s, mean_steps > settings.high_steps, now_s)
    memory = ScaleMemory(below, above)
    if below is not None and now_s - below >= settings.sustained_s:
        draining = [one for one in view.instances if one.draining and one.healthy and not one.stale]
        if draining:
            fullest = max(draining, key=lambda one: (one.requests_running, one.instance_id))
            return TakeBack(fullest.instance_id), ScaleMemory()
        has_place = len(view.instances) + starting < settings.instances_max
        return (Add(), ScaleMemory()) if has_place else (None, memory)
    if starting:
        return None, memory
    if above is not None and now_s - above >= settings.sustained_s and len(serving) > settings.instances_min:
        least = min(serving, key=lambda one: (one.requests_running + one.requests_waiting, one.instance_id))
        return Drain(least.instance_id), ScaleMemory()
    return None, memory


def mean_freeness_steps(view: ClusterView) -> float:
    """Of the instances that take requests. What waits at the gateways counts as if it were spread over them."""
    serving = [one for one in view.instances if one.usable]
    if not serving:
        return -math.inf
    return math.fsum(_freeness_steps(one, view.waiting_tokens / len(serving)) for one in serving) / len(serving)


def _freeness_steps(instance: InstanceView, waiting_tokens: float) -> float:
    return instance.freeness_steps - waiting_tokens / max(instance.requests_running, 1)


def _since(since_s: float | None, holds: bool, now_s: float) -> float | None:
    return (now_s if since_s is None else since_s) if holds else None
