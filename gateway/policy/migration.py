"""Which instance should move requests to which (Llumnix, section 4.4.3): the fullest to the freest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.policy.usage import freeness_steps
from gateway.policy.view import ClusterView, InstanceView, ModelGroup


@dataclass(frozen=True, slots=True)
class MigrationSettings:
    """Thresholds in decode steps. A source is below the low one, a destination above the high one."""

    low_freeness_steps: float = 48.0
    high_freeness_steps: float = 48.0
    guards_destination: bool = False
    """One that a request of the source's mean size would bring below the low threshold is none."""
    empties_kept: bool = False
    """An instance that is kept for a waiting request is a source, however free, and no destination."""


def pair_instances(view: ClusterView, current: Mapping[str, str], settings: MigrationSettings) -> dict[str, str]:
    """Source to destination, greedily, each in one pair at most.

    A pair that still holds is kept, so that a migration under way is not turned round. Otherwise a destination with the
    same KV format comes first, since a move to any other has to recompute; then the freest; ties by id.
    """
    kept_ids = view.kept_ids if settings.empties_kept else frozenset()
    sources = sorted(
        (one for one in view.instances if _is_source(one, settings, is_kept=one.instance_id in kept_ids)),
        key=lambda one: (one.instance_id not in kept_ids, one.freeness_steps, one.instance_id),
    )
    free = {
        one.instance_id: one
        for one in view.instances
        if one.instance_id not in kept_ids and _is_destination(one, settings)
    }
    pairs: dict[str, str] = {}
    for source in sources:
        current_id = current.get(source.instance_id)
        if current_id in free and _can_take(free[current_id], source, settings):
            pairs[source.instance_id] = free.pop(current_id).instance_id
    alike = _alike(free.values())
    for source in sources:
        freest = [group[-1] for group in alike if group and _can_take(group[-1], source, settings)]
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


def _can_take(destination: InstanceView, source: InstanceView, settings: MigrationSettings) -> bool:
    if not destination.can_take_over_from(source):
        return False
    if not settings.guards_destination or source.draining:
        return True
    usage: float | None = source.blocks_used
    if usage is None:
        usage = source.virtual_usage_blocks - source.head_of_line_blocks
    after = freeness_steps(
        destination.blocks_total,
        destination.virtual_usage_blocks + usage / max(source.requests_running, 1),
        destination.requests_running + 1,
        destination.block_size,
    )
    return after > settings.low_freeness_steps


def _is_source(instance: InstanceView, settings: MigrationSettings, *, is_kept: bool) -> bool:
    """A draining instance has a freeness of -inf, so it is one as long as anything runs there."""
    loaded = instance.requests_running + instance.requests_waiting > 0
    answers = instance.managed and instance.healthy and not instance.stale
    return answers and loaded and (is_kept or instance.freeness_steps < settings.low_freeness_steps)


def _is_destination(instance: InstanceView, settings: MigrationSettings) -> bool:
    return instance.managed and instance.usable and instance.freeness_steps > settings.high_freeness_steps
