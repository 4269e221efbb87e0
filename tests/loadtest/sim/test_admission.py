"""What a modelled engine lets in, by the policy's own rule."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given

from gateway.policy.waiting import Room
from loadtest.sim.admission import NO_ROOM, judge, room_for
from loadtest.sim.engine import Engine, EngineSettings
from loadtest.sim.profile import FAST
from loadtest.sim.reports import Identity, make_report
from tests.loadtest.sim.test_engine import REQUESTS, SETTINGS, request, run, settings


@given(SETTINGS, REQUESTS)
def test_what_is_let_in_starts_in_the_next_step_whatever_its_class(one: EngineSettings, requests: list[Any]) -> None:
    """As long as a step has tokens for it, and each that runs was left the block that it grows by."""
    engine = Engine(dataclasses.replace(one, step_tokens_max=10_000), FAST)
    now = 0.0
    for index, (prompt, output, priority, steps, key) in enumerate(requests):
        new = request(f"r{index}", prompt, output, priority=priority, arrived_at=float(index), key=key)
        new.is_admitted = True
        if judge(engine, new, growth_tokens=one.block_size) is None:
            engine.add(new)
        for _ in range(steps):
            now = engine.step(now).ends_at or now
            assert all(queued.preemptions for queued in engine.waiting())


def test_a_request_that_is_let_in_keeps_its_blocks_from_one_of_a_higher_class() -> None:
    """Until its first step it is queued, and the other would come before it there."""
    engine = Engine(settings(prefix_caching=False), FAST)
    blocks = engine.settings.blocks_total
    size = engine.settings.block_size
    first = request("low", (blocks // 2) * size, 1, priority=100)
    urgent = request("high", (blocks // 2 + 1) * size, 1, priority=-100, arrived_at=1.0)
    assert judge(engine, urgent, growth_tokens=size) is None
    first.is_admitted = True
    engine.add(first)
    busy = judge(engine, urgent, growth_tokens=size)
    assert busy is not None
    assert busy.blocks_needed == blocks // 2 + 1 > busy.room_blocks > 0
    first.is_admitted = False
    assert room_for(engine, urgent) == Room(blocks, engine.settings.batch_max)


def test_a_report_says_what_is_let_in_now_and_nothing_while_it_drains_or_is_full() -> None:
    engine, identity = Engine(settings(batch_max=2), FAST), Identity("i", "b", ("m",))
    for name in ("a", "b"):
        report = make_report(engine, identity, 1)
        assert (report.room_blocks, report.room_places) == dataclasses.astuple(room_for(engine))
        assert report.room_places == engine.settings.batch_max - len(engine.requests())
        for refusing in ({"draining": True}, {"full": True}):
            closed = make_report(engine, identity, 1, **refusing)  # type: ignore[arg-type]
            assert (closed.room_blocks, closed.room_places) == (0, 0)
        engine.add(request(name, 3, 9))
        run(engine, steps=1)
    assert room_for(engine) == NO_ROOM
