"""Requests to instances: one pool an instance, one budget for each kind of wait. aiohttp's exceptions end here."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp
from multidict import CIMultiDictProxy

from gateway import wire
from gateway.cluster.members import Instance
from gateway.config import Budgets
from gateway.errors import LegCut, LegError, LegNotConnected, LegTimeout, LegUnreachable, ResumeFailed, WholeReply

CONNECTIONS_MAX = 4096
LARGE_BODY_BYTES = 256 * 1024
STOOD_STILL_S = 0.2
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
        return tuple(
            (name, value)
            for name, value in self.headers.items()
            if name.lower() not in _HOP_BY_HOP | _OURS_TO_SAY | named and not name.lower().startswith("x-kvferry-")
        )


class Leg:
    """One instance's reply to one request, asked for when this is made.

    The asking runs in the background, so that a destination can be ready before it is needed; its bytes wait in the
    connection until they are read. ``close`` is synchronous: no cancellation can come between.
    """

    def __init__(
        self,
        instance: Instance,
        opening: asyncio.Task[aiohttp.ClientResponse | LegError],
        resumption: Resumption | None,
        budgets: Budgets,
        release: Callable[[], None],
    ) -> None:
        self.instance = instance
        self.instance_id = instance.instance_id
        self.resumption = resumption
        self.head_budget_s: float | None = None
        """Set on the leg of a request that has moved: it is decoding already, so its head and first event are due."""
        self._opening = opening
        self._budgets = budgets
        self._release = release
        self._read_once = False
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
        if not self._opening.done():
            self._opening.cancel()
        elif not self._opening.cancelled():
            opened = self._opening.result()
            if isinstance(opened, aiohttp.ClientResponse):
                opened.close()
        self._release()

    async def head(self) -> Head:
        """The instance's verdict."""
        response = await self._response()
        return Head(response.status, response.headers)

    async def read(self) -> bytes:
        """The next bytes of a stream; empty at its end."""
        response = await self._response()
        live = self._read_once or self.head_budget_s is not None
        budget_s = self._budgets.event_gap_s if live else self._budgets.first_byte_s
        try:
            with self._waiting(budget_s, "between events") as wait:
                async with wait:
                    data = await response.content.readany()
        except LegCut:
            if not (data := _arrived(response.content)):
                raise
        self._read_once = True
        return data

    async def whole(self, bytes_max: int) -> WholeReply:
        """The complete reply, of a bounded size."""
        response = await self._response()
        parts: list[bytes] = []
        size = 0
        with self._waiting(self._budgets.whole_reply_s, "within its reply") as wait:
            async with wait:
                while part := await response.content.readany():
                    self._silent_since = time.monotonic()
                    parts.append(part)
                    size += len(part)
                    if size > bytes_max:
                        raise LegCut(self.instance_id, f"The reply is larger than {bytes_max} bytes.")
        return WholeReply(response.status, Head(response.status, response.headers).end_to_end(), b"".join(parts))

    async def _response(self) -> aiohttp.ClientResponse:
        if not self._opening.done():
            with self._waiting(self.head_budget_s, "before its reply") as wait:
                async with wait:
                    await asyncio.wait({self._opening})
        opened = self._opening.result()
        if isinstance(opened, LegError):
            raise opened
        return opened

    def silent_s(self, now: float) -> float:
        """For how long someone has waited here in vain; 0 while nobody waits, as when the client is slow to read."""
        return now - self._silent_since if self._wait is not None else 0.0

    def give_up(self, why: str) -> None:
        """Ends the wait that is under way, as if its time were up: ``why`` completes "The instance ..."."""
        if self._wait is not None and not self._wait.expired():
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
        self._headers = {wire.SECRET_HEADER: secret, "accept-encoding": "identity", "content-type": "application/json"}
        if upstream_api_key:
            self._headers["authorization"] = f"Bearer {upstream_api_key}"
        self._budgets = budgets
        self._connections_max = connections_max
        self._pools: dict[str, tuple[Instance, aiohttp.ClientSession]] = {}
        self._closing: set[asyncio.Task[None]] = set()
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
        headers = [*call.headers, (wire.REQUEST_ID_HEADER, call.request_id)]
        if resumption is not None:
            headers.append((wire.RESUME_HEADER, resumption.resume_id))
        head_s = self._budgets.first_byte_s if stream else self._budgets.whole_reply_s
        opening = asyncio.create_task(self._post(instance, call.path, call.body, headers, head_s))

        def closed() -> None:
            self._legs.discard(leg)
            release()

        leg = Leg(instance, opening, resumption, self._budgets, closed)
        self._legs.add(leg)
        return leg

    async def put_resume(self, instance: Instance, resume_id: str, resume: wire.Resume) -> None:
        """Gives the instance the tokens that a leg opened next under ``resume_id`` is to go on from."""
        url = f"{instance.url}/llumlet/resumes/{resume_id}"
        with _mapped(instance.instance_id, "given the tokens so far"):
            async with asyncio.timeout(self._budgets.moved_s):
                async with self._pool(instance).put(url, data=json.dumps(resume.to_json())) as response:
                    if response.status >= 300:
                        raise ResumeFailed(
                            instance.instance_id,
                            f"{instance.instance_id} refused to resume: HTTP {response.status}.",
                            instance_at_fault=response.status >= 500,
                        )

    async def close(self) -> None:
        for _, pool in self._pools.values():
            await pool.close()
        self._pools.clear()
        await asyncio.gather(*self._closing)

    def _pool(self, instance: Instance) -> aiohttp.ClientSession:
        """The instance's own; a restarted one gets a new one, for nothing of its old connections is of use."""
        known = self._pools.get(instance.instance_id)
        if known is not None and known[0] == instance:
            return known[1]
        if known is not None:
            closing = asyncio.create_task(known[1].close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        pool = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections_max, keepalive_timeout=KEEP_ALIVE_S),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, connect=self._budgets.connect_s),
            auto_decompress=False,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent",),
        )
        self._pools[instance.instance_id] = (instance, pool)
        return pool

    async def _post(
        self, instance: Instance, path: str, body: bytes, headers: list[tuple[str, str]], head_s: float
    ) -> aiohttp.ClientResponse | LegError:
        """A failure is a value here: the task may end long before anyone asks for its result, or unasked."""
        asked = time.monotonic()
        try:
            return await self._post_once(instance, path, body, headers, head_s)
        except LegNotConnected as error:
            # Late by more than the limit, it is this gateway that stood still: the instance was there all the time.
            if time.monotonic() - asked < self._budgets.connect_s + STOOD_STILL_S:
                return error
        except LegError as error:
            return error
        try:
            return await self._post_once(instance, path, body, headers, head_s)
        except LegError as error:
            return error

    async def _post_once(
        self, instance: Instance, path: str, body: bytes, headers: list[tuple[str, str]], head_s: float
    ) -> aiohttp.ClientResponse:
        with _mapped(instance.instance_id, "before its reply"):
            async with asyncio.timeout(head_s):
                return await self._pool(instance).post(
                    instance.url + path, data=_payload(body), headers=headers, allow_redirects=False
                )


def _payload(body: bytes) -> bytes | io.BytesIO:
    """aiohttp writes a file piece by piece, and bytes at once: a large body would hold up everyone else's stream."""
    return body if len(body) < LARGE_BODY_BYTES else io.BytesIO(body)


def _arrived(content: aiohttp.StreamReader) -> bytes:
    """What came in before a connection failed. aiohttp has no public way to it, and would drop good events."""
    return content._read_nowait(-1) if content._buffer else b""


@contextlib.contextmanager
def _mapped(instance_id: str, when: str) -> Iterator[None]:
    """Instance ids are for the operator; addresses and system errors stay out of what clients are told."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        raise LegUnreachable(instance_id, "The instance could not be reached.") from error
    except aiohttp.ConnectionTimeoutError as error:
        raise LegNotConnected(instance_id, "The instance could not be reached in time.") from error
    except TimeoutError as error:
        raise LegTimeout(instance_id, f"The instance was silent for too long {when}.") from error
    except (aiohttp.ClientError, RuntimeError, OSError) as error:  # aiohttp: RuntimeError("Connection closed.")
        raise LegCut(instance_id, f"The instance's connection ended {when}.") from error
