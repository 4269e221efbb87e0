"""Headroom of however many classes, added to what an instance reports."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.protection import headroom_blocks, with_headroom
from gateway.policy.usage import RequestUsage, freeness_steps, virtual_usage_blocks
from tests.policy.test_decide import instance

CLASSES = st.integers(-300, 300)


@given(
    st.lists(st.tuples(CLASSES, st.integers(0, 90)), min_size=1, max_size=12),
    st.dictionaries(CLASSES, st.integers(0, 20_000), max_size=6),
)
def test_it_is_what_algorithm_1_says_of_the_requests_one_by_one(
    running: list[tuple[int, int]], targets: dict[int, int]
) -> None:
    usages = [RequestUsage(blocks, 0, False, False, priority) for priority, blocks in running]
    plain = virtual_usage_blocks(usages)
    seen = instance("a", virtual_usage_blocks=plain, requests_running=len(running))
    expected = virtual_usage_blocks(usages, headroom_blocks(targets, seen.blocks_total, seen.block_size))
    freeness = freeness_steps(seen.blocks_total, expected, len(running), seen.block_size)
    found = with_headroom(dataclasses.replace(seen, freeness_steps=0.0), {one for one, _ in running}, targets)
    assert abs(found.virtual_usage_blocks - expected) < 1e-6
    assert found.protects == any(one in targets for one, _ in running)
    if found.protects:
        assert abs(found.freeness_steps - freeness) < 1e-6


def test_a_draining_instance_stays_without_freeness() -> None:
    draining = instance("a", -float("inf"), virtual_usage_blocks=float("inf"), draining=True)
    assert with_headroom(draining, {1}, {1: 160}).freeness_steps == -float("inf")
