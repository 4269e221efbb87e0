"""Whether a request can start now, by the policy's rule and what the engine holds: as ``vllm_plugin.admission``."""

from __future__ import annotations

from gateway import wire
from gateway.policy.waiting import GROWTH_TOKENS, Room, room
from loadtest.sim.engine import Engine, Load, Request

NO_ROOM = Room(0, 0)


def room_for(
    engine: Engine, request: Request | None = None, growth_tokens: int = GROWTH_TOKENS, load: Load | None = None
) -> Room:
    """What the engine has left for ``request``; ``None``: for one that would come last."""
    settings, load = engine.settings, load or engine.load()
    if load.running + (load.waiting if request is None else 0) >= settings.batch_max:
        return NO_ROOM  # Without a look at the queue: a long one would take most of a report's time.
    promised = engine.promised(request)
    if promised.places >= settings.batch_max:
        return NO_ROOM
    return room(
        load.blocks_free, promised.blocks, promised.places, settings.batch_max, growth_tokens, settings.block_size
    )


def judge(engine: Engine, request: Request, growth_tokens: int = GROWTH_TOKENS) -> wire.Busy | None:
    """``None``: it may enter, and then has to at once, so that it counts for whoever comes next."""
    found, needed = room_for(engine, request, growth_tokens), engine.missing_blocks(request)
    return None if found.fits(needed) else wire.Busy(needed, found.blocks, found.places)
