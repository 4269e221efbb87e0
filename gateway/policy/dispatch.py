"""Where a new request starts: at the instance with the highest freeness. And how long the queues before it are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gateway.policy.usage import freeness_steps
from gateway.policy.view import ClusterView, InstanceView, ModelGroup


@dataclass(frozen=True, slots=True)
class Sent:
    """What a gateway has itself sent to an instance that the instance's last report cannot know of yet."""

    requests: int = 0
    tokens: int = 0
    in_flight: int = 0
    """All of its own requests there, reported or not."""


_NOTHING_SENT = Sent()


def choose_instance(
    view: ClusterView,
    model: str | None,
    sent: Mapping[str, Sent],
    exclude: Collection[str] = (),
    group: ModelGroup | None = None,
) -> str | None:
    """The id of the usable instance with the highest freeness; ties go to the smaller id. ``None`` if there is none.

    One whose load is not known comes after all that have room, by the number of our own requests there. ``group``: of a
    request that has begun, which can go on only where its model is the same, whatever its name.
    """
    candidates = usable_instances(view, model, exclude, group)
    if not candidates:
        return None

    return min(candidates, key=lambda one: rank(one, sent.get(one.instance_id, _NOTHING_SENT))).instance_id


def choose_least_loaded(view: ClusterView, model: str | None, sent: Mapping[str, Sent]) -> str | None:
    """INFaaS++ (Llumnix, section 6.1): the least part of its memory used, or asked for by those that wait there."""
    candidates = usable_instances(view, model)
    loads = [(_memory_load(one, sent.get(one.instance_id, _NOTHING_SENT)), one.instance_id) for one in candidates]
    return min(loads)[1] if loads else None


def _memory_load(instance: InstanceView, sent: Sent) -> float:
    return _asked_blocks(instance, sent) / max(instance.blocks_total, 1)


def choose_protecting(view: ClusterView, model: str | None, sent: Mapping[str, Sent], tokens: int) -> str | None:
    """For a request with headroom: an instance that keeps some already, so that no other one has to. The fullest that
    has room for it within its target load; ``None`` if there is none."""
    free = [
        (_free_tokens(one, sent.get(one.instance_id, _NOTHING_SENT)), one.instance_id)
        for one in usable_instances(view, model)
        if one.protects
    ]
    fitting = [(left, instance_id) for left, instance_id in free if left >= tokens]
    return min(fitting)[1] if fitting else None


def _free_tokens(instance: InstanceView, sent: Sent) -> float:
    return (instance.blocks_total - _asked_blocks(instance, sent)) * instance.block_size


def choose_next(view: ClusterView, model: str | None, last: str | None) -> str | None:
    """Round-robin: the one whose id comes after ``last``."""
    ids = sorted(one.instance_id for one in usable_instances(view, model))
    return next((one for one in ids if last is None or one > last), ids[0] if ids else None)


Rank = tuple[int, float, str]
"""The lower, the sooner; the last part is the instance's id."""


def rank(instance: InstanceView, sent: Sent) -> Rank:
    if not instance.load_known:
        return 1, sent.in_flight, instance.instance_id
    freeness = dispatch_freeness(instance, sent)
    return 0 if freeness > 0 else 2, -freeness, instance.instance_id


def usable_instances(
    view: ClusterView, model: str | None, exclude: Collection[str] = (), group: ModelGroup | None = None
) -> list[InstanceView]:
    return [
        instance
        for instance in view.instances
        if instance.usable
        and instance.instance_id not in exclude
        and (model is None or instance.serves(model))
        and (group is None or group in instance.groups)
    ]


def queue_length(instance: InstanceView, sent: Sent) -> int:
    """Requests that wait there, and those on their way that will not all find a place in the batch."""
    if not instance.load_known:
        return 0
    places = max(0, instance.requests_running_max - instance.requests_running - instance.requests_waiting)
    return instance.requests_waiting + max(0, sent.requests - places)


def dispatch_freeness(instance: InstanceView, sent: Sent) -> float:
    """Freeness in steps with the whole queue counted, where migration counts its head alone (paper, section 4.4.3)."""
    batch = instance.requests_running + instance.requests_waiting + sent.requests
    return freeness_steps(instance.blocks_total, _asked_blocks(instance, sent), batch, instance.block_size)


def _asked_blocks(instance: InstanceView, sent: Sent) -> float:
    queued_blocks = instance.queued_blocks - instance.head_of_line_blocks
    return instance.virtual_usage_blocks + queued_blocks + sent.tokens / instance.block_size
