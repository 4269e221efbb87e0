"""What may go wrong in a simulated cluster. Seeded, so that a run with faults repeats as well.

Each is put into a cluster before it runs (``simulate``'s ``prepare``); requests of an instance that crashes go on
elsewhere with the tokens that they have, as in the live gateway.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from loadtest.sim.cluster import Cluster


@dataclass(slots=True)
class UnreliableReports:
    """Each report's luck on its way to the gateway. Shares of all reports, between two times."""

    lost_share: float = 0.0
    late_share: float = 0.0
    doubled_share: float = 0.0
    late_s: float = 0.5
    begins_s: float = 0.0
    ends_s: float = float("inf")
    seed: int = 1
    _dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._dice = random.Random(f"reports {self.seed}")

    def put_into(self, cluster: Cluster) -> None:
        usual_s = cluster.settings.report_delay_s

        def delays_s(made_at: float) -> tuple[float, ...]:
            if not self.begins_s <= made_at < self.ends_s:
                return (usual_s,)
            lost, late, doubled = (self._dice.random() for _ in range(3))
            if lost < self.lost_share:
                return ()
            delay_s = usual_s + (self.late_s if late < self.late_share else 0.0)
            return (delay_s, delay_s + self.late_s) if doubled < self.doubled_share else (delay_s,)

        cluster.report_delays_s = delays_s


@dataclass(frozen=True, slots=True)
class Crash:
    """Of the instance that holds most requests then. ``replaced_after_s``: another one is ready; ``None``: never."""

    at_s: float
    replaced_after_s: float | None = None

    def put_into(self, cluster: Cluster) -> None:
        def crash() -> None:
            alive = [node for node in cluster.nodes.values() if node.alive]
            if len(alive) < 2:
                return  # Nobody would be left to go on.
            victim = max(alive, key=lambda node: (len(node.engine.requests()), node.instance_id))
            for request in cluster.crash(victim.instance_id):
                cluster.restart(request)
            if self.replaced_after_s is not None:
                cluster.add_instance(offset_s=self.replaced_after_s)

        cluster.at(self.at_s, crash)


@dataclass(frozen=True, slots=True)
class SlowLinks:
    """Copies take ``factor`` times as long between two times."""

    factor: float
    begins_s: float = 0.0
    ends_s: float = float("inf")

    def put_into(self, cluster: Cluster) -> None:
        def become(factor: float) -> None:
            cluster.copy_factor = factor

        cluster.at(self.begins_s, lambda: become(self.factor))
        cluster.at(self.ends_s, lambda: become(1.0))


Fault = UnreliableReports | Crash | SlowLinks
