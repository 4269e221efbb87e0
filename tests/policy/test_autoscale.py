"""Instances come and go as the mean freeness leaves its band for long enough."""

from __future__ import annotations

import dataclasses

from gateway.policy.autoscale import Add, Drain, ScaleMemory, ScaleSettings, Scaling, TakeBack, scale
from gateway.policy.view import ClusterView
from tests.policy.test_decide import instance, view

SETTINGS = ScaleSettings(low_steps=160, high_steps=960, sustained_s=10, instances_min=1, instances_max=3)
LOW, HIGH = view(instance("a", 100), instance("b", 100)), view(instance("a", 2000), instance("b", 1500))


def steps(cluster: ClusterView, times: list[float], starting: int = 0) -> list[Scaling | None]:
    memory, found = ScaleMemory(), []
    for now in times:
        step, memory = scale(cluster, starting, memory, now, SETTINGS)
        found.append(step)
    return found


def test_an_instance_is_added_when_freeness_has_been_low_for_long_and_then_it_is_counted_anew() -> None:
    assert steps(LOW, [0, 5, 10, 11, 19, 20, 21]) == [None, None, Add(), None, None, None, Add()]


def test_a_short_dip_changes_nothing() -> None:
    _, memory = scale(LOW, 0, ScaleMemory(), 0.0, SETTINGS)
    _, memory = scale(view(instance("a", 500)), 0, memory, 9.0, SETTINGS)
    assert scale(LOW, 0, memory, 11.0, SETTINGS)[0] is None


def test_the_instance_with_the_fewest_requests_is_drained_but_not_the_last() -> None:
    cluster = view(instance("a", 2000, requests_running=4), instance("b", 1500, requests_running=3))
    assert steps(cluster, [0, 10]) == [None, Drain("b")]
    assert steps(view(instance("a", 5000)), [0, 10]) == [None, None]


def test_one_that_drains_is_taken_back_before_another_is_started() -> None:
    cluster = view(*LOW.instances, instance("c", -1, draining=True))
    assert steps(cluster, [0, 10]) == [None, TakeBack("c")]


def test_there_is_a_most_and_those_that_start_are_counted() -> None:
    assert steps(view(*LOW.instances, instance("c", 10)), [0, 10]) == [None, None]
    assert steps(LOW, [0, 10], starting=1) == [None, None]
    assert steps(view(instance("a", 10)), [0, 10], starting=1) == [None, Add()]
    assert steps(HIGH, [0, 10], starting=1) == [None, None]
    assert steps(view(), [0.0], starting=0) == [Add()]
    assert steps(view(), [0.0], starting=1) == [None]


def test_what_waits_at_the_gateways_counts() -> None:
    cluster = view(instance("a", 500), instance("b", 500))
    assert steps(cluster, [0, 10]) == [None, None]
    assert steps(dataclasses.replace(cluster, waiting_tokens=800), [0, 10]) == [None, Add()]
    assert HIGH.waiting_tokens == 0
