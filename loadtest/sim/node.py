"""An instance in a simulation, and what became of a request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

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


_NOTHING = Sent()


@dataclass(slots=True)
class _Report:
    made_at: float
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
        report_delay_s: float = 0.0,
        control_delay_s: float = 0.0,
    ) -> None:
        """``wake``: call ``step`` then."""
        self.instance_id = identity.instance_id
        self.identity = identity
        self._engine = engine
        self._clock = clock
        self._wake = wake
        self._view_later = view_later
        self._report_delay_s = report_delay_s
        self._control_delay_s = control_delay_s
        self.steps_at: float | None = None
        """When its step ends."""
        self._reports: deque[_Report] = deque()
        """The last that has arrived, and those on their way."""
        self._has_arrived = False
        """The first of them."""
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

    def report(self) -> None:
        """Make one, now."""
        self._arrive()
        self._reports.append(_Report(self._clock(), self.draining))

    def _settle_reports(self) -> None:
        for report in self._reports:
            if report.view is None:
                report.view = self._view_later(self, report.made_at, report.draining)

    def _arrive(self) -> None:
        """What has come by now, and what follows from the last of it."""
        arrived_before = self._clock() - self._report_delay_s
        reports = self._reports
        while len(reports) > 1 and reports[1].made_at <= arrived_before:
            reports.popleft()
            self._has_arrived = False
        if self._has_arrived or not reports or reports[0].made_at > arrived_before:
            return
        self._has_arrived, self._view, self._said_busy = True, None, None
        received_before = reports[0].made_at - self._control_delay_s
        while self._sent and self._sent[0][0] <= received_before:
            self._sent.popleft()

    @property
    def has_reports_on_the_way(self) -> bool:
        self._arrive()
        return len(self._reports) > self._has_arrived

    @property
    def view(self) -> InstanceView | None:
        """Of the last report that has arrived."""
        self._arrive()
        if self._view is None and self._has_arrived:
            self._settle_reports()
            view = self._reports[0].view
            assert view is not None
            self._view = view()
        return self._view

    def forget_view(self) -> None:
        self._view, self._has_arrived = None, False
        self._reports.clear()

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
