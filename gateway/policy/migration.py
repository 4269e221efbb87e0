"""Which instance should move requests to which (Llumnix, section 4.4.3): the fullest to the freest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.policy.view import ClusterView, InstanceView, ModelGroup


@dataclass(frozen=True, slots=True)
class MigrationSettings:
    """Thresholds in decode steps. A source is below the low one, a destination above the high one."""

    low_freeness_steps: float = 160.0
    high_freeness_steps: float = 480.0


def pair_instances(view: ClusterView, current: Mapping[str, str], settings: MigrationSettings) -> dict[str, str]:
    """Source to destination, greedily, each in one pair at most.

    A pair that still holds is kept, so that a migration under way is not turned round. Otherwise a destination with the
    same KV format comes first, since a move to any other has to recompute; then the freest; ties by id.
    """
    sources = sorted(
        (instance for instance in view.instances if _is_source(instance, settings)),
        key=lambda instance: (instance.freeness_steps, instance.instance_id),
    )
    free = {instance.instance_id: instance for instance in view.instances if _is_destination(instance, settings)}
    pairs: dict[str, str] = {}
    for source in sources:
        kept = current.get(source.instance_id)
        if kept in free and free[kept].can_take_over_from(source):
            pairs[source.instance_id] = free.pop(kept).instance_id
    alike = _alike(free.values())
    for source in sources:
        freest = [group[-1] for group in alike if group and group[-1].can_take_over_from(source)]
        if source.instance_id in pairs or not freest:
            continue
        best = min(freest, key=lambda to: (not to.can_take_kv_from(source), -to.freeness_steps, to.instance_id))
        pairs[source.instance_id] = best.instance_id
        next(group for group in alike if group and group[-1] is best).pop()
    return pairs


def _alike(destinations: Iterable[InstanceView]) -> list[list[InstanceView]]:
    """By what makes them fit a source, the freest one last: so a source is compared with a few, and not with all."""
    groups: dict[tuple[frozenset[ModelGroup], str | None], list[InstanceView]] = {}
    for one in sorted(destinations, key=lambda to: (-to.freeness_steps, to.instance_id), reverse=True):
        groups.setdefault((one.groups, one.kv_format), []).append(one)
    return list(groups.values())


def _is_source(instance: InstanceView, settings: MigrationSettings) -> bool:
    """A draining instance has a freeness of -inf, so it is one as long as anything runs there."""
    loaded = instance.requests_running + instance.requests_waiting > 0
    answers = instance.managed and instance.healthy and not instance.stale
    return answers and loaded and instance.freeness_steps < settings.low_freeness_steps


def _is_destination(instance: InstanceView, settings: MigrationSettings) -> bool:
    return instance.managed and instance.usable and instance.freeness_steps > settings.high_freeness_steps
