"""Virtual usage and freeness (Llumnix, Algorithm 1)."""

from __future__ import annotations

import math

from gateway.policy.usage import RequestUsage, freeness_steps, virtual_usage_blocks


def running(blocks: int, priority: int = 0) -> RequestUsage:
    return RequestUsage(blocks, 0, is_queued=False, is_head_of_line=False, execution_priority=priority)


def queued(demand: int, head: bool = False) -> RequestUsage:
    return RequestUsage(0, demand, is_queued=True, is_head_of_line=head)


def test_running_requests_count_their_blocks() -> None:
    assert virtual_usage_blocks([running(3), running(4)]) == 7


def test_of_the_queue_the_head_alone_counts() -> None:
    assert virtual_usage_blocks([running(3), queued(10, head=True), queued(20)]) == 13


def test_a_class_shares_its_headroom_among_its_running_requests() -> None:
    requests = [running(1, 1), running(2, 1), running(3)]
    assert virtual_usage_blocks(requests, {1: 100}) == 106
    assert virtual_usage_blocks([running(3)], {1: 100}) == 3


def test_a_draining_instance_is_infinitely_used() -> None:
    assert virtual_usage_blocks([], draining=True) == math.inf
    assert freeness_steps(100, math.inf, 0, 16) == -math.inf


def test_freeness_is_in_steps_for_the_whole_batch() -> None:
    assert freeness_steps(100, 60, 4, 16) == 160
    assert freeness_steps(100, 0, 0, 16) == 1600
    assert freeness_steps(100, 120, 2, 16) == -160
    assert freeness_steps(50, 30, 4, 32) == freeness_steps(100, 60, 4, 16)
