"""What an engine reports: the llumlet's message, and the policy's view of it without the way through a gateway."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gateway import wire
from gateway.policy.protection import Targets, with_headroom
from gateway.policy.usage import RequestUsage, freeness_steps, virtual_usage_blocks
from gateway.policy.view import InstanceView, ModelGroup
from gateway.policy.waiting import GROWTH_TOKENS, Room
from loadtest.sim.admission import NO_ROOM, room_for
from loadtest.sim.engine import Engine, Load, Request

VLLM_VERSION = "0.32.0"
NO_HEADROOM: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True)
class Identity:
    """What stays the same in an instance's reports."""

    instance_id: str
    boot_id: str
    models: tuple[str, ...]
    kv_format: str | None = None
    kv_reason: str | None = None


def make_report(
    engine: Engine,
    identity: Identity,
    sequence: int,
    *,
    draining: bool = False,
    migrations_in: int = 0,
    migrations_out: int = 0,
    migrations_ended: wire.MigrationTotals | None = None,
    fence: int = 0,
    full: bool = False,
) -> wire.Report:
    """As the llumlet in a real server makes it (``vllm_plugin.llumlet``). ``full``: it says that it has no room."""
    room = _room(engine, draining or full)
    load, settings = engine.load(), engine.settings
    usage = _usage_blocks(load, load.running_blocks, NO_HEADROOM, draining)
    freeness = freeness_steps(settings.blocks_total, usage, load.running, settings.block_size)
    return wire.Report(
        instance_id=identity.instance_id,
        boot_id=identity.boot_id,
        sequence=sequence,
        models=list(identity.models),
        vllm_version=VLLM_VERSION,
        plugin_version="0",
        protocol_version=wire.PROTOCOL_VERSION,
        kv_format=identity.kv_format,
        kv_reason=identity.kv_reason,
        block_size=settings.block_size,
        blocks_total=settings.blocks_total,
        blocks_free=load.blocks_free,
        blocks_reserved=load.blocks_reserved,
        requests_running=load.running,
        requests_waiting=load.waiting,
        requests_running_max=settings.batch_max,
        running_by_priority=_by_class(engine.running()),
        waiting_by_priority=_by_class(engine.waiting()),
        virtual_usage_blocks=None if draining else usage,
        freeness_steps=None if draining else freeness,
        head_of_line_blocks=load.head_of_line_blocks,
        queued_blocks=load.queued_blocks,
        step_ms=round(load.step_ms, 3),
        draining=draining,
        migrations_in=migrations_in,
        migrations_out=migrations_out,
        migrations_ended=migrations_ended,
        fence=fence,
        room_blocks=room.blocks,
        room_places=room.places,
    )


def view_of(
    report: wire.Report, *, healthy: bool = True, stale: bool = False, targets: Targets = NO_HEADROOM
) -> InstanceView:
    """What a gateway's policy sees when this is an instance's last report."""
    usage, freeness = report.virtual_usage_blocks, report.freeness_steps
    view = InstanceView(
        instance_id=report.instance_id,
        groups=groups_of(tuple(report.models)),
        healthy=healthy,
        stale=stale,
        draining=report.draining,
        kv_format=report.kv_format,
        block_size=report.block_size,
        blocks_total=report.blocks_total,
        virtual_usage_blocks=math.inf if usage is None else usage,
        head_of_line_blocks=report.head_of_line_blocks,
        queued_blocks=report.queued_blocks,
        requests_running=report.requests_running,
        requests_waiting=report.requests_waiting,
        freeness_steps=-math.inf if freeness is None else freeness,
        requests_running_max=report.requests_running_max,
        room_blocks=report.room_blocks,
        room_places=report.room_places,
        blocks_used=max(0, report.blocks_total - report.blocks_free - report.blocks_reserved),
    )
    return with_headroom(view, [one for one in targets if report.runs(one)], targets)


def make_view(
    engine: Engine,
    identity: Identity,
    *,
    draining: bool = False,
    headroom_blocks: Mapping[int, int] = NO_HEADROOM,
) -> InstanceView:
    """``view_of(make_report(...))`` in a fifth of the time, for simulations: most of theirs went there."""
    return view_later(engine, identity, draining=draining, headroom_blocks=headroom_blocks)()


def view_later(
    engine: Engine,
    identity: Identity,
    *,
    draining: bool = False,
    headroom_blocks: Mapping[int, int] = NO_HEADROOM,
    now: float | None = None,
    says_room: bool = True,
    growth_tokens: int = GROWTH_TOKENS,
) -> Callable[[], InstanceView]:
    """What is read now, and a view of it made when somebody looks. ``now``: for an engine that looks ahead."""
    load, settings = engine.load(now), engine.settings
    running_blocks = dict(load.running_blocks)
    room = NO_ROOM if draining else room_for(engine, None, growth_tokens, load) if says_room else None

    def make() -> InstanceView:
        usage = _usage_blocks(load, running_blocks, headroom_blocks, draining)
        return InstanceView(
            identity.instance_id,
            groups_of(identity.models),
            True,
            False,
            draining,
            identity.kv_format,
            settings.block_size,
            settings.blocks_total,
            usage,
            load.head_of_line_blocks,
            load.queued_blocks,
            load.running,
            load.waiting,
            freeness_steps(settings.blocks_total, usage, load.running, settings.block_size),
            settings.batch_max,
            room_blocks=room.blocks if room is not None else None,
            room_places=room.places if room is not None else 0,
            protects=any(priority in headroom_blocks for priority in running_blocks),
            blocks_used=max(0, settings.blocks_total - load.blocks_free - load.blocks_reserved),
        )

    return make


@functools.lru_cache(maxsize=64)
def groups_of(models: tuple[str, ...]) -> frozenset[ModelGroup]:
    return frozenset(ModelGroup(model, model) for model in models)


def _room(engine: Engine, takes_nothing: bool) -> Room:
    return NO_ROOM if takes_nothing else room_for(engine)


def _usage_blocks(
    load: Load, running_blocks: Mapping[int, int], headroom_blocks: Mapping[int, int], draining: bool
) -> float:
    """A class of running requests counts as one: virtual usage takes sums over them, and a test holds it to that."""
    if not headroom_blocks and not draining:
        return float(sum(running_blocks.values()) + load.head_of_line_blocks + load.blocks_reserved)
    usages = [RequestUsage(blocks, 0, False, False, priority) for priority, blocks in running_blocks.items()]
    if load.head_of_line_blocks:
        usages.append(RequestUsage(0, load.head_of_line_blocks, True, True))
    return virtual_usage_blocks(usages, headroom_blocks, draining) + load.blocks_reserved


def _by_class(requests: Iterable[Request]) -> dict[str, int]:
    """As a llumlet says it: in vLLM's direction, where lower is sooner."""
    return {str(one): count for one, count in sorted(Counter(-each.execution_priority for each in requests).items())}
