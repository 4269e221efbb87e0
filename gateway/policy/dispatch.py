"""Where a new request starts: at the instance with the highest freeness."""

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


_NOTHING_SENT = Sent()


def choose_instance(
    view: ClusterView,
    model: str | None,
    sent: Mapping[str, Sent],
    exclude: Collection[str] = (),
    group: ModelGroup | None = None,
) -> str | None:
    """The id of the usable instance with the highest freeness; ties go to the smaller id. ``None`` if there is none.

    ``group``: of a request that has begun, which can go on only where its model is the same, whatever its name.
    """
    candidates = [
        instance
        for instance in view.instances
        if instance.usable
        and instance.instance_id not in exclude
        and (model is None or instance.serves(model))
        and (group is None or group in instance.groups)
    ]
    if not candidates:
        return None

    def rank(instance: InstanceView) -> tuple[float, str]:
        return -dispatch_freeness(instance, sent.get(instance.instance_id, _NOTHING_SENT)), instance.instance_id

    return min(candidates, key=rank).instance_id


def dispatch_freeness(instance: InstanceView, sent: Sent) -> float:
    """Freeness in steps with the whole queue counted, where migration counts its head alone (paper, section 4.4.3)."""
    sent_blocks = sent.tokens / instance.block_size
    usage = instance.virtual_usage_blocks - instance.head_of_line_blocks + instance.queued_blocks + sent_blocks
    batch = instance.requests_running + instance.requests_waiting + sent.requests
    return freeness_steps(instance.blocks_total, usage, batch, instance.block_size)
