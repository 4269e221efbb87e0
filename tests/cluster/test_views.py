"""What is kept up to date one by one equals what looking at everything anew would give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import wire
from gateway.cluster.health import HealthSettings
from gateway.cluster.members import Instance, Members, PlainLoad
from gateway.errors import NoInstance, NotFound, Overloaded
from gateway.policy.dispatch import Sent, choose_instance, queue_length, usable_instances
from gateway.policy.view import ClusterView
from gateway.policy.waiting import Room, Waiter, best_site, site
from gateway.serving.dispatch import REPORT_LAG_S, ROOM_LAG_S, Dispatcher

STALE_S, UNHEARD_S = 4.0, 2.0
REQUESTS_MAX, QUEUE_MAX = 3, 6
CARDS = ([{"id": "m", "root": "m"}], [{"id": "m", "root": "other"}, {"id": "n"}])
NAMES = ("a", "b", "c", "p")
"""``p`` has no plugin."""

REPORT = wire.Report(
    instance_id="a",
    boot_id="1",
    sequence=0,
    models=["m"],
    vllm_version="0",
    plugin_version="0",
    protocol_version=wire.PROTOCOL_VERSION,
    kv_format="k",
    kv_reason=None,
    block_size=16,
    blocks_total=100,
    blocks_free=50,
    blocks_reserved=0,
    requests_running=1,
    requests_waiting=0,
    requests_running_max=4,
    running_by_priority={},
    waiting_by_priority={},
    virtual_usage_blocks=10.0,
    freeness_steps=100.0,
    head_of_line_blocks=0,
    queued_blocks=0,
    step_ms=1.0,
    draining=False,
    migrations_in=0,
    migrations_out=0,
)


class Cluster:
    """Each ``step`` is one thing that may happen to the members; time goes on in quarters of a second."""

    def __init__(self) -> None:
        health = HealthSettings(failures_max=1, ejected_first_s=1.0, stall_s=1.0)
        self.members = Members(STALE_S, UNHEARD_S, health)
        self.now = 0.0
        self.lives = dict.fromkeys(NAMES, 1)
        self.sequence = 0

    def instance(self, name: str) -> Instance:
        return Instance(name, f"http://{name}", str(self.lives[name]), managed=name != "p")

    def step(self, kind: str, name: str, number: int) -> None:
        instance, members, now = self.instance(name), self.members, self.now
        self.sequence += 1
        match kind:
            case "time":
                self.now += number / 4
            case "probed":
                members.probed(instance, CARDS[number % 2], number != 3, "it is asleep", now)
            case "restarted":
                self.lives[name] += 1
                members.probed(self.instance(name), CARDS[0], True, None, now)
            case "reported":
                members.reported(self.report(name, number), now)
            case "loaded":
                load = PlainLoad(number % 3, number % 2, number / 10, 100, 16, float(number % 4))
                members.loaded(instance.url, load, now)
            case "lost":
                members.lost(instance.url, "no answer")
            case "failed":
                members.leg_failed(instance, "it failed", refused=False, now=now)
            case "silent":
                members.silent(instance, number, now)
            case "progressed":
                members.progressed(instance, now)
            case "heard":
                members.heard(instance.url, number == 3, now)
            case "drained":
                members.drain_ordered(name, number % 2 == 0)
            case "leaves":
                members.leave(instance.url, leaving=number % 2 == 0)
            case "forgotten":
                members.forget(instance.url)

    def report(self, name: str, number: int) -> wire.Report:
        return dataclasses.replace(
            REPORT,
            instance_id=name,
            boot_id=str(self.lives[name]),
            sequence=self.sequence,
            requests_running=number % 3,
            requests_waiting=number % 2,
            virtual_usage_blocks=None if number == 3 else 20.0 * number,
            queued_blocks=number % 2,
            freeness_steps=None if number == 3 else 100.0 - number,
            draining=number == 3,
            room_blocks=None if number > 4 else 8 * number,
            room_places=number,
        )

    def view_anew(self) -> ClusterView:
        return ClusterView(tuple(self.members._view(member, self.now) for member in self.members.all()))


KINDS = (
    *("time", "time", "time", "probed", "restarted", "reported", "reported", "loaded", "lost", "failed", "silent"),
    *("progressed", "heard", "heard", "drained", "leaves", "forgotten"),
)
STEP = st.tuples(st.sampled_from(KINDS), st.sampled_from(NAMES), st.integers(0, 6))


def begun() -> Cluster:
    cluster = Cluster()
    for name in NAMES:
        cluster.step("probed", name, 0)
        cluster.step("reported", name, 1)
    return cluster


@settings(deadline=None, max_examples=200)
@given(st.lists(STEP, max_size=60))
def test_the_view_is_always_the_one_that_would_be_made_anew(steps: list[tuple[str, str, int]]) -> None:
    cluster = begun()
    for index, step in enumerate(steps):
        cluster.step(*step)
        if index % 3 == 0:  # In between, changes gather.
            assert cluster.members.view(cluster.now) == cluster.view_anew()
    assert cluster.members.view(cluster.now) == cluster.view_anew()


def test_a_clock_that_is_asked_for_an_earlier_moment_is_answered_too() -> None:
    cluster = begun()
    assert all(one.stale for one in cluster.members.view(100.0).instances)
    assert cluster.members.view(0.0) == cluster.view_anew()


class Sender:
    """What one gateway has sent, counted by the rules alone."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.dispatcher = Dispatcher(cluster.members, REQUESTS_MAX, QUEUE_MAX, clock=lambda: cluster.now)
        self._sendings: list[tuple[str, float]] = []
        self._held: list[tuple[str, Callable[[], None]]] = []

    def send(self, name: str) -> None:
        self._sendings.append((name, self._cluster.now))
        self._held.append((name, self.dispatcher.hold(name, 400)))

    def end_one(self, number: int) -> None:
        if self._held:
            self._held.pop(number % len(self._held))[1]()

    def sent(self, lag_s: float) -> dict[str, Sent]:
        known_at = {one.instance.instance_id: one.known_at for one in self._cluster.members.all()}
        fresh = [one for one, at in self._sendings if one in known_at and at >= known_at[one] - lag_s]
        held = [one for one, _ in self._held]
        return {one: Sent(fresh.count(one), 100 * fresh.count(one), held.count(one)) for one in known_at}


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.one_of(STEP, st.tuples(st.sampled_from(("sent", "ended")), st.sampled_from(NAMES), st.integers(0, 6))))
)
def test_the_choice_is_the_one_that_the_policy_makes_of_everything_anew(steps: list[tuple[str, str, int]]) -> None:
    cluster = begun()
    sender = Sender(cluster)
    for index, (kind, name, number) in enumerate(steps):
        if kind == "sent":
            sender.send(name)
        elif kind == "ended":
            sender.end_one(number)
        else:
            cluster.step(kind, name, number)
        if index % 3 == 0:
            check_choice(cluster, sender, ("m", "n", None)[index % 9 // 3], [name] if number == 5 else [])


def check_choice(cluster: Cluster, sender: Sender, model: str | None, exclude: list[str]) -> None:
    view, sent, at_sites = cluster.view_anew(), sender.sent(REPORT_LAG_S), sender.sent(ROOM_LAG_S)
    usable = usable_instances(view, model, exclude)
    full = {name for name, here in sent.items() if here.in_flight >= REQUESTS_MAX}
    # One whose load is not known is sent a request now and then without being compared: not looked at here.
    if all(one.load_known for one in usable):
        expected: Any = choose_instance(view, model, sent, full.union(exclude)) or NoInstance
        waiting = sum(queue_length(one, sent[one.instance_id]) for one in usable)
        if usable and (waiting >= QUEUE_MAX * len(usable) or all(one.instance_id in full for one in usable)):
            expected = Overloaded
        assert chosen(sender.dispatcher, model, exclude) == expected
    sites = [
        dataclasses.replace(made, room=Room(0, 0)) if one.instance_id in full else made
        for one in usable
        for made in [site(one, at_sites[one.instance_id])]
    ]
    lineup = sender.dispatcher.lineup(model).only(exclude)
    assert sorted(lineup.sites(), key=lambda one: one.instance_id) == sites
    for tokens in (1, 200, 5000):
        waiter = Waiter("r", 0, 0.0, tokens, frozenset(exclude))
        assert lineup.best_site(waiter) == best_site(waiter, sites)


def chosen(dispatcher: Dispatcher, model: str | None, exclude: list[str]) -> Any:
    try:
        return dispatcher.choose(model, exclude, is_new=True).instance_id
    except Overloaded:
        return Overloaded
    except (NoInstance, NotFound):
        return NoInstance


def test_models_that_nobody_asks_for_any_more_are_forgotten() -> None:
    cluster = begun()
    dispatcher = Dispatcher(cluster.members, clock=lambda: cluster.now)
    for number in range(100):
        assert not dispatcher.lineup(f"made up {number}")
    assert dispatcher.lineup("m")
    assert list(dispatcher._lineups) == ["m"]
    dispatcher.forget(cluster.members.get)
    dispatcher.forget(cluster.members.get)
    assert not dispatcher._lineups
