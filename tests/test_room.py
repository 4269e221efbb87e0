"""Requests for which no instance has room wait at the gateway: in order, within bounds, and not for Redis."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import wire
from gateway.cluster import keys
from gateway.cluster.order import Ask, Entry, SharedOrder
from gateway.cluster.store import Store
from gateway.config import Budgets, Limits
from gateway.counters import Counters
from gateway.serving import waiting
from gateway.wire import PriorityClass
from loadtest.redis_server import RedisServer
from tests.conftest import Running, StartGateway, chat_body, until, until_true
from tests.fake_instance import MODEL, Exchange, FakeInstance, Generation, instances, metrics_page

PATIENT = Budgets(header_grace_s=0.05, instance_wait_s=15, order_s=15)
HIGH, NORMAL, LOW = sorted(PriorityClass)


class Engine:
    """Lets a fake run so many requests at a time, each until it is let go, and refuse those that are to start now."""

    def __init__(self, fake: FakeInstance, places: int = 1, *, says_room: int | None = None) -> None:
        """``says_room``: what its reports claim instead of the truth."""
        self.fake = fake
        self.places = places
        self.says_room = says_room
        self.running: dict[str, asyncio.Event] = {}
        self.started: list[str] = []
        self.refused: list[str] = []
        fake.script = self.run
        self.report()

    def report(self) -> None:
        room = self.places - len(self.running) if self.says_room is None else self.says_room
        running = {"requests_running": len(self.running), "requests_running_max": self.places}
        self.fake.report_changes = {"room_blocks": 100 * (room > 0), "room_places": room, **running}

    async def run(self, exchange: Exchange) -> None:
        name = exchange.request.json.get("user", "")
        if len(self.running) >= self.places and exchange.request.headers.get(wire.ADMIT_HEADER) == wire.ADMIT_NOW:
            self.refused.append(name)
            await exchange.json(wire.BUSY_STATUS, {}, {wire.BUSY_HEADER: wire.encode_busy_header(wire.Busy(1, 0, 0))})
            return
        let_go = self.running[name] = asyncio.Event()
        self.started.append(name)
        self.report()
        going, ending = asyncio.create_task(exchange.client_gone.wait()), asyncio.create_task(let_go.wait())
        try:
            await asyncio.wait({going, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            going.cancel()
            ending.cancel()
            del self.running[name]
            self.report()
        generation = Generation(exchange.request)
        if exchange.request.json.get("stream"):
            await exchange.start()
            await exchange.send(*generation.rest())
            await exchange.finish()
        else:
            await exchange.json(200, generation.whole())

    def let_go(self, *names: str) -> None:
        for name in names or list(self.running):
            self.running[name].set()


def ask(running: Running, name: str, priority: PriorityClass = NORMAL, **fields: Any) -> asyncio.Task[httpx.Response]:
    body = chat_body(user=name, **fields)
    headers = {"x-kvferry-priority": priority.word}
    return asyncio.create_task(running.client.post("/v1/chat/completions", json=body, headers=headers))


def in_line(running: Running) -> int:
    return sum(running.gateway.waiting.waiting_by_class().values())


async def heard(running: Running, *engines: Engine) -> None:
    """The gateway has a report of what each engine says now."""
    members = running.gateway.members

    def said() -> bool:
        reports = {member.instance.instance_id: member.report for member in members.all()}
        return all(
            (report := reports.get(one.fake.instance_id)) is not None
            and report.room_blocks is not None  # Those before it say nothing of room.
            and report.room_places == one.fake.report_changes["room_places"]
            for one in engines
        )

    await until(said)


async def wait_in_turn(running: Running, *people: tuple[str, PriorityClass]) -> list[asyncio.Task[httpx.Response]]:
    """Each once the one before it waits."""
    tasks: list[asyncio.Task[httpx.Response]] = []
    for name, priority in people:
        before = in_line(running)
        tasks.append(ask(running, name, priority))
        await until(lambda before=before: in_line(running) == before + 1)  # type: ignore[misc]
    return tasks


async def drained(engine: Engine, count: int, *gateways: Running) -> list[str]:
    """Lets each request go once it has started; the order in which they did. ``gateways``: each knows then that the
    engine is full, and all that have not started wait, with no answer that they are to wait still on its way."""
    for index in range(count):
        await until(lambda index=index: len(engine.started) > index)  # type: ignore[misc]
        for running in gateways:
            await until_true(lambda index=index: told(running, count - index - 1))  # type: ignore[misc]  # noqa: B023
            await heard(running, engine)
        if engine.started[index] in engine.running:
            engine.let_go(engine.started[index])
        await until(lambda index=index: engine.started[index] not in engine.running)  # type: ignore[misc]
    return engine.started


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(log=tmp_path / "redis.log", environment={"PATH": os.environ["PATH"]}) as server:
        yield server


async def test_with_room_a_request_starts_at_once_and_redis_is_not_asked(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, budgets=PATIENT) as running:
        engine = Engine(a, places=4)
        await heard(running, engine)
        tasks = [ask(running, name, stream=True) for name in ("r1", "r2", "r3")]
        await until(lambda: len(engine.started) == 3)
        engine.let_go()
        assert [(await task).status_code for task in tasks] == [200] * 3
        assert {one.headers[wire.ADMIT_HEADER] for one in a.received} == {wire.ADMIT_NOW}
        assert running.gateway.counters.get("waiting_looks") == 0
        assert running.gateway.counters.get("requests_waited") == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_without_room_a_request_waits_here_until_one_ends(path: str, start_gateway: StartGateway) -> None:
    """Also one that is only passed on, of which the instance is not asked whether it can start."""
    async with instances("a") as (a,), start_gateway(a, budgets=PATIENT) as running:
        engine = Engine(a)
        first = ask(running, "first")
        await until(lambda: engine.running)
        await heard(running, engine)
        second = asyncio.create_task(running.client.post(path, json=chat_body(user="second", input="hello")))
        await until(lambda: in_line(running))
        metrics = (await running.client.get("/metrics")).text
        assert 'kvferry_requests_waiting{priority="normal"} 1.0' in metrics
        assert (len(a.received), engine.refused) == (1, []), "nothing was sent there to wait"
        engine.let_go("first")
        await until(lambda: "second" in engine.running)
        engine.let_go("second")
        assert [(await one).status_code for one in (first, second)] == [200, 200]
        assert in_line(running) == 0
        assert running.gateway.counters.distribution("wait_seconds", priority="normal").sum > 0


@pytest.mark.parametrize("stream", [True, False])
async def test_one_that_says_busy_is_not_at_fault_and_the_next_best_is_tried(
    stream: bool, start_gateway: StartGateway
) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b, budgets=PATIENT) as running:
        full, free = Engine(a, places=0, says_room=1), Engine(b)
        await heard(running, full, free)
        asked = ask(running, "r", stream=stream)
        await until(lambda: free.running)
        free.let_go()
        assert (await asked).status_code == 200
        assert full.refused == ["r"]
        counters = running.gateway.counters
        assert counters.get("busy_answers", instance_id="a") == 1
        assert counters.get("legs_lost") == 0
        assert running.gateway.dispatcher.in_flight("a") == 0


async def test_an_instance_whose_reports_promise_too_much_is_not_stormed(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, budgets=PATIENT) as running:
        engine = Engine(a, places=0, says_room=1)
        await heard(running, engine)
        asked = ask(running, "r")
        sequence = a._sequence
        await until(lambda: len(engine.refused) >= 5)
        assert a._sequence - sequence >= 4, "once a report at most"
        engine.places = 1
        await until(lambda: engine.running, 10)
        engine.let_go()
        assert (await asked).status_code == 200


async def test_who_waits_is_served_by_class_and_then_by_age(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, budgets=PATIENT) as running:
        engine = Engine(a)
        first = ask(running, "first")
        await until(lambda: engine.running)
        await heard(running, engine)
        tasks = await wait_in_turn(running, ("n1", NORMAL), ("l", LOW), ("h", HIGH), ("n2", NORMAL))
        assert await drained(engine, 5) == ["first", "h", "n1", "n2", "l"]
        assert {(await task).status_code for task in [first, *tasks]} == {200}
        assert engine.refused == []


@pytest.mark.slow
async def test_two_gateways_over_one_redis_keep_one_order(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "YIELD_S", 60)
    monkeypatch.setattr(waiting, "LEAVE_S", 1.0)  # Who is told busy is not overtaken, however slow the answer.
    async with (
        instances("a") as (a,),
        start_gateway(a, budgets=PATIENT) as one,
        start_gateway(a, budgets=PATIENT) as two,
    ):
        engine = Engine(a)
        tasks = [ask(one, "first")]
        await until(lambda: engine.running)
        await heard(one, engine)
        await heard(two, engine)
        turns = [(one, "n1", NORMAL), (two, "n2", NORMAL), (two, "l1", LOW), (one, "h1", HIGH), (one, "n3", NORMAL)]
        for running, name, priority in [*turns, (two, "h2", HIGH)]:
            tasks += await wait_in_turn(running, (name, priority))
            await until_true(lambda: told(one, len(tasks) - 1))  # noqa: B023
        order = await drained(engine, 7, one, two)
        assert [name[0] for name in order] == [*"fhhnnnl"]
        # Of one class and of two gateways, who is told busy may be overtaken by who asks a moment later.
        assert [name for name in order if name in ("h1", "n1", "n3")] == ["h1", "n1", "n3"]
        assert {(await task).status_code for task in tasks} == {200}


async def told(running: Running, count: int) -> bool:
    """Redis knows of so many."""
    return await running.gateway.store._redis.zcard(keys.waiting_order(MODEL)) == count


@pytest.mark.slow
async def test_a_newcomer_does_not_overtake_those_that_wait_elsewhere(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "YIELD_S", 60)
    monkeypatch.setattr(waiting, "LEAVE_S", 1.0)  # Who is told busy is not overtaken, however slow the answer.
    async with (
        instances("a") as (a,),
        start_gateway(a, budgets=PATIENT) as one,
        start_gateway(a, budgets=PATIENT) as two,
    ):
        engine = Engine(a)
        first = ask(one, "first")
        await until(lambda: engine.running)
        await heard(one, engine)
        tasks = await wait_in_turn(one, ("n1", NORMAL), ("n2", NORMAL))
        await until(lambda: two.gateway.waiting.length(MODEL) == 2)
        engine.let_go("first")
        await until(lambda: "n1" in engine.running)
        a.report_changes |= {"room_blocks": 100, "room_places": 1}  # It believes so, and n2 comes first all the same.
        await until(lambda: two.gateway.members.all()[0].report.room_places == 1)  # type: ignore[union-attr]
        late = ask(two, "late")
        await until(lambda: in_line(two))
        engine.report()
        del engine.started[0]
        assert await drained(engine, 3, one, two) == ["n1", "n2", "late"]
        assert {(await task).status_code for task in [first, *tasks, late]} == {200}


async def test_a_client_that_leaves_gives_its_place_up_everywhere(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, budgets=PATIENT) as running:
        engine = Engine(a)
        first = ask(running, "first")
        await until(lambda: engine.running)
        await heard(running, engine)
        leaving, staying = await wait_in_turn(running, ("h", HIGH), ("n", NORMAL))
        await until_true(lambda: told(running, 2))
        leaving.cancel()
        await asyncio.wait({leaving})
        await until(lambda: in_line(running) == 1)
        await until_true(lambda: told(running, 1))
        assert await drained(engine, 2) == ["first", "n"]
        assert [(await task).status_code for task in (first, staying)] == [200, 200]
        await until_true(lambda: told(running, 0))


async def test_so_many_wait_and_the_next_is_turned_away(start_gateway: StartGateway) -> None:
    limits = Limits(queue_per_instance=2)
    async with instances("a") as (a,), start_gateway(a, budgets=PATIENT, limits=limits) as running:
        engine = Engine(a)
        first = ask(running, "first")
        await until(lambda: engine.running)
        await heard(running, engine)
        tasks = await wait_in_turn(running, ("n1", NORMAL), ("n2", NORMAL))
        refused = await running.chat(user="n3", stream=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) > 0
        await drained(engine, 3)
        assert {(await task).status_code for task in [first, *tasks]} == {200}


async def test_the_bound_is_on_what_waits_at_all_gateways(start_gateway: StartGateway) -> None:
    limits = Limits(queue_per_instance=2)
    async with (
        instances("a") as (a,),
        start_gateway(a, budgets=PATIENT, limits=limits) as one,
        start_gateway(a, budgets=PATIENT, limits=limits) as two,
    ):
        engine = Engine(a, places=0)
        await heard(one, engine)
        await heard(two, engine)
        tasks = await wait_in_turn(one, ("n1", NORMAL), ("n2", NORMAL))
        await until(lambda: two.gateway.waiting.length(MODEL) == 2, 30)
        refused = await two.chat(user="n3")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        engine.places = 1
        engine.report()
        await drained(engine, 2)
        assert {(await task).status_code for task in tasks} == {200}


async def test_a_request_waits_so_long_and_no_longer(start_gateway: StartGateway) -> None:
    budgets = Budgets(header_grace_s=0.05, instance_wait_s=15, order_s=15, room_wait_s=0.3)
    async with instances("a") as (a,), start_gateway(a, budgets=budgets) as running:
        engine = Engine(a, places=0)
        await heard(running, engine)
        refused = await running.chat(user="r")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) > 0
        assert a.received == []
        assert in_line(running) == 0


async def test_who_waits_for_room_is_told_when_no_instance_is_usable_any_more(start_gateway: StartGateway) -> None:
    budgets = Budgets(header_grace_s=0.05, instance_wait_s=0.2, order_s=15)
    async with instances("a") as (a,), start_gateway(a, budgets=budgets) as running:
        engine = Engine(a, places=0)
        await heard(running, engine)
        asked = ask(running, "r")
        await until(lambda: in_line(running))
        a.draining = True
        refused = await asked
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, 503)


async def test_late_binding_can_be_turned_off(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, budgets=PATIENT, late_binding=False) as running:
        engine = Engine(a, places=0)
        await heard(running, engine)
        asked = ask(running, "r")
        await until(lambda: engine.running)
        assert wire.ADMIT_HEADER not in a.received[0].headers
        engine.let_go()
        assert (await asked).status_code == 200


async def test_instances_that_do_not_say_what_they_have_room_for_are_used_as_ever(start_gateway: StartGateway) -> None:
    """Without the plugin, and with one that does not know of this: nobody waits for them."""
    async with instances("a", "b") as (a, b):
        a.has_plugin, a.metrics = False, metrics_page(running=1, kv_usage=0.99)
        async with start_gateway(a, b, budgets=PATIENT) as running:
            assert [(await running.chat()).status_code for _ in range(4)] == [200] * 4
            assert in_line(running) == 0
            assert not any(wire.ADMIT_HEADER in one.headers for one in a.received)


async def test_one_without_the_plugin_takes_what_those_with_it_have_no_room_for(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b):
        b.has_plugin, b.metrics = False, metrics_page()
        async with start_gateway(a, b, budgets=PATIENT) as running:
            await heard(running, Engine(a, places=0))
            await until(lambda: any(one.load for one in running.gateway.members.all()))
            assert (await running.chat()).status_code == 200
            assert (len(a.received), len(b.received)) == (0, 1)
            b.metrics = metrics_page(running=1, waiting=1, kv_usage=0.99)
            await until(lambda: any(one.load and one.load.requests_waiting for one in running.gateway.members.all()))
            asked = ask(running, "r")
            await until(lambda: in_line(running))
            b.metrics = metrics_page()
            assert (await asked).status_code == 200


@contextlib.contextmanager
def frozen(server: RedisServer) -> Iterator[None]:
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


@pytest.mark.parametrize("how", ["frozen", "gone"])
async def test_without_redis_each_gateway_orders_its_own(
    how: str, own_redis: RedisServer, start_gateway: StartGateway
) -> None:
    budgets = Budgets(header_grace_s=0.05, instance_wait_s=15, order_s=0.5)
    async with instances("a") as (a,), contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(start_gateway(a, budgets=budgets, redis_url=own_redis.url))
        engine = Engine(a)
        tasks = [ask(running, "first")]
        await until(lambda: engine.running)
        await heard(running, engine)
        tasks += await wait_in_turn(running, ("n1", NORMAL))
        await until_true(lambda: told(running, 1))
        if how == "gone":
            own_redis.stop()
        else:
            stack.enter_context(frozen(own_redis))
        tasks += await wait_in_turn(running, ("l", LOW), ("h", HIGH), ("n2", NORMAL))
        assert await drained(engine, 5) == ["first", "h", "n1", "n2", "l"]
        assert {(await task).status_code for task in tasks} == {200}
        assert not running.gateway.waiting._order.is_shared


async def test_when_redis_is_back_the_order_is_shared_again(
    own_redis: RedisServer, start_gateway: StartGateway
) -> None:
    budgets = Budgets(header_grace_s=0.05, instance_wait_s=15, order_s=0.5)
    async with instances("a") as (a,), start_gateway(a, budgets=budgets, redis_url=own_redis.url) as running:
        engine, order = Engine(a), running.gateway.waiting._order
        first = ask(running, "first")
        await until(lambda: engine.running)
        await heard(running, engine)
        with frozen(own_redis):
            (waiting_one,) = await wait_in_turn(running, ("n1", NORMAL))
            await until(lambda: not order.is_shared)
        await until(lambda: order.is_shared, 15)
        await until_true(lambda: told(running, 1))
        await drained(engine, 2)
        assert [(await task).status_code for task in (first, waiting_one)] == [200, 200]


# The order in Redis by itself.


@contextlib.asynccontextmanager
async def orders(redis_url: str, count: int) -> AsyncIterator[list[SharedOrder]]:
    stores = [Store(redis_url) for _ in range(count)]
    made = [SharedOrder(store, uuid.uuid4().hex, 15, Counters()) for store in stores]
    try:
        yield made
    finally:
        for one, store in zip(made, stores, strict=True):
            await one.close()
            await store.close()


def entry(name: str, waited_s: float = 1.0, priority: PriorityClass = NORMAL) -> Entry:
    return Entry(name, priority, waited_s, 7)


async def shown(order: SharedOrder, model: str, *put: Entry, take_out: tuple[str, ...] = ()) -> list[Entry]:
    lines = await order.look([Ask(model, put, take_out)])
    assert lines is not None
    return list(lines[0].entries)


async def test_a_look_shows_each_entry_as_it_was_put(redis_url: str) -> None:
    model = uuid.uuid4().hex
    async with orders(redis_url, 2) as (one, two):
        await shown(one, model, entry("n", 5.0), entry("l", 90.0, LOW))
        found = {each.request_id: each for each in await shown(two, model, entry("h", 0.0, HIGH))}
        assert {name: (each.priority_class, each.tokens) for name, each in found.items()} == {
            "n": (NORMAL, 7),
            "l": (LOW, 7),
            "h": (HIGH, 7),
        }
        assert 5.0 <= found["n"].waited_s < 30 < 90.0 <= found["l"].waited_s
        assert found["n"].gateway_id == found["l"].gateway_id != found["h"].gateway_id
        assert {each.request_id for each in await shown(two, model, take_out=("h",))} == {"n", "l"}


async def test_an_entry_that_is_told_again_keeps_its_age(redis_url: str) -> None:
    """What it takes to tell it differs each time; by more than a second it is a clock that has been set."""
    model = uuid.uuid4().hex
    async with orders(redis_url, 1) as (one,):
        await shown(one, model, entry("r", 50.9))
        (again,) = await shown(one, model, entry("r", 50.0))
        assert again.waited_s >= 50.9


async def test_the_oldest_of_each_class_is_shown_however_long_the_line(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.cluster.order.LOOKED_AT", 2)
    model = uuid.uuid4().hex
    async with orders(redis_url, 1) as (one,):
        people = [entry(f"h{index}", 9.0 - index, HIGH) for index in range(4)]
        found = await shown(one, model, *people, entry("l1", 60.0, LOW), entry("l2", 50.0, LOW))
        assert [each.request_id for each in found] == ["h0", "h1", "l1"]


async def test_entries_of_a_gateway_that_has_died_vanish(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = uuid.uuid4().hex
    async with orders(redis_url, 2) as (dead, living):
        monkeypatch.setattr(keys, "WAITING_GATEWAY_TTL_MS", 60)
        await shown(dead, model, entry("h", 9.0, HIGH))
        monkeypatch.undo()
        ours = entry("n")

        async def only_ours() -> bool:
            return [each.request_id for each in await shown(living, model, ours)] == ["n"]

        await until_true(only_ours)
        assert await living.lengths([model]) == {model: 1}


async def test_everything_of_a_line_expires(redis_url: str) -> None:
    model = uuid.uuid4().hex
    async with orders(redis_url, 1) as (one,):
        await shown(one, model, entry("r"))
        for key in (keys.WAITING_GATEWAYS, keys.waiting_order(model), keys.waiting_details(model)):
            assert 0 < await one._store._redis.pttl(key) <= keys.WAITING_TTL_MS, key


async def test_room_is_not_left_for_ever_for_one_whose_gateway_does_not_take_it(
    redis_url: str, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "YIELD_S", 0.2)
    async with (
        orders(redis_url, 1) as (frozen_one,),
        instances("a") as (a,),
        start_gateway(a, budgets=PATIENT) as running,
    ):
        await shown(frozen_one, MODEL, entry("h", 9.0, HIGH))
        engine = Engine(a, places=0)
        await heard(running, engine)
        asked = ask(running, "n")
        await until(lambda: in_line(running))
        engine.places = 1
        engine.report()
        await until(lambda: engine.running)
        engine.let_go()
        assert (await asked).status_code == 200
        await shown(frozen_one, MODEL, take_out=("h",))
