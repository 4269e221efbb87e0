"""Of a line in which requests wait for room, one key's never leave nothing to the others."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections import Counter
from collections.abc import Iterable

import httpx

from gateway.access import Key, digest
from gateway.config import Limits
from gateway.errors import LimitReached
from gateway.serving.shares import Shares
from tests.conftest import Running, StartGateway, chat_body, until
from tests.fake_instance import instances
from tests.test_admin import assert_openai_error
from tests.test_room import PATIENT, Engine, drained, heard, in_line


def keys(*names: str) -> tuple[Key, ...]:
    return tuple(Key(uuid.uuid4().hex, digest(name.encode())) for name in names)


async def wait(running: Running, key: str, count: int) -> list[asyncio.Task[httpx.Response]]:
    """So many of the key's requests, each once the one before it waits."""
    tasks: list[asyncio.Task[httpx.Response]] = []
    for _ in range(count):
        before, headers = in_line(running), {"authorization": f"Bearer {key}"}
        body = chat_body(user=uuid.uuid4().hex)
        tasks.append(asyncio.create_task(running.client.post("/v1/chat/completions", json=body, headers=headers)))
        await until(lambda before=before: in_line(running) == before + 1)  # type: ignore[misc]
    return tasks


async def refused(running: Running, keys: Iterable[str]) -> None:
    for key in keys:
        answer = await running.client.post(
            "/v1/chat/completions", json=chat_body(stream=True), headers={"authorization": f"Bearer {key}"}
        )
        assert_openai_error(answer, 429)
        assert int(answer.headers["retry-after"]) > 0


async def test_a_key_that_presses_on_leaves_as_many_places_as_it_has_to_the_others(start_gateway: StartGateway) -> None:
    limits = Limits(queue_per_instance=8)
    named = keys("greedy", "modest", "late")
    async with (
        instances("a") as (a,),
        start_gateway(a, budgets=PATIENT, limits=limits, named_keys=named) as running,
    ):
        engine = Engine(a, places=0)
        await heard(running, engine)
        tasks = await wait(running, "greedy", 4)
        await refused(running, ["greedy"])
        tasks += await wait(running, "modest", 2)
        await refused(running, ["greedy", "modest"])
        tasks += await wait(running, "late", 1)
        tasks[0].cancel()  # Its place is free again, and not the key's own.
        await until(lambda: in_line(running) == 6)
        await refused(running, ["greedy"])
        engine.places = 1
        engine.report()
        await drained(engine, 6)
        assert {(await task).status_code for task in tasks[1:]} == {200}


async def test_a_key_with_nobody_to_share_with_has_the_whole_line(start_gateway: StartGateway) -> None:
    limits = Limits(queue_per_instance=4)
    async with (
        instances("a") as (a,),
        start_gateway(a, budgets=PATIENT, limits=limits, named_keys=keys("only")) as running,
    ):
        engine = Engine(a, places=0)
        await heard(running, engine)
        tasks = await wait(running, "only", 4)
        engine.places = 1
        engine.report()
        await drained(engine, 4)
        assert {(await task).status_code for task in tasks} == {200}


def test_whoever_comes_in_whatever_order_there_is_a_place_for_who_has_none() -> None:
    chance = random.Random(5)
    for places in (1, 2, 7, 64):
        shares, held = Shares(), Counter[str]()
        with contextlib.ExitStack() as line:
            for _ in range(20 * places):
                key, left = chance.choice("aaaaaabbc"), places - held.total()
                if left <= 0:  # All of it is in use: by two at least.
                    assert len(held) > 1 or places == 1
                    break
                with contextlib.suppress(LimitReached):
                    shares.check(key, left)
                    line.enter_context(shares.taken(key))
                    held[key] += 1
                assert max(held.values()) <= (places + 1) // 2
        assert not shares._waiting
