"""The live leader decides what the simulator's gateway decided on the same reports."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence

import pytest

from gateway import wire
from gateway.cluster.members import Instance, Members
from gateway.counters import Counters
from gateway.policy.decide import Action, Pair, decide
from gateway.policy.policies import POLICIES
from gateway.policy.view import ClusterView
from gateway.policy.waiting import WaitingRules
from gateway.scheduler.executor import Executor
from gateway.scheduler.leader import Leader
from loadtest.sim.cluster import MODEL, Cluster, ClusterSettings
from loadtest.sim.engine import Request
from loadtest.sim.node import Node
from loadtest.sim.reports import make_report
from loadtest.sim.tokens import SyntheticPrompt
from tests.loadtest.sim.test_cluster import ENGINE, eager, settings, workload
from tests.test_leader import Leases

HEADROOM_BLOCKS = 20


@dataclasses.dataclass
class Tick:
    view: ClusterView
    decided: list[Action]


class Recording(Cluster):
    """What its gateway is told, and what it decides, in order."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.events: list[Tick | str] = []
        self._on_their_way: list[tuple[float, int, str]] = []
        super().__init__(settings)

    def _report(self, node: Node) -> None:
        if not node.alive:
            super()._report(node)
            return
        number = len(self.events) + len(self._on_their_way) + 1
        report = make_report(node.engine, node.identity, number, draining=node.draining)
        super()._report(node)
        arrives_at = node._on_the_way[-1].arrives_at
        self._on_their_way.append((arrives_at, number, json.dumps(report.to_json())))

    def _tick(self) -> None:
        view = self.front.view()
        decided, _ = decide(view, self._memory, self.now, self.settings.policy.leader)
        here = sorted(one for one in self._on_their_way if one[0] <= self.now)
        self._on_their_way = [one for one in self._on_their_way if one[0] > self.now]
        self.events += [words for _, _, words in here]
        self.events.append(Tick(view, decided))
        super()._tick()


class Noting(Executor):
    def __init__(self) -> None:
        self.actions: list[Action] = []

    async def run(self, action: Action, fence: int) -> None:
        self.actions.append(action)


def large() -> Sequence[Request]:
    return [Request(f"large{index}", SyntheticPrompt(1000 + index, 380), 9, arrived_at=0.3) for index in range(2)]


@pytest.mark.parametrize("name", ["kvferry", "llumnix"])
async def test_on_the_same_reports_the_leader_decides_the_same(name: str) -> None:
    policy = dataclasses.replace(eager(name), waiting=WaitingRules(aged_s=0.2))
    assert policy.growth_tokens == POLICIES["kvferry"].growth_tokens or name == "llumnix"
    recording = Recording(settings(policy=policy, headroom_blocks={1: HEADROOM_BLOCKS}, looks_ahead=False, tick_s=0.05))
    recording.at(1.0, lambda: recording.drain("i0002"))
    requests = sorted([*workload(3, count=120, rate=60.0), *large()], key=lambda one: one.arrived_at)
    recording.run(requests)

    targets = {1: (ENGINE.blocks_total - HEADROOM_BLOCKS) * ENGINE.block_size}
    members = Members(report_stale_s=1e9, unheard_s=1e9, targets=targets)
    card = {"id": MODEL, "root": MODEL, "parent": None}
    for node in recording.nodes.values():
        instance = Instance(node.instance_id, f"http://{node.instance_id}", node.identity.boot_id)
        members.probed(instance, [card], True, None, time.monotonic())
    kept: frozenset[str] = frozenset()

    async def kept_now() -> frozenset[str]:
        return kept

    executor = Noting()
    leader = Leader("g", Leases(1e9), members, executor, policy.leader, 1e9, Counters(), kept_now)
    seen = pairs = kept_ticks = protecting = 0
    for event in recording.events:
        if isinstance(event, str):
            members.reported(wire.Report.from_json(json.loads(event)), time.monotonic())
            continue
        if {one.instance_id for one in event.view.instances} != set(recording.nodes):
            continue  # Before all have reported, which the live one would know otherwise.
        kept = event.view.kept_ids
        executor.actions.clear()
        if name == "kvferry":
            assert members.view(time.monotonic()).instances == event.view.instances
        await leader.tick()
        assert executor.actions == event.decided
        seen += 1
        pairs += any(isinstance(action, Pair) for action in event.decided)
        kept_ticks += bool(kept)
        protecting += any(one.protects for one in event.view.instances)
    assert seen > 10
    assert pairs > 3
    assert protecting > 3
    assert bool(kept_ticks) == (name == "kvferry")
