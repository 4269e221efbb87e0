"""Requests to instances: one pool an instance, one budget for each kind of wait. What connections raise ends here."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from multidict import CIMultiDictProxy

from gateway import wire
from gateway.cluster.members import Instance
from gateway.config import Budgets
from gateway.connection import ConnectFailed, ConnectTimeout, Pool, Response, Sink
from gateway.errors import LegCut, LegError, LegNotConnected, LegTimeout, LegUnreachable, ResumeFailed, WholeReply
from gateway.tracing import NO_LEG_TRACE, LegTrace

CONNECTIONS_MAX = 4096
STOOD_STILL_S = 0.2
LAST_LOOK_S = 0.01
KEEP_ALIVE_S = 3.0
"""Below uvicorn's 5 s, so that an idle connection is not used just as the instance closes it."""

_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"}
    | {"transfer-encoding", "upgrade"}
)
_OURS_TO_SAY = frozenset({"content-length", "date", "server", wire.REQUEST_ID_HEADER})


@dataclass(frozen=True, slots=True)
class Call:
    """What every leg of one request is sent."""

    request_id: str
    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class Resumption:
    """``output_tokens``: how many tokens the reply must follow on. ``own``: we gave them to the instance ourselves."""

    resume_id: str
    output_tokens: int
    own: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: CIMultiDictProxy[str]

    @property
    def is_event_stream(self) -> bool:
        """One that can be read; a compressed one, which was not asked for, can only be passed on as it is."""
        if self.headers.get("content-encoding", "identity").strip().lower() != "identity":
            return False
        return self.headers.get("content-type", "").partition(";")[0].strip().lower() == "text/event-stream"

    def end_to_end(self) -> tuple[tuple[str, str], ...]:
        """The headers for the client: none that belong to this connection, none that the gateway says itself."""
        named = {name.strip().lower() for line in self.headers.getall("connection", []) for name in line.split(",")}
        left_out = _HOP_BY_HOP | _OURS_TO_SAY | named
        return tuple(
            (name, value)
            for name, value in self.headers.items()
            if name.lower() not in left_out and not name.lower().startswith("x-kvferry-")
        )


class Leg:
    """One instance's reply to one request, asked for when this is made.

    The asking runs in the background, so that a destination can be ready before it is needed; its bytes wait in the
    connection until they are read. ``close`` is synchronous: no cancellation can come between.
    """

    def __init__(
        self,
        instance: Instance,
        opening: asyncio.Task[Response | LegError],
        resumption: Resumption | None,
        budgets: Budgets,
        release: Callable[[], None],
    ) -> None:
        self.instance = instance
        """The life that was asked; from its head on, the one that answers."""
        self.instance_id = instance.instance_id
        self.resumption = resumption
        self.head_budget_s: float | None = None
        """Set on the leg of a request that has moved: it is decoding already, so its head and first event are due."""
        self.trace: LegTrace = NO_LEG_TRACE
        self._opening = opening
        self._budgets = budgets
        self._release = release
        self.read_at: float | None = None
        """When the last bytes of a stream came."""
        self._opened: Response | None = None
        self._reading: Response | None = None
        self._sink: Sink | None = None
        self._due_at = self._looks_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._wait: asyncio.Timeout | None = None
        self._silent_since = 0.0
        self._given_up: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent. An unread reply's connection is closed, which is how the instance learns that nobody wants it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._opening.done():
            self._opening.cancel()
        elif not self._opening.cancelled():
            opened = self._opening.result()
            if isinstance(opened, Response):
                opened.close()
        self.trace.end()
        self._release()

    async def head(self) -> Head:
        """The instance's verdict."""
        response = await self._response()
        boot_id = response.headers.get(wire.BOOT_HEADER, "")
        if self.instance.managed and wire.is_identifier(boot_id) and boot_id != self.instance.boot_id:
            self.instance = dataclasses.replace(self.instance, boot_id=boot_id)
        return Head(response.status, response.headers)

    async def read(self, sink: Sink | None = None) -> bytes:
        """The next bytes of a stream that ``sink`` does not take; empty at its end."""
        response = self._opened
        if response is None:
            response = self._opened = await self._response()
        if not response.ready:
            live = self.read_at is not None or self.head_budget_s is not None
            self._expect(self._budgets.event_gap_s if live else self._budgets.first_byte_s)
            self._reading, self._sink = response, sink
            try:
                await response.wait(None if sink is None else self._sunk)
            finally:
                self._reading = self._sink = None
        self.read_at = time.monotonic()
        try:
            return response.take()
        except OSError as error:
            raise LegCut(self.instance_id, "The instance's connection ended between events.") from error

    def _sunk(self, data: bytes) -> bool:
        if self._sink is None or not self._sink(data):
            return False
        self._expect(self._budgets.event_gap_s)
        self.read_at = self._silent_since
        return True

    def _expect(self, budget_s: float) -> None:
        """Something must come in time. A timer that is armed already is left as it is: nearly all waits end long
        before, and one timer for each event would cost as much as the event."""
        self._silent_since = now = time.monotonic()
        self._due_at = now + budget_s
        if self._timer is None or self._looks_at > self._due_at:
            self._look_at(self._due_at, now)

    def _look_at(self, due_at: float, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._looks_at = due_at
        self._timer = asyncio.get_running_loop().call_later(due_at - now, self._look)

    def _look(self) -> None:
        self._timer, now = None, time.monotonic()
        if self._reading is None:
            return
        if now < self._due_at:
            self._look_at(self._due_at, now)
        elif now > self._due_at + STOOD_STILL_S:
            # It is this gateway that stood still: what has come meanwhile is read before the next look.
            self._due_at = now
            self._look_at(now + LAST_LOOK_S, now)
        else:
            self._reading.interrupt(
                LegTimeout(self.instance_id, "The instance was silent for too long between events.")
            )

    async def whole(self, bytes_max: int) -> WholeReply:
        """The complete reply, of a bounded size."""
        response = await self._response()
        parts: list[bytes] = []
        size = 0
        with self._waiting(self._budgets.whole_reply_s, "within its reply") as wait:
            async with wait:
                while part := await response.readany():
                    self._silent_since = time.monotonic()
                    parts.append(part)
                    size += len(part)
                    if size > bytes_max:
                        raise LegCut(self.instance_id, f"The reply is larger than {bytes_max} bytes.")
        return WholeReply(response.status, Head(response.status, response.headers).end_to_end(), b"".join(parts))

    async def _response(self) -> Response:
        if not self._opening.done():
            with self._waiting(self.head_budget_s, "before its reply") as wait:
                async with wait:
                    await self._opening
        opened = self._opening.result()
        if isinstance(opened, LegError):
            raise opened
        return opened

    def silent_s(self, now: float) -> float:
        """For how long someone has waited here in vain; 0 while nobody waits, as when the client is slow to read."""
        return now - self._silent_since if self._wait is not None or self._reading is not None else 0.0

    def give_up(self, why: str) -> None:
        """Ends the wait that is under way, as if its time were up: ``why`` completes "The instance ..."."""
        if self._reading is not None:
            self._reading.interrupt(LegTimeout(self.instance_id, f"The instance {why}."))
        elif self._wait is not None and not self._wait.expired():
            self._given_up = why
            self._wait.reschedule(asyncio.get_running_loop().time())

    @contextlib.contextmanager
    def _waiting(self, budget_s: float | None, when: str) -> Iterator[asyncio.Timeout]:
        self._silent_since = time.monotonic()
        self._wait = wait = asyncio.timeout(budget_s)
        try:
            with _mapped(self.instance_id, when):
                yield wait
        except LegTimeout as error:
            if self._given_up is None:
                raise
            raise LegTimeout(self.instance_id, f"The instance {self._given_up}.") from error
        finally:
            self._wait = None


class Backend:
    def __init__(
        self, secret: str, upstream_api_key: str, budgets: Budgets, connections_max: int = CONNECTIONS_MAX
    ) -> None:
        """``connections_max``: to one instance."""
        self._secret = secret
        self._headers = [("accept-encoding", "identity")]
        if upstream_api_key:
            self._headers.append(("authorization", f"Bearer {upstream_api_key}"))
        self._budgets = budgets
        self._connections_max = connections_max
        self._pools: dict[str, tuple[Instance, Pool]] = {}
        self._legs: set[Leg] = set()

    def legs(self) -> list[Leg]:
        """All that are not closed."""
        return list(self._legs)

    def open(
        self,
        instance: Instance,
        call: Call,
        release: Callable[[], None],
        *,
        stream: bool,
        resumption: Resumption | None = None,
    ) -> Leg:
        """Begins to ask ``instance``; ``release`` is called when the leg is closed."""
        assert instance.managed or resumption is None
        headers = [*call.headers, (wire.REQUEST_ID_HEADER, call.request_id)]
        if resumption is not None:
            headers.append((wire.RESUME_HEADER, resumption.resume_id))
        head_s = self._budgets.first_byte_s if stream else self._budgets.whole_reply_s
        opening = asyncio.create_task(self._answered(instance, call, headers, head_s))

        def closed() -> None:
            self._legs.discard(leg)
            release()

        leg = Leg(instance, opening, resumption, self._budgets, closed)
        self._legs.add(leg)
        return leg

    def forget(self, is_known: Callable[[str], object]) -> None:
        """The connections to instances that are no more, unless a leg is still there."""
        busy = {leg.instance_id for leg in self._legs}
        for instance_id in [one for one in self._pools if one not in busy and not is_known(one)]:
            self._drop_pool(instance_id)

    async def put_resume(self, instance: Instance, resume_id: str, resume: wire.Resume) -> None:
        """Gives the instance the tokens that a leg opened next under ``resume_id`` is to go on from."""
        assert instance.managed
        body = json.dumps(resume.to_json()).encode()
        with _mapped(instance.instance_id, "given the tokens so far"):
            async with asyncio.timeout(self._budgets.moved_s):
                response = await self._ask(instance, "PUT", f"/llumlet/resumes/{resume_id}", body, [])
                with contextlib.closing(response):
                    if response.status >= 300:
                        raise ResumeFailed(
                            instance.instance_id,
                            f"{instance.instance_id} refused to resume: HTTP {response.status}.",
                            instance_at_fault=response.status >= 500,
                        )

    async def close(self) -> None:
        for _, pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _pool(self, instance: Instance) -> Pool:
        """The instance's own; a restarted one gets a new one. What is under way on the old one may be the new life's
        all the same: it answers at its address before anybody here has heard of it."""
        known = self._pools.get(instance.instance_id)
        if known is not None and known[0] == instance:
            return known[1]
        if known is not None:
            known[1].retire()
        pool = Pool(instance.url, self._connections_max, self._budgets.connect_s, KEEP_ALIVE_S)
        self._pools[instance.instance_id] = (instance, pool)
        return pool

    def _drop_pool(self, instance_id: str) -> None:
        _, pool = self._pools.pop(instance_id, (None, None))
        if pool is not None:
            pool.close()

    async def _answered(
        self, instance: Instance, call: Call, headers: list[tuple[str, str]], head_s: float
    ) -> Response | LegError:
        """A failure is a value here: the task may end long before anyone asks for its result, or unasked."""
        asked = time.monotonic()
        try:
            return await self._answered_once(instance, call, headers, head_s)
        except LegNotConnected as error:
            # Late by more than the limit, it is this gateway that stood still: the instance was there all the time.
            if time.monotonic() - asked < self._budgets.connect_s + STOOD_STILL_S:
                return error
        except LegError as error:
            return error
        try:
            return await self._answered_once(instance, call, headers, head_s)
        except LegError as error:
            return error

    async def _answered_once(
        self, instance: Instance, call: Call, headers: list[tuple[str, str]], head_s: float
    ) -> Response:
        with _mapped(instance.instance_id, "before its reply"):
            async with asyncio.timeout(head_s):
                return await self._ask(instance, call.method, call.path, call.body, headers)

    async def _ask(
        self, instance: Instance, method: str, path: str, body: bytes, headers: list[tuple[str, str]]
    ) -> Response:
        typed = [] if any(name == "content-type" for name, _ in headers) else [("content-type", "application/json")]
        secret = [(wire.SECRET_HEADER, self._secret)] if instance.managed else []
        return await self._pool(instance).request(method, path, [*self._headers, *secret, *typed, *headers], body)


@contextlib.contextmanager
def _mapped(instance_id: str, when: str) -> Iterator[None]:
    """Instance ids are for the operator; addresses and system errors stay out of what clients are told."""
    try:
        yield
    except ConnectFailed as error:
        unreachable = LegUnreachable(instance_id, "The instance could not be reached.")
        unreachable.is_refused = isinstance(error.__cause__, ConnectionRefusedError)
        raise unreachable from error
    except ConnectTimeout as error:
        raise LegNotConnected(instance_id, "The instance could not be reached in time.") from error
    except TimeoutError as error:
        raise LegTimeout(instance_id, f"The instance was silent for too long {when}.") from error
    except OSError as error:
        raise LegCut(instance_id, f"The instance's connection ended {when}.") from error
