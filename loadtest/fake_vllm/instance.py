"""One fake server's engine in real time, and the replies that are made from its steps."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway import wire
from loadtest.fake_vllm.faults import Faults
from loadtest.sim.engine import Engine, Outcome, Request

STARTS_KEPT = 1024


@dataclass(eq=False, slots=True)
class Reply:
    """A request here, and what is still to be sent of it. The writer waits for ``changed``."""

    request_id: str
    """The gateway's, or one of our own."""
    request: Request
    is_stream: bool
    is_finished: bool = False
    submitted_at_step: int = 0
    """The number of the engine's last step before the request was queued."""
    comments: list[wire.StreamComment] = field(default_factory=list)
    moved: wire.Moved | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def comment(self, comment: wire.StreamComment) -> None:
        self.comments.append(comment)
        self.changed.set()

    def finish(self) -> None:
        self.is_finished = True
        self.changed.set()

    def leave(self, moved: wire.Moved) -> None:
        """The request goes on elsewhere: the reply ends behind the tokens so far."""
        self.moved = moved
        self.changed.set()


@dataclass(frozen=True, slots=True)
class Start:
    """A request has left the engine's queue for its first step here. It passed ``steps_missed`` of them there."""

    request_id: str
    steps_missed: int


class Instance:
    """Runs the engine while there is anything to do; idle, it costs nothing."""

    def __init__(self, engine: Engine, faults: Faults, die: Callable[[], None]) -> None:
        self.engine = engine
        self.faults = faults
        self.started_at = time.time()
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.preemptions = 0
        self.boundaries = asyncio.Condition()
        """Notified after each step."""
        self.starts: deque[Start] = deque(maxlen=STARTS_KEPT)
        """The last ones."""
        self._die = die
        self._replies: dict[Request, Reply] = {}
        self._numbers = itertools.count()
        self._woken = asyncio.Event()
        self._released = asyncio.Event()
        """Set when the instance hangs no longer."""

    def __repr__(self) -> str:
        return f"<Instance {self.engine}>"

    def new_request_id(self, request_id: str) -> str:
        """The engine's own: the same request may come again before it has let go of the last one."""
        return f"{request_id}-{next(self._numbers):08x}"

    def submit(self, reply: Reply) -> None:
        """Raises EngineError."""
        reply.submitted_at_step = self.engine.steps
        self.engine.add(reply.request)
        self.follow(reply)

    def follow(self, reply: Reply) -> None:
        """The engine has taken the reply's request."""
        self._replies[reply.request] = reply
        self.wake()

    def close(self, reply: Reply) -> None:
        """Nobody reads the reply any more."""
        if self._replies.pop(reply.request, None) is not None and self.engine.get(reply.request.request_id):
            self.engine.abort(reply.request.request_id)
            self.wake()

    def replies(self) -> list[Reply]:
        return list(self._replies.values())

    def wake(self) -> None:
        """Something has changed: there may be a step to begin."""
        self._woken.set()

    # Faults.

    def set_faults(self, changes: object) -> None:
        """Raises FaultError."""
        self.faults.set(changes)
        self._suffer()

    @property
    def hangs(self) -> bool:
        return self.faults.hang_after is not None and self.engine.steps >= self.faults.hang_after

    async def unless_hanging(self) -> None:
        """Returns when the instance does not hang, or no longer."""
        while self.hangs:
            await self._released.wait()

    def _suffer(self) -> None:
        if self.faults.die_at_step is not None and self.engine.steps >= self.faults.die_at_step:
            self._die()
        if self.hangs:
            self._released.clear()
        else:
            self._released.set()

    # Time.

    async def run(self) -> None:
        """For as long as the server lives."""
        loop = asyncio.get_running_loop()
        self._suffer()
        while True:
            await self.unless_hanging()
            self._woken.clear()
            outcome = self.engine.step(loop.time())
            if outcome.sampled or outcome.admitted or outcome.preempted:
                self._tell(outcome)
                self._suffer()
            async with self.boundaries:
                self.boundaries.notify_all()
            if outcome.ends_at is None:
                await self._woken.wait()
            else:
                await asyncio.sleep(max(0.0, outcome.ends_at - loop.time()))

    def _tell(self, outcome: Outcome) -> None:
        self.output_tokens += len(outcome.sampled)
        self.preemptions += len(outcome.preempted)
        self.prompt_tokens += sum(request.prompt_tokens for request in outcome.admitted)
        for request in outcome.admitted:
            if (reply := self._replies.get(request)) is not None and not request.preemptions:
                self.starts.append(Start(reply.request_id, self.engine.steps - reply.submitted_at_step - 1))
        for request in outcome.finished:
            if (reply := self._replies.pop(request, None)) is not None:
                reply.finish()
        for request in outcome.sampled:
            if (reply := self._replies.get(request)) is not None:
                reply.changed.set()

    async def settled(self, request: Request) -> bool:
        """Waits for the step boundary at which a frozen request may leave; False if it has ended before."""
        async with self.boundaries:
            while self.engine.get(request.request_id) is request:
                if self.engine.is_settled(request.request_id):
                    return True
                await self.boundaries.wait()
        return False
