"""An instance in a simulation, and what became of a request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.policy.dispatch import Sent
from gateway.policy.view import InstanceView
from gateway.policy.waiting import Room
from loadtest.sim.engine import Engine, Load, Request
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


class Node:
    """An instance, and what the gateway knows of it."""

    def __init__(
        self,
        identity: Identity,
        engine: Engine,
        clock: Callable[[], float],
        wake: Callable[[Node, float], None],
    ) -> None:
        """``wake``: call the engine's ``step`` then."""
        self.instance_id = identity.instance_id
        self.identity = identity
        self._engine = engine
        self._clock = clock
        self._wake = wake
        self.steps_at: float | None = None
        """When its step ends."""
        self.made_view: Callable[[], InstanceView] | None = None
        self.reported_at = -1.0
        """When the newest report that has arrived was made."""
        self._view: InstanceView | None = None
        self.sent: deque[tuple[float, int]] = deque()
        """Time and tokens of dispatches that the last report cannot know of."""
        self.said_busy: Room | None = None
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

    @property
    def engine(self) -> Engine:
        """As it is now. It steps ahead of time, and so has to catch up before anything is done with it."""
        if (ends_at := self._engine.catch_up(self._clock())) is not None and ends_at != self.steps_at:
            self._wake(self, ends_at)
        return self._engine

    @property
    def engine_ahead(self) -> Engine:
        """Without that: to be stepped, and to be asked for its load."""
        return self._engine

    def load(self) -> Load:
        return self._engine.load(self._clock())

    @property
    def view(self) -> InstanceView | None:
        """Of the last report that has arrived; made when it is looked at, which few are."""
        if self.made_view is not None:
            self._view, self.made_view = self.made_view(), None
        return self._view

    def forget_view(self) -> None:
        self._view = self.made_view = None

    def on_its_way(self) -> Sent:
        if not self.sent:
            return _NOTHING
        return Sent(len(self.sent), sum(count for _, count in self.sent), len(self.sent))


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
