"""Random requests, moves, drains and deaths, and the judgement of each reply. Seeded: the same draws every time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from loadtest.client import Client
from loadtest.comparison import Heard, honest_error_differences, stream_differences, whole_differences
from loadtest.kinds import Kind
from loadtest.processes import ProcessFailed
from loadtest.stack import Instance, StackFailed

LEAVES_SHARE = 0.06
SALTED_SHARE = 0.8
"""Of requests that share no KV with any other, so that a move has something to copy."""
MOVES_AT_ONCE_MAX = 4
DRAIN_EVERY_S = 17.0
DRAINED_S = 3.0
SETTLE_S = 180.0
"""For the requests that are under way when the time is up."""
RECENT_WAIT_S = 2.0
SEEN_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Draw:
    """One request's luck."""

    index: int
    kind: Kind
    salt: str | None
    leaves_after_s: float | None


class Choices:
    """All draws from one seed. Each has a number of its own, so that none depends on how fast others were."""

    def __init__(self, seed: int, kinds: Sequence[Kind]) -> None:
        self.seed = seed
        self._kinds = list(kinds)

    def request(self, index: int) -> Draw:
        """Every kind once in each round of requests, in a new order each round."""
        turn, position = divmod(index, len(self._kinds))
        order = list(self._kinds)
        self._random("order", turn).shuffle(order)
        luck = self._random("request", index)
        kind = order[position]
        salted = luck.random() < SALTED_SHARE and "cache_salt" not in kind.body
        leaves = luck.random() < LEAVES_SHARE
        return Draw(
            index,
            kind,
            f"{self.seed}-{index}" if salted else None,
            luck.uniform(0.1, 3.0) if leaves else None,
        )

    def fractions(self, purpose: str, index: int) -> tuple[float, float]:
        """Two numbers in [0, 1): which request moves and where to, or which server."""
        luck = self._random(purpose, index)
        return luck.random(), luck.random()

    def _random(self, purpose: str, index: int) -> random.Random:
        return random.Random(f"{self.seed}/{purpose}/{index}")


def pick(fraction: float, items: Sequence[Any]) -> Any:
    return items[int(fraction * len(items))]


@dataclass(frozen=True, slots=True)
class Plan:
    seconds: float
    streams: int = 4
    move_every_s: float = 1.0
    kill_pause_s: float | None = None
    """A server is killed so long after the last one was back; ``None``: none is."""


@dataclass(slots=True)
class Finding:
    """A reply that is not what it should be."""

    kind: str
    index: int
    request_id: str
    differences: list[str]
    moves: list[dict[str, Any]]
    heard: Heard
    twin: Heard
    explanation: dict[str, Any] | None = None


@dataclass(slots=True)
class KindCounts:
    requests: int = 0
    equal: int = 0
    left: int = 0
    honest_errors: int = 0
    different: int = 0
    migrated: int = 0
    resumed: int = 0


@dataclass
class Tally:
    """What has happened in one phase."""

    kinds: dict[str, KindCounts] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    orders: Counter[str] = field(default_factory=Counter)
    """Of moves: committed, or why not."""
    bytes_sent: int = 0
    blocks_sent: int = 0
    drains: int = 0
    kills: list[tuple[float, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What went wrong beside the requests, such as a drain that nobody saw."""

    def of(self, kind: Kind) -> KindCounts:
        return self.kinds.setdefault(kind.name, KindCounts())

    def total(self, name: str) -> int:
        return sum(getattr(counts, name) for counts in self.kinds.values())

    def line(self) -> str:
        """For the progress."""
        words = ("equal", "left", "honest_errors", "different", "migrated", "resumed")
        counts = "  ".join(f"{self.total(word)} {word.replace('_', ' ')}" for word in words)
        return f"{counts}  {self.drains} drains  {len(self.kills)} kills"


async def run_alone(client: Client, kind: Kind, url: str) -> Heard:
    """A request of a server itself or of the gateway, which nobody moves. ``ValueError``: the reply is not complete."""
    heard = await ask(client, url + kind.path, kind.request(client.stack.model))
    problem = heard.broken or heard.strange or heard.errors
    if heard.status != 200 or problem or (kind.stream and heard.done != 1):
        raise ValueError(f"{kind.name}: status {heard.status}, {problem or heard.whole!r}")
    return heard


async def ask(client: Client, url: str, request: Mapping[str, Any], leaves_after_s: float | None = None) -> Heard:
    """Send a request and note all that comes; never raises for what servers do."""
    heard = Heard()
    try:
        async with asyncio.timeout(leaves_after_s):
            await _listen(client, url, request, heard)
    except TimeoutError:
        heard.left = True
    except httpx.HTTPError as error:
        heard.broken = repr(error)
    return heard


async def _listen(client: Client, url: str, request: Mapping[str, Any], heard: Heard) -> None:
    async with client.http.stream("POST", url, json=request, headers=client.headers()) as response:
        heard.status = response.status_code
        heard.request_id = response.headers.get("x-request-id", "")
        if response.status_code == 200 and request["stream"]:
            async for line in response.aiter_lines():
                heard.take_line(line)
        else:
            await response.aread()
            heard.whole = response.json()


def judge(kind: Kind, twin: Heard, heard: Heard, *, deaths: int) -> tuple[str, list[str]]:
    """The verdict (a name in ``KindCounts``), and what is wrong.

    ``deaths``: of servers, in this request's time. After one, a stream that cannot be resumed may say that it failed;
    after two, any, since a request that comes together with two deaths is not given to a third server.
    """
    if heard.left and (heard.status is None or not kind.stream):
        return "left", []
    if not kind.stream:
        differences = whole_differences(twin, heard)
    elif heard.errors and deaths > (1 if kind.resumes else 0):
        differences = honest_error_differences(twin, heard)
        return ("different" if differences else "honest_errors"), differences
    else:
        differences = stream_differences(twin, heard)
    if differences:
        return "different", differences
    return ("left" if heard.left else "equal"), []


class Traffic:
    """One phase of it, on a stack that is up."""

    def __init__(
        self, client: Client, choices: Choices, twins: Mapping[str, Heard], on_finding: Callable[[Finding], None]
    ) -> None:
        self.tally = Tally()
        self._client = client
        self._choices = choices
        self._twins = twins
        self._on_finding = on_finding
        self._next_index = 0
        self._whole = asyncio.Lock()
        """Held while an instance is draining or dead, so that there is always another one."""

    async def run(self, plan: Plan, on_second: Callable[[str], None] = lambda line: None) -> None:
        """Until the plan's time is up and every request has ended."""
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(self._requests(stop)) for _ in range(plan.streams)]
            disturbances = [
                group.create_task(self._moves(stop, plan.move_every_s)),
                group.create_task(self._drains(stop)),
            ]
            if plan.kill_pause_s is not None:
                disturbances.append(group.create_task(self._kills(stop, plan.kill_pause_s)))
            deadline = time.monotonic() + plan.seconds
            while time.monotonic() < deadline:
                await asyncio.sleep(1.0)
                on_second(self.tally.line())
            stop.set()
            _, hanging = await asyncio.wait([*workers, *disturbances], timeout=SETTLE_S)
            if hanging:
                self.tally.problems.append(f"{len(hanging)} requests or moves did not end in {SETTLE_S:.0f} s")
                for task in hanging:
                    task.cancel()

    async def _requests(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            draw = self._choices.request(self._next_index)
            self._next_index += 1
            await self._request(draw)

    async def _request(self, draw: Draw) -> None:
        kind, twin = draw.kind, self._twins[draw.kind.name]
        request = kind.request(self._client.stack.model)
        if draw.salt is not None:
            request["cache_salt"] = draw.salt
        started_at = time.monotonic()
        heard = await ask(self._client, self._client.url + kind.path, request, draw.leaves_after_s)
        deaths = sum(at >= started_at for at, _ in self.tally.kills)
        verdict, differences = judge(kind, twin, heard, deaths=deaths)
        moves = await self._moves_of(heard.request_id)
        counts = self.tally.of(kind)
        counts.requests += 1
        setattr(counts, verdict, getattr(counts, verdict) + 1)
        counts.migrated += sum(move["kind"] == "migrated" for move in moves)
        counts.resumed += sum(move["kind"] == "resumed" for move in moves)
        if differences:
            finding = Finding(kind.name, draw.index, heard.request_id, differences, moves, heard, twin)
            self.tally.findings.append(finding)
            self._on_finding(finding)

    async def _moves_of(self, request_id: str) -> list[dict[str, Any]]:
        """The gateway's own record, which is complete a moment after the reply."""
        deadline = time.monotonic() + RECENT_WAIT_S
        while request_id and time.monotonic() < deadline:
            for entry in (await self._admin("requests"))["recent"]:
                if entry["id"] == request_id:
                    return list(entry["moves"])
            await asyncio.sleep(0.05)
        return []

    async def _admin(self, name: str) -> dict[str, Any]:
        client = self._client
        answer = await client.http.get(f"{client.url}/admin/{name}", headers=client.admin_headers())
        answered: dict[str, Any] = answer.json()
        return answered

    async def _moves(self, stop: asyncio.Event, every_s: float) -> None:
        at_once = asyncio.Semaphore(MOVES_AT_ONCE_MAX)
        async with asyncio.TaskGroup() as group:
            async for index in _ticks(stop, every_s):
                await at_once.acquire()
                group.create_task(self._move(index)).add_done_callback(lambda _: at_once.release())

    async def _move(self, index: int) -> None:
        which, where_to = self._choices.fractions("move", index)
        running = [entry for entry in (await self._admin("requests"))["requests"] if entry["instance"]]
        if not running:
            self.tally.orders["nothing to move"] += 1
            return
        entry = pick(which, running)
        others = [one.id for one in self._client.stack.instances if one.id != entry["instance"]]
        try:
            answer = await self._client.move(entry["id"], pick(where_to, others))
        except httpx.HTTPError as error:
            self.tally.problems.append(f"an order to migrate was not answered: {error!r}")
            return
        self.tally.orders[outcome_of(answer)] += 1
        if answer.get("outcome") == "committed":
            self.tally.bytes_sent += answer["bytes_sent"]
            self.tally.blocks_sent += answer["blocks_sent"]

    async def _drains(self, stop: asyncio.Event) -> None:
        async for index in _ticks(stop, DRAIN_EVERY_S):
            async with self._whole:
                if stop.is_set():
                    return
                which, _ = self._choices.fractions("drain", index)
                try:
                    async with self._client.only(pick(which, self._client.stack.instances).id):
                        self.tally.drains += 1
                        await asyncio.sleep(DRAINED_S)
                except (TimeoutError, httpx.HTTPError) as error:
                    self.tally.problems.append(f"a drain failed: {error!r}")

    async def _kills(self, stop: asyncio.Event, pause_s: float) -> None:
        async for index in _ticks(stop, pause_s):
            async with self._whole:
                if stop.is_set():
                    return
                which, _ = self._choices.fractions("kill", index)
                victim = await self._victim(which)
                boot_id = (await self._instances())[victim.id]["boot_id"]
                os.killpg(victim.pid, signal.SIGKILL)
                self.tally.kills.append((time.monotonic(), victim.id))
                try:
                    await self._client.stack.restart(victim.id)
                    await self._until_seen(victim.id, boot_id)
                except (StackFailed, ProcessFailed, TimeoutError) as error:
                    self.tally.problems.append(f"{victim.id} could not be started again: {error}")
                    return

    async def _victim(self, which: float) -> Instance:
        """One that has something to lose, if any has."""
        stack = self._client.stack
        running = [entry["instance"] for entry in (await self._admin("requests"))["requests"] if entry["instance"]]
        return stack.instance(pick(which, running)) if running else stack.instances[0]

    async def _until_seen(self, instance_id: str, boot_id_before: str) -> None:
        """Until the gateway knows the new one, and sends requests there."""
        async with asyncio.timeout(SEEN_TIMEOUT_S):
            while True:
                entry = (await self._instances()).get(instance_id, {"boot_id": boot_id_before})
                if entry["boot_id"] != boot_id_before and entry["healthy"] and not entry["stale"]:
                    return
                await asyncio.sleep(0.2)

    async def _instances(self) -> dict[str, dict[str, Any]]:
        return {entry["id"]: entry for entry in (await self._admin("instances"))["instances"]}


def outcome_of(answer: Mapping[str, Any]) -> str:
    """``committed``, or the reason in a form that can be counted."""
    if answer.get("outcome") == "committed":
        return "committed"
    reason = answer.get("reason") or (answer.get("error") or {}).get("message") or "unknown"
    words = [
        "N" if any(letter.isdigit() for letter in word) else word for word in str(reason).partition("(")[0].split()
    ]
    return " ".join(words)[:160]


async def _ticks(stop: asyncio.Event, every_s: float) -> AsyncIterator[int]:
    """A number every so often, until it is time to stop."""
    index = 0
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(every_s):
                await stop.wait()
                return
        yield index
        index += 1
