"""An instance that drains gets nothing new, and what it has moves away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway import wire
from gateway.policy.decide import Policy
from loadtest.processes import free_port
from tests.conftest import ADMIN_KEY, Running, StartGateway, until
from tests.fake_instance import Exchange, FakeInstance, Generation, error_body, generate, instances
from tests.scripts import moved, normal, prebind
from tests.test_admin import assert_openai_error, result

NONE = Policy.NONE


def request_of(name: str, **changes: Any) -> wire.RequestStatus:
    values: dict[str, Any] = {"state": "running", "prompt_tokens": 5, "output_tokens": 3, "blocks": 1}
    return wire.RequestStatus(request_id=name, **(values | {"movable": True, "reason": None} | changes))


class Movable:
    """A source whose llumlet does as it is told, and at most four things at once."""

    def __init__(self, source: FakeInstance, *names: str, takes_s: float = 0.0) -> None:
        self.source = source
        self.orders: list[wire.MigrateOrder] = []
        self.at_once = self.at_once_max = 0
        self.may_end = asyncio.Event()
        self.may_end.set()
        self._takes_s = takes_s
        source.requests = [request_of(name) for name in names]
        source.migrate = self.migrate

    async def migrate(self, order: wire.MigrateOrder) -> tuple[int, Any]:
        self.orders.append(order)
        self.at_once += 1
        self.at_once_max = max(self.at_once_max, self.at_once)
        await asyncio.sleep(self._takes_s)
        await self.may_end.wait()
        self.at_once -= 1
        self.ends(order.request_id)
        return 200, result(order)

    def ends(self, name: str) -> None:
        self.source.requests = [request for request in self.source.requests if request.request_id != name]


async def drain(running: Running, instance_id: str = "a", **order: Any) -> dict[str, Any]:
    response = await running.admin("POST", f"/admin/instances/{instance_id}/drain", json=order)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert set(answer) == {"instance", "draining", "empty", "moved", "failed", "remaining", "duration_ms"}
    assert answer["instance"] == instance_id
    return answer


async def shown(running: Running) -> dict[str, tuple[bool, bool]]:
    listed = (await running.admin("GET", "/admin/instances")).json()["instances"]
    return {one["id"]: (one["draining"], one["empty"]) for one in listed}


async def test_a_drain_empties_an_instance_and_undrain_takes_it_back(start_gateway: StartGateway) -> None:
    async with instances("a", "b", "c") as (a, b, c), start_gateway(a, b, c, policy=NONE) as running:
        c.freeness_steps = 900
        await until(lambda: running.gateway.dispatcher.choose(None, "a").instance_id == "c")
        source = Movable(a, *(f"r{index}" for index in range(9)), takes_s=0.05)
        answer = await drain(running)
        assert (answer["draining"], answer["empty"], answer["moved"], answer["failed"]) == (True, True, 9, 0)
        assert answer["remaining"] == []
        assert sorted(order.request_id for order in source.orders) == [f"r{index}" for index in range(9)]
        assert source.orders[0] == wire.MigrateOrder("r0", "c", c.url)
        assert source.at_once_max == 4
        assert (await shown(running))["a"] == (True, True)

        assert (await running.chat()).status_code == 200
        assert not a.received
        response = await running.admin("DELETE", "/admin/instances/a/drain")
        assert (response.status_code, response.json()) == (200, {"instance": "a", "draining": False})
        await until(lambda: running.gateway.dispatcher.choose(None).instance_id == "a")
        assert (await shown(running))["a"] == (False, True)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_running_request_is_moved_away_whole(stream: bool, start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b, policy=NONE) as running:
        unmoved = normal((await running.chat(stream=stream)).content)
        source = Movable(a)
        ordered = asyncio.Event()

        async def script(exchange: Exchange) -> None:
            a.requests = [request_of(exchange.request.headers[wire.REQUEST_ID_HEADER])]
            if stream:
                await exchange.start()
                await exchange.send(*Generation(exchange.request).upto(3))
            await ordered.wait()
            b.commit("m1", 3)
            if stream:
                await exchange.send(prebind(b), moved(b, 3))
                await exchange.finish()
            else:
                await exchange.json(409, {}, {wire.MOVED_HEADER: "m1 b 3"})

        async def migrate(order: wire.MigrateOrder) -> tuple[int, Any]:
            ordered.set()
            return await source.migrate(order)

        a.script, a.migrate = script, migrate
        replying = asyncio.create_task(running.chat(stream=stream))
        await until(lambda: a.requests)
        answer = await drain(running)
        assert (answer["empty"], answer["moved"]) == (True, 1)
        assert normal((await replying).content) == unmoved


async def test_what_cannot_move_runs_to_its_end_there(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b, policy=NONE) as running:
        source = Movable(a, "r1", "r2")
        waiting = request_of("w", state="waiting", movable=False, reason="n > 1")
        a.requests.append(waiting)
        answer = await drain(running, timeout_s=1)
        assert (answer["empty"], answer["moved"]) == (False, 2)
        assert answer["remaining"] == [{"request": "w", "state": "waiting", "reason": "n > 1"}]
        assert (await shown(running))["a"] == (True, False)
        again = asyncio.create_task(drain(running, timeout_s=10))
        await until(lambda: running.gateway.drains._emptyings)
        source.ends("w")
        assert (await again)["empty"]


async def test_a_request_on_its_way_to_the_engine_is_waited_for(start_gateway: StartGateway) -> None:
    """Neither the report nor the status knows of it yet; only the gateway that has sent it does."""
    async with instances("a", "b") as (a, b), start_gateway(a, b, policy=NONE) as running:
        tokenized = asyncio.Event()

        async def slow(exchange: Exchange) -> None:
            await tokenized.wait()
            await generate(exchange)

        a.script = slow
        replying = asyncio.create_task(running.chat())
        await a.exchange()
        assert not (await drain(running, timeout_s=0.4))["empty"]
        tokenized.set()
        assert (await replying).status_code == 200
        assert (await drain(running))["empty"]


async def test_moves_that_fail_are_ordered_again(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b, policy=NONE) as running:
        source = Movable(a, "r1")
        answers = [(409, error_body("too many migrations", "Conflict", "cannot_move")), (200, None)]

        async def migrate(order: wire.MigrateOrder) -> tuple[int, Any]:
            if answers:
                status, body = answers.pop(0)
                return status, body or result(order, outcome="aborted", reason="no blocks")
            return await source.migrate(order)

        a.migrate = migrate
        answer = await drain(running)
        assert (answer["empty"], answer["moved"], answer["failed"]) == (True, 1, 2)


async def test_with_nowhere_to_go_requests_stay_and_the_answer_says_so(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b):
        b.models = ("another",)
        async with start_gateway(a, b, policy=NONE) as running:
            source = Movable(a, "r1")
            answer = await drain(running, timeout_s=1)
            assert not answer["empty"]
            (remaining,) = answer["remaining"]
            assert remaining == {"request": "r1", "state": "running", "reason": "no other instance can take it"}
            assert not source.orders
            assert (await running.chat()).status_code == 503


async def test_an_instance_of_the_same_kv_format_comes_first(start_gateway: StartGateway) -> None:
    """F62: to another format a move has to recompute, however free that instance is."""
    async with instances("a", "b", "c") as (a, b, c):
        b.report_changes, b.freeness_steps = {"kv_format": "format-2"}, 9_000.0
        async with start_gateway(a, b, c, policy=NONE) as running:
            source = Movable(a, "r1")
            assert (await drain(running))["moved"] == 1
            assert [order.destination_id for order in source.orders] == ["c"]
            await drain(running, "c", timeout_s=5)
            source.source.requests = [request_of("r2")]
            assert (await drain(running))["moved"] == 1
            assert [order.destination_id for order in source.orders] == ["c", "b"]


async def test_nothing_is_sent_there_before_its_next_report_says_so(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b, policy=NONE) as running:
        a.engine_busy = True  # So that no report comes.
        assert not (await drain(running, timeout_s=0.1))["empty"]
        (member, _) = running.gateway.members.all()
        assert member.report is not None
        assert not member.report.draining
        assert (await running.chat()).status_code == 200
        assert (len(a.received), len(b.received)) == (0, 1)


async def test_those_who_wait_for_the_same_drain_share_it(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b, policy=NONE) as running:
        source = Movable(a, "r1", "r2")
        source.may_end.clear()
        patient = [asyncio.create_task(drain(running)) for _ in range(2)]
        await until(lambda: len(source.orders) == 2)
        hurried = await drain(running, timeout_s=0.2)
        assert not hurried["empty"]
        assert {one["reason"] for one in hurried["remaining"]} == {"it is moving"}
        source.may_end.set()
        assert all([(await answer)["empty"] for answer in patient])
        assert len(source.orders) == 2


async def test_a_drain_goes_on_when_the_operator_hangs_up(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b, policy=NONE) as running:
        source = Movable(a, *(f"r{index}" for index in range(6)))
        source.may_end.clear()
        asking = asyncio.create_task(running.admin("POST", "/admin/instances/a/drain"))
        await until(lambda: len(source.orders) == 4)
        asking.cancel()
        await asyncio.wait({asking})
        source.may_end.set()
        await until(lambda: not a.requests)
        assert a.draining


@pytest.mark.parametrize("reported", [True, False])
async def test_undrain_answers_those_who_wait(reported: bool, start_gateway: StartGateway) -> None:
    """Even before a report has told that it drains."""
    async with instances("a", "b") as (a, b), start_gateway(a, b, policy=NONE) as running:
        a.report_changes = {} if reported else {"draining": False}
        a.requests = [request_of("r", movable=False, reason="n > 1")]
        draining = asyncio.create_task(drain(running))
        await until(lambda: a.draining and running.gateway.drains._emptyings)
        await running.admin("DELETE", "/admin/instances/a/drain")
        async with asyncio.timeout(2):
            assert not (await draining)["empty"]
        assert not a.draining


async def test_wrong_orders(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b, policy=NONE) as running:

        async def refused(status: int, method: str = "POST", instance_id: str = "a", **arguments: Any) -> None:
            response = await running.admin(method, f"/admin/instances/{instance_id}/drain", **arguments)
            assert_openai_error(response, status)

        await refused(404, instance_id="nobody")
        await refused(404, "DELETE", instance_id="nobody")
        await refused(405, "PUT")
        await refused(400, content=b"{")
        await refused(400, json=[])
        for wrong in ("5", None, True, -1, 0, 3601, [1]):
            await refused(400, json={"timeout_s": wrong})
        await refused(400, content=b'{"timeout_s": NaN}')
        a.drain_status = 503
        await refused(502)
        await refused(502, "DELETE")
        assert not a.draining
        assert (await shown(running))["a"] == (False, True)
        await a.stop()
        try:
            await refused(502)
            await refused(502, "DELETE")
        finally:
            await a.listen(free_port())
        for key in ("wrong", "Bearer wrong"):
            response = await running.client.post("/admin/instances/b/drain", headers={"authorization": key})
            assert response.status_code == 401
        assert ADMIN_KEY not in response.text


async def test_an_instance_that_begins_to_drain_by_itself_is_emptied_by_the_leader(
    start_gateway: StartGateway,
) -> None:
    """As a server does that is told to end. Whatever the policy: this is no balancing."""
    async with instances("a", "b") as (a, b), start_gateway(a, b, policy=NONE) as running:
        source = Movable(a, "r1", "r2")
        await until(lambda: running.gateway.leader.is_leading)
        await asyncio.sleep(0.3)
        assert not source.orders  # Loaded, but not draining.
        a.draining = True
        await until(lambda: not a.requests)
        assert {order.destination_id for order in source.orders} == {"b"}


async def test_an_operator_may_wait_for_what_the_leader_has_begun(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b, policy=NONE) as running:
        source = Movable(a, "r1", takes_s=0.3)
        a.draining = True
        await until(lambda: source.orders)
        assert (await drain(running))["empty"]
        assert len(source.orders) == 1


async def test_an_instance_that_dies_while_it_drains_ends_the_wait(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b, policy=NONE) as running:
        a.requests = [request_of("r", movable=False, reason="n > 1")]
        draining = asyncio.create_task(running.admin("POST", "/admin/instances/a/drain"))
        await until(lambda: running.gateway.drains._emptyings)
        await a.stop()
        try:
            async with asyncio.timeout(5):
                assert_openai_error(await draining, 502)
        finally:
            await a.listen(free_port())
