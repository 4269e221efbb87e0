"""An instance in a simulation, and what became of a request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.policy.dispatch import Sent
from gateway.policy.view import InstanceView
from gateway.policy.waiting import Room
from loadtest.sim.engine import Engine, Load, Outcome, Request
from loadtest.sim.reports import Identity


@dataclass(slots=True)
class Record:
    """What became of one request. Times are in seconds, ``None`` where it did not come to that."""

    request: Request
    dispatched_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    moves: int = 0
    downtime_s: float = 0.0
    preemption_loss_s: float = 0.0
    """From each preemption to the next token."""
    instance_id: str | None = None
    lost: bool = False
    preempted_at: float | None = None
    moved_at: float | None = None
    moved_from: str | None = None
    undone: int = 0
    """Moves back to where it came from within ten seconds."""
    priority: int = 0
    """Its class, which the policy may not know of."""
    token_times: list[float] = field(default_factory=list)
    """Of each token, if that was asked for."""


_NOTHING = Sent()


@dataclass(slots=True)
class _Report:
    made_at: float
    arrives_at: float
    draining: bool
    view: Callable[[], InstanceView] | None = None
    """Of the engine as it was then; ``None`` as long as that has not changed."""


ViewLater = Callable[["Node", float, bool], Callable[[], InstanceView]]
"""Of a node at a time, draining or not: what its engine holds is read now, the view is made when it is called."""


class Node:
    """An instance, and what the gateway knows of it.

    Few reports are ever looked at. So a report is no more than its time until somebody does, or until the engine is
    about to change.
    """

    def __init__(
        self,
        identity: Identity,
        engine: Engine,
        clock: Callable[[], float],
        wake: Callable[[Node, float], None],
        view_later: ViewLater,
        way_s: float,
    ) -> None:
        """``wake``: call ``step`` then. ``way_s``: of a request from the gateway to here."""
        self.instance_id = identity.instance_id
        self.identity = identity
        self._engine = engine
        self._clock = clock
        self._wake = wake
        self._view_later = view_later
        self._way_s = way_s
        self.steps_at: float | None = None
        """When its step ends."""
        self._report: _Report | None = None
        """The newest that has arrived."""
        self._on_the_way: list[_Report] = []
        self._view: InstanceView | None = None
        self._sent: deque[tuple[float, int]] = deque()
        """Time and tokens of dispatches that the last report cannot know of."""
        self._said_busy: Room | None = None
        """Since its last report."""
        self.alive = True
        self.draining = False
        self.began_at = clock()
        self.ended_at: float | None = None
        self.pairing: str | None = None
        self.rests_until = 0.0
        self.moves_out: dict[str, Move] = {}
        self.moves_in = 0

    def __repr__(self) -> str:
        return f"<Node {self.instance_id} {self._engine}>"

    # Its engine.

    @property
    def engine(self) -> Engine:
        """As it is now. It steps ahead of time, and so has to catch up before anything is done with it."""
        self._settle_reports()
        if (ends_at := self._engine.catch_up(self._clock())) is not None and ends_at != self.steps_at:
            self._wake(self, ends_at)
        return self._engine

    @property
    def engine_ahead(self) -> Engine:
        """Without that: to be asked, and not to be changed."""
        return self._engine

    def step(self) -> Outcome:
        self._settle_reports()
        return self._engine.step(self._clock())

    def load(self) -> Load:
        return self._engine.load(self._clock())

    # Its reports.

    def report(self, arrives_at: float) -> None:
        """Make one, now."""
        self._arrive()
        self._on_the_way.append(_Report(self._clock(), arrives_at, self.draining))

    def _settle_reports(self) -> None:
        """The engine is about to change."""
        for report in self._on_the_way:
            if report.view is None:
                report.view = self._view_later(self, report.made_at, report.draining)
        last = self._report
        if last is not None and last.view is None and self._view is None:
            last.view = self._view_later(self, last.made_at, last.draining)

    def _arrive(self) -> None:
        """What has come by now, and what follows from the newest of it. What is not newer than that says nothing."""
        now = self._clock()
        arrived = [report for report in self._on_the_way if report.arrives_at <= now]
        if not arrived:
            return
        newest = max(arrived, key=lambda report: report.made_at)
        self._on_the_way = [
            report for report in self._on_the_way if report.arrives_at > now and report.made_at > newest.made_at
        ]
        self._report, self._view, self._said_busy = newest, None, None
        while self._sent and self._sent[0][0] <= newest.made_at - self._way_s:
            self._sent.popleft()

    @property
    def has_reports_on_the_way(self) -> bool:
        self._arrive()
        return bool(self._on_the_way)

    @property
    def view(self) -> InstanceView | None:
        """Of the newest report that has arrived."""
        self._arrive()
        if self._view is None and self._report is not None:
            report = self._report
            self._view = (report.view or self._view_later(self, report.made_at, report.draining))()
        return self._view

    def forget_view(self) -> None:
        self._report = self._view = None
        self._on_the_way.clear()

    def sent(self, tokens: int) -> None:
        """The gateway has just sent it a request."""
        self._sent.append((self._clock(), tokens))

    def on_its_way(self) -> Sent:
        self._arrive()
        if not self._sent:
            return _NOTHING
        return Sent(len(self._sent), sum(count for _, count in self._sent), len(self._sent))

    @property
    def said_busy(self) -> Room | None:
        """Since its last report: what it said it had."""
        self._arrive()
        return self._said_busy

    def says_busy(self, said: Room) -> None:
        self._arrive()
        self._said_busy = said


@dataclass(slots=True, eq=False)
class Move:
    """One live migration."""

    request: Request
    source: Node
    destination: Node
    blocks: int
    """At the destination so far."""
    preemptions: int
    stages: int = 0
    frozen: bool = False
    over: bool = False
    copying: bool = False

    @property
    def reservation_id(self) -> str:
        return f"{self.source.instance_id}/{self.request.request_id}"
