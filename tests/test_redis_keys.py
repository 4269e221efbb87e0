"""keys.py holds all keys, with their times to live. What stands in Redis and in the code is held to it."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis

from gateway.access import Key, digest
from gateway.cluster import keys
from gateway.config import Intervals
from gateway.policy.limits import KeyLimits
from loadtest.redis_server import RedisServer
from tests.conftest import StartGateway, chat_body, until, until_true
from tests.fake_instance import instances
from tests.test_replicas import knows_each_other
from tests.test_room import PATIENT, Engine, heard, in_line
from tests.test_stored_responses import stores

FOR_EVER = -1
LIVES_MS = {
    keys.SNAPSHOT: keys.SNAPSHOT_TTL_MS,
    keys.LEADER: round(Intervals().leader_lease_s * 1000),
    keys.LEADER_TOKEN: FOR_EVER,
    keys.INSTANCES: keys.INSTANCES_TTL_S * 1000,
    keys.EPOCH: keys.EPOCH_TTL_MS,
    keys.GATEWAYS: keys.GATEWAYS_TTL_MS,
    keys.TARGETS: FOR_EVER,
    keys.CALLS: keys.CALLS_TTL_MS,
    keys.ANSWERS: keys.ANSWERS_TTL_MS,
    keys.OWNER: keys.OWNER_TTL_S * 1000,
    keys.MIGRATIONS: keys.MIGRATIONS_TTL_S * 1000,
    keys.RESPONSE: keys.RESPONSES_TTL_S * 1000,
    keys.RESPONSES: keys.RESPONSES_TTL_S * 1000,
    keys.LIMIT: keys.LIMIT_WINDOW_TTL_S * 1000,
    keys.LIMIT_PROBE: keys.LIMIT_PROBE_TTL_S * 1000,
    keys.WAITING: keys.WAITING_TTL_MS,
    keys.WAITING_GATEWAYS: keys.WAITING_TTL_MS,
}
"""By name, or by its beginning where the name ends in a colon."""


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(log=tmp_path / "redis.log", environment={"PATH": os.environ["PATH"]}) as server:
        yield server


def life_of(key: str) -> tuple[str, int]:
    if key in LIVES_MS:
        return key, LIVES_MS[key]
    begun = [name for name in LIVES_MS if name.endswith(":") and key.startswith(name)]
    assert begun, f"{key} is not in keys.py"
    return begun[0], LIVES_MS[begun[0]]


def test_every_name_has_its_time_to_live_and_stands_in_one_file_alone() -> None:
    names = {value for name, value in vars(keys).items() if name.isupper() and isinstance(value, str)}
    assert names - {keys.PREFIX} == LIVES_MS.keys()
    package = Path(sys.modules["gateway"].__file__ or "").parent
    elsewhere = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path.name != "keys.py" and re.search(rf"['\"]{keys.PREFIX}[a-z{{]", path.read_text())
    ]
    assert elsewhere == []


async def test_what_stands_in_redis_is_named_there_and_lives_no_longer_than_is_said(
    own_redis: RedisServer, start_gateway: StartGateway
) -> None:
    seen: set[str] = set()
    enough = asyncio.Event()

    async def watch(client: redis.Redis) -> None:
        """Time after time, since much of it is there for a moment only. It is not cancelled: the client of Redis may
        swallow that."""
        while not enough.is_set():
            async for key in client.scan_iter(count=1000):
                name, life_ms = life_of(key)
                left_ms = await client.pttl(key)
                assert left_ms == -2 or (left_ms == FOR_EVER if life_ms == FOR_EVER else 0 <= left_ms <= life_ms), key
                seen.add(name)
            await asyncio.sleep(0.02)

    limits = KeyLimits(requests_per_minute=100, tokens_per_minute=10**6, concurrent_requests=9)
    changes: dict[str, Any] = {
        "redis_url": own_redis.url,
        "named_keys": (Key(uuid.uuid4().hex, digest(b"key"), limits),),
        "budgets": PATIENT,
    }
    body, headers = chat_body(input="x"), {"authorization": "Bearer key"}
    async with (
        instances("a") as (a,),
        start_gateway(a, **changes) as one,
        start_gateway(a, **changes) as other,
        redis.Redis.from_url(own_redis.url, decode_responses=True) as client,
    ):
        watching = asyncio.create_task(watch(client))
        await knows_each_other(one, other)
        await one.admin("POST", "/admin/instances", json={"url": "http://127.0.0.1:1"})
        a.script = stores
        await one.client.post("/v1/responses", json=body, headers=headers)
        engine = Engine(a)
        await heard(one, engine)
        tasks = [asyncio.create_task(one.client.post("/v1/chat/completions", json=body, headers=headers))]
        await until(lambda: engine.running)
        await heard(one, engine)
        tasks.append(asyncio.create_task(one.client.post("/v1/chat/completions", json=body, headers=headers)))
        await until(lambda: in_line(one))
        await one.gateway.store.add_migrations([{"n": 1}])
        expected = LIVES_MS.keys() - {keys.CALLS, keys.ANSWERS}  # Taken as soon as they are there.

        async def all_seen() -> bool:
            assert not watching.done(), watching.exception()
            await other.admin("GET", "/admin/requests")
            return expected <= seen

        await until_true(all_seen, 2)
        enough.set()
        await watching
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
