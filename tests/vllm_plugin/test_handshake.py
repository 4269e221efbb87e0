"""Each step of the handshake with either side dying there: two llumlets over real sockets, with engines in miniature.

Whatever happens, at most one side goes on with the request, the survivor holds nothing more than its lease allows, and
the move's record says how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
import warnings
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from aiohttp import web
from fastapi import FastAPI

from gateway import wire
from tests.vllm.fault_proxy import Fault, HandshakeProxy, cut, dead_agents, hang, refuse
from tests.vllm_plugin.test_engine import BLOCKS, Bench
from tests.vllm_plugin.test_transfer import HOST, MemoryStore
from vllm_plugin.handshake import Refused
from vllm_plugin.settings import Settings
from vllm_plugin.transfer import AgentClient, KvAgent
from vllm_plugin.uncopied import FAILURES_MAX

pytestmark = [pytest.mark.slow]

SECRET = "s"
STEPS = ("reserve", "stage", "commit", "abort")


@pytest.fixture(scope="module")
def plugin() -> SimpleNamespace:
    pytest.importorskip("vllm", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm_plugin import compat, endpoints, engine, llumlet, outgoing, session
    return SimpleNamespace(
        compat=compat, endpoints=endpoints, engine=engine, llumlet=llumlet, outgoing=outgoing, session=session
    )


class Side:
    """One instance: a llumlet behind its routes, the engine's agent on a scheduler in miniature, a KV agent a rank."""

    def __init__(self, plugin: SimpleNamespace, instance_id: str, ranks: int = 1) -> None:
        self._plugin = plugin
        self.bench = Bench(plugin.engine)
        self.stores = [MemoryStore(blocks=64) for _ in range(ranks)]
        self.agents = [KvAgent(store, "control", HOST) for store in self.stores]
        self.store, self.kv = self.stores[0], self.agents[0]
        clients = [AgentClient(HOST, agent.port, "control") for agent in self.agents]
        data = plugin.llumlet.Data(clients, "format", None)
        settings = Settings(SECRET, None, HOST)
        description = {"block_size": 4, "requests_running_max": 4}
        self.llumlet = plugin.llumlet.Llumlet(settings, instance_id, [], None, description, data, None)
        self.llumlet.engine = self.engine
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Side]:
        application = FastAPI()
        holder = SimpleNamespace(settings=self.llumlet.settings, llumlet=self.llumlet)
        application.include_router(self._plugin.endpoints.llumlet_router(holder))
        server = uvicorn.Server(uvicorn.Config(application, host=HOST, port=0, log_level="error", lifespan="off"))
        self.llumlet.start()
        serving = asyncio.create_task(server.serve())
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            self.url = f"http://{HOST}:{server.servers[0].sockets[0].getsockname()[1]}"
            yield self
        finally:
            await self.llumlet.close()
            server.should_exit = server.force_exit = True
            await serving
            for agent in self.agents:
                await asyncio.to_thread(agent.close)

    async def engine(self, operation: str, **payload: Any) -> Any:
        answer = self.bench.agent.handle(operation, payload)
        return await asyncio.wrap_future(answer) if isinstance(answer, Future) else answer

    def end_leases(self) -> None:
        for reservation in self.bench.agent.reservations.values():
            reservation.deadline = 0.0
        for incoming in self.llumlet._incoming.values():
            incoming.deadline = 0.0


class Pair:
    """A request that decodes on ``source``, the proxy through which it is to move, and the gateway's part in it."""

    def __init__(self, plugin: SimpleNamespace, source: Side, destination: Side, proxy: HandshakeProxy) -> None:
        self.source = source
        self.destination = destination
        self.proxy = proxy
        self.gateway_comes = True
        self.comments: list[str] = []
        self.request = source.bench.request()
        self.request.max_tokens = 12  # So near its end, the source does not wait for another block.
        self.bound: Any = None
        self.parked: Any = None
        self.session = plugin.session.Session("r", None, None)
        self.session.reason = None
        detokenizer = SimpleNamespace(num_output_tokens=lambda: 1000)
        self.session.state = SimpleNamespace(num_cached_tokens=0, detokenizer=detokenizer)
        self.session.send_comment = self._on_comment
        self.session._consumer_waits, self.session._seen_tokens = True, 1000
        source.llumlet._sessions["r"] = self.session

    async def move(self) -> wire.MigrationResult:
        order = wire.MigrateOrder("r", "b", self.proxy.url)
        result: wire.MigrationResult = await self.source.llumlet.migrate(order)
        return result

    def _on_comment(self, comment: wire.StreamComment) -> None:
        self.comments.append(type(comment).__name__)
        if isinstance(comment, wire.Prebind) and self.gateway_comes:
            self._bind(comment.migration_id)
        elif isinstance(comment, wire.Unbind):
            self.unbind()

    def _bind(self, migration_id: str) -> None:
        """The gateway opens the request at the destination, whose front end takes it to the engine."""
        self.bound = self.destination.llumlet.open_session("r", migration_id, is_chat=False)
        self.bound.state, self.bound.final_only = SimpleNamespace(num_cached_tokens=0), True
        self.parked = self.destination.bench.request(resume_id=migration_id)
        self.bound.incoming.attach(self.bound)

    def unbind(self) -> None:
        """The gateway closes its reply at the destination: vLLM aborts the request there."""
        if self.bound is None:
            return
        self.destination.llumlet.close_session(self.bound)
        if self.parked in self.destination.bench.port.live:
            self.destination.bench.port.finish(self.parked)
            self.destination.bench.agent.after_finish([self.parked])
        self.bound = None

    # What has become of it.

    def assert_goes_on_at_the_source(self) -> None:
        agent = self.source.bench.agent
        assert self.source.bench.port.batch == [self.request]
        assert self.session.moved is None
        assert (agent.frozen, agent.pins) == ({}, {})
        assert "0 grants" in repr(self.source.kv)
        assert self.source.llumlet._outgoing == {}
        assert self.comments in (["Unbind"], ["Prebind", "Unbind"])

    async def assert_destination_is_empty(self) -> None:
        bench, llumlet = self.destination.bench, self.destination.llumlet
        async with asyncio.timeout(5):
            while bench.agent.reservations or llumlet._incoming or bench.port.blocks_free != BLOCKS:
                await asyncio.sleep(0.01)
        assert bench.agent.admitted == {}
        assert bench.port.live == []
        async with asyncio.timeout(5):
            while "0 sources, 0 buffers" not in repr(self.destination.kv):
                await asyncio.sleep(0.01)


@pytest.fixture
async def pair(
    plugin: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Pair]:
    """Of one rank a side, or as many as the parameter says."""
    monkeypatch.setattr(plugin.compat, "replay", lambda *_: None)
    source_ranks, destination_ranks = getattr(request, "param", (1, 1))
    source, destination = Side(plugin, "a", source_ranks), Side(plugin, "b", destination_ranks)
    async with source.running(), destination.running(), HandshakeProxy(destination.url).running() as proxy:
        yield Pair(plugin, source, destination, proxy)


async def test_without_a_fault_the_request_is_the_destinations_alone(pair: Pair) -> None:
    result = await pair.move()
    assert (result.outcome, result.bytes_sent, result.blocks_sent) == ("committed", 2 * 64, 2)
    assert pair.session.moved is not None
    assert pair.source.bench.port.live == []
    ((queued, tokens),) = pair.destination.bench.port.queued
    assert (queued, tokens) == (pair.parked, [2] * 5)
    assert (await pair.source.llumlet._make_report()).migrations_ended == wire.MigrationTotals().plus(result)
    received = [pair.destination.store.blocks[index] for index in (19, 18)]
    assert received == [pair.source.store.blocks[index] for index in (50, 51)]


@pytest.mark.parametrize("pair", [(2, 2)], indirect=True)
async def test_ranks_pair_one_to_one(pair: Pair) -> None:
    for block in (50, 51):
        pair.source.stores[1].blocks[block] = bytes([block + 100]) * 64
    result = await pair.move()
    assert (result.outcome, result.bytes_sent, result.blocks_sent) == ("committed", 2 * 2 * 64, 2)
    for source, destination in zip(pair.source.stores, pair.destination.stores, strict=True):
        assert [destination.blocks[block] for block in (19, 18)] == [source.blocks[block] for block in (50, 51)]


@pytest.mark.parametrize("pair", [(2, 1), (1, 2)], indirect=True)
async def test_with_unequal_ranks_the_request_moves_and_nothing_is_copied(pair: Pair) -> None:
    result = await pair.move()
    assert (result.outcome, result.bytes_sent) == ("committed", 0)
    assert all(store.blocks == MemoryStore(blocks=64).blocks for store in pair.destination.stores)


@pytest.mark.parametrize("pair", [(2, 2)], indirect=True)
async def test_one_rank_whose_agent_is_dead_ends_the_move(pair: Pair) -> None:
    await asyncio.to_thread(pair.source.agents[1].close)
    result = await pair.move()
    assert (result.outcome, bool(result.reason)) == ("aborted", True)
    pair.assert_goes_on_at_the_source()
    await pair.assert_destination_is_empty()


async def test_a_pair_whose_blocks_cannot_be_copied_moves_requests_without_them_for_a_while(
    pair: Pair,
) -> None:
    """F46, F62: a drain between them would else never end. One failure may be chance; later it is tried again."""
    pair.proxy.faults["reserve"] = dead_agents
    for _ in range(FAILURES_MAX):
        result = await pair.move()
        assert (result.outcome, bool(result.reason)) == ("aborted", True)
        pair.comments.clear()
    uncopied = pair.source.llumlet._uncopied
    assert (uncopied.copies("b"), uncopied.copies("c")) == (False, True)
    uncopied._failures["b"].until = 0.0
    assert uncopied.copies("b")
    uncopied._failures["b"].until = math.inf
    result = await pair.move()
    assert (result.outcome, result.bytes_sent, result.output_tokens) == ("committed", 0, 5)
    ((queued, tokens),) = pair.destination.bench.port.queued
    assert (queued, tokens) == (pair.parked, [2] * 5)


async def test_a_copy_that_comes_about_makes_good_a_failure_before_it(pair: Pair) -> None:
    pair.proxy.faults["reserve"] = dead_agents
    assert (await pair.move()).outcome == "aborted"
    pair.proxy.faults.clear()
    result = await pair.move()
    assert (result.outcome, result.bytes_sent) == ("committed", 2 * 64)
    assert pair.source.llumlet._uncopied._failures == {}


async def test_a_source_moves_so_many_requests_at_a_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_plugin.llumlet.MIGRATIONS_OUT_MAX", 1)
    pair.proxy.faults["reserve"] = hang
    moving = asyncio.create_task(pair.move())
    await asyncio.wait_for(pair.proxy.reached.wait(), 10)
    pair.source.llumlet._sessions["another"] = pair.session
    with pytest.raises(Refused, match="too many requests are moving"):
        await pair.source.llumlet.migrate(wire.MigrateOrder("another", "b", pair.proxy.url))
    pair.proxy.release.set()
    assert (await moving).outcome == "aborted"


@pytest.mark.parametrize("unknown", ["source", "destination"])
async def test_where_a_kv_format_is_not_known_nothing_is_copied(pair: Pair, unknown: str) -> None:
    side = pair.source if unknown == "source" else pair.destination
    side.llumlet._data = dataclasses.replace(side.llumlet._data, kv_format=None)
    result = await pair.move()
    assert (result.outcome, result.bytes_sent, result.blocks_sent) == ("committed", 0, 0)


async def test_what_a_commit_says_does_not_grow_with_the_sequence(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits while it is on its way."""
    sizes: dict[str, int] = {}

    def measured(step: str) -> Fault:
        async def measure(proxy: HandshakeProxy, request: web.Request, body: bytes) -> web.StreamResponse:
            sizes[step] = max(len(body), sizes.get(step, 0))
            return await proxy.forward(request, body)

        return measure

    pair.proxy.faults = {step: measured(step) for step in STEPS}
    pair.request.output_token_ids = [10**9] * 60
    pair.request.num_output_tokens, pair.request.num_tokens, pair.request.max_tokens = 60, 66, 67
    monkeypatch.setattr(pair.destination.bench.port, "ending", lambda request: None)
    result = await pair.move()
    assert (result.outcome, result.output_tokens) == ("committed", 60)
    assert sizes["reserve"] > 60 * 10, "they have gone before"
    assert sizes["commit"] < 250


def destination_dies(pair: Pair, when: str) -> Fault:
    """From then on nothing of it answers, neither its routes nor its KV agent."""

    async def fault(proxy: HandshakeProxy, request: web.Request, body: bytes) -> web.StreamResponse:
        answer: web.StreamResponse | None = None
        if when == "while it does it":
            doing = asyncio.create_task(proxy.forward(request, body))
            await asyncio.sleep(0.05)
            doing.cancel()
        elif when != "before it":
            answer = await proxy.forward(request, body)
        proxy.faults = dict.fromkeys(STEPS, cut)
        await asyncio.to_thread(pair.destination.kv.close)
        return answer if answer is not None and when == "when it has answered" else await cut(proxy, request, body)

    return fault


@pytest.mark.parametrize(
    ("step", "when"),
    [
        ("reserve", "before it"),
        ("reserve", "after it"),
        ("reserve", "when it has answered"),
        ("stage", "before it"),
        ("stage", "while it does it"),
        ("stage", "after it"),
        ("stage", "when it has answered"),
        ("commit", "before it"),
        ("commit", "while it does it"),
        ("commit", "after it"),
    ],
)
async def test_a_destination_that_dies_before_its_commit_is_known_leaves_the_request_at_the_source(
    pair: Pair, step: str, when: str
) -> None:
    pair.proxy.faults[step] = destination_dies(pair, when)
    result = await pair.move()
    assert (result.outcome, bool(result.reason)) == ("aborted", True)
    pair.assert_goes_on_at_the_source()


async def test_a_destination_that_dies_while_it_waits_for_the_gateway_leaves_the_request_at_the_source(
    pair: Pair,
) -> None:
    pair.gateway_comes = False
    pair.request.computed = 4  # So little to send that the answer waits.
    pair.proxy.faults["stage"] = destination_dies(pair, "while it does it")
    result = await pair.move()
    assert (result.outcome, result.stages) == ("aborted", 0)
    pair.assert_goes_on_at_the_source()


async def test_a_destination_that_dies_when_it_has_acknowledged_the_commit_has_had_the_request(pair: Pair) -> None:
    """The source has let go: the gateway finds nobody there, and resumes from the tokens that it has."""
    pair.proxy.faults["commit"] = destination_dies(pair, "when it has answered")
    result = await pair.move()
    assert (result.outcome, result.output_tokens) == ("committed", 5)
    assert pair.session.moved is not None
    assert pair.session.moved.output_tokens == 5
    assert pair.source.bench.port.live == []
    assert "0 grants" in repr(pair.source.kv)
    assert pair.source.bench.agent.pins == {}


@pytest.mark.parametrize("hears_of_it", [False, True])
async def test_a_destination_frees_what_it_held_whether_it_hears_of_the_abort_or_not(
    pair: Pair, hears_of_it: bool
) -> None:
    pair.proxy.faults = {"commit": refuse, **({} if hears_of_it else {"abort": cut})}
    result = await pair.move()
    assert (result.outcome, result.reason) == ("aborted", "refused by the test")
    pair.assert_goes_on_at_the_source()
    if not hears_of_it:
        pair.destination.end_leases()
    await pair.assert_destination_is_empty()


def source_dies(pair: Pair, when: str) -> tuple[Fault, asyncio.Event]:
    """From then on nothing comes from it, and its KV agent is gone; the event is set."""
    dead = asyncio.Event()

    async def fault(proxy: HandshakeProxy, request: web.Request, body: bytes) -> web.StreamResponse:
        proxy.faults = dict.fromkeys(STEPS, hang)
        if when == "after it":
            await proxy.forward(request, body)
        doing = asyncio.create_task(proxy.forward(request, body)) if when == "while it is done" else None
        if doing is not None:
            async with asyncio.timeout(5):
                while "2 buffers" not in repr(pair.destination.kv):
                    await asyncio.sleep(0.001)
        await asyncio.to_thread(pair.source.kv.close)
        if doing is not None:
            await doing  # The destination finds out on its own.
        dead.set()
        return await hang(proxy, request, body)

    return fault, dead


@pytest.mark.parametrize("gateway_closes_first", [False, True])
@pytest.mark.parametrize(
    ("step", "when"),
    [
        ("reserve", "after it"),
        ("stage", "before it"),
        ("stage", "while it is done"),
        ("stage", "after it"),
        ("commit", "before it"),
        ("commit", "after it"),
        ("abort", "before it"),
        ("abort", "after it"),
    ],
)
async def test_a_source_that_dies_leaves_nothing_at_the_destination(
    pair: Pair, step: str, when: str, gateway_closes_first: bool
) -> None:
    """The gateway sees the stream break, and resumes elsewhere from its tokens; here its prebound reply ends."""
    if when == "while it is done":
        slow_down(pair.source.store)
    if step == "abort":
        pair.proxy.faults["commit"] = refuse
    pair.proxy.faults[step], dead = source_dies(pair, when)
    moving = asyncio.create_task(pair.move())
    try:
        async with asyncio.timeout(10):
            await dead.wait()
        if step == "commit" and when == "after it":
            assert pair.destination.bench.port.queued, "it is the destination's, until the gateway says otherwise"
        if gateway_closes_first:
            pair.unbind()
            pair.destination.end_leases()
        else:
            pair.destination.end_leases()
            await asyncio.sleep(0.2)
            pair.unbind()
        await pair.assert_destination_is_empty()
        assert pair.session.moved is None, "a source that is dead says nothing"
    finally:
        pair.proxy.release.set()
        await asyncio.wait([moving])


@pytest.mark.parametrize("gateway_comes_late", [False, True])
async def test_a_source_that_dies_while_the_destination_waits_for_the_gateway_leaves_nothing_there(
    pair: Pair, gateway_comes_late: bool
) -> None:
    pair.gateway_comes = False
    pair.request.computed = 4  # So little to send that the answer waits.
    waiting: list[asyncio.Task[web.StreamResponse]] = []

    async def fault(proxy: HandshakeProxy, request: web.Request, body: bytes) -> web.StreamResponse:
        proxy.faults = dict.fromkeys(STEPS, hang)
        waiting.append(asyncio.create_task(proxy.forward(request, body)))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(pair.source.kv.close)
        return await hang(proxy, request, body)

    pair.proxy.faults["stage"] = fault
    moving = asyncio.create_task(pair.move())
    try:
        await asyncio.wait_for(pair.proxy.reached.wait(), 10)
        assert not waiting[0].done()
        if gateway_comes_late:
            (migration_id,) = pair.destination.llumlet._incoming
            pair._bind(migration_id)
        await asyncio.wait_for(waiting[0], 10)  # It gives up waiting, or has what it waited for.
        pair.unbind()
        pair.destination.end_leases()
        await pair.assert_destination_is_empty()
        assert pair.session.moved is None
    finally:
        pair.proxy.release.set()
        await asyncio.wait([moving])


def slow_down(store: MemoryStore) -> None:
    """One block after the other, so that a pull is still under way when a test looks."""
    gather = store.gather

    def slow(block_ids: Sequence[int], out: memoryview) -> None:
        time.sleep(0.3)
        gather(block_ids, out)

    store.gather = slow  # type: ignore[method-assign]


async def test_a_connection_that_had_closed_before_it_was_read_is_a_cut(plugin: SimpleNamespace) -> None:
    """aiohttp says RuntimeError then, and a stream that was on its way ended with an error of ours."""

    class Closed:
        def post(self, *_: object, **__: object) -> Closed:
            return self

        async def __aenter__(self) -> None:
            raise RuntimeError("Connection closed.")

        async def __aexit__(self, *_: object) -> None: ...

    outgoing = plugin.outgoing
    peer = outgoing.Peer(Closed(), SECRET, outgoing.Destination("b", "http://127.0.0.1:1"), "m")
    with pytest.raises(
        outgoing.Refused, match=r"the destination did not answer stage: RuntimeError\('Connection closed\.'\)"
    ):
        await peer.post("stage", {}, 1.0)
