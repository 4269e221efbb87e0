"""The cluster's state in Redis. The only importer of redis. On a request's path only two things are asked for: the
limits of a key with limits, with a budget of their own (limits.py), and who holds a stored response (responses.py).

Every call has a bounded wait and raises :class:`StoreUnavailable` when Redis does not answer in it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.cluster import keys
from gateway.errors import StoreUnavailable

CONNECTIONS_MAX = 32
SOCKET_TIMEOUT_S = 1.0

# KEYS: leader, token counter. ARGV: gateway id, lease in ms. Returns the fencing token, or 0 if another one leads.
_TAKE_LEASE = """
local holder = redis.call('GET', KEYS[1])
if holder then
  local id, token = string.match(holder, '^(.*):(%d+)$')
  if id ~= ARGV[1] then return 0 end
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return tonumber(token)
end
local token = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], ARGV[1] .. ':' .. token, 'PX', ARGV[2])
return token
"""

# KEYS: leader. ARGV: the holder as it was written. A successor's lease is never deleted.
_DROP_LEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

# KEYS: leader, snapshot. ARGV: holder, value, TTL in ms. Only the present leader writes.
_PUBLISH = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 1
"""

# KEYS: response, index. ARGV: value, TTL in s, now in s, response id, most, prefix. Expired ones leave the index too.
_KEEP_RESPONSE = """
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', ARGV[3] - ARGV[2])
local over = redis.call('ZCARD', KEYS[2]) - ARGV[5]
if over > 0 then
  local oldest = redis.call('ZPOPMIN', KEYS[2], over)
  for i = 1, #oldest, 2 do redis.call('DEL', ARGV[6] .. oldest[i]) end
end
return 1
"""


@dataclass(frozen=True, slots=True)
class Lease:
    """``ends_at`` is this process's own monotonic clock, counted from before the request to Redis was sent."""

    gateway_id: str
    token: int
    ends_at: float

    @property
    def holder(self) -> str:
        return f"{self.gateway_id}:{self.token}"


@dataclass(frozen=True, slots=True)
class Owner:
    """Who serves a request."""

    gateway_id: str
    instance_id: str
    model: str


@dataclass(frozen=True, slots=True)
class ScriptCall:
    script: str
    keys: tuple[str, ...]
    arguments: tuple[str, ...]


class Store:
    def __init__(self, url: str) -> None:
        pool: redis.BlockingConnectionPool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS_MAX,
            timeout=SOCKET_TIMEOUT_S,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=SOCKET_TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),
            decode_responses=True,
        )
        self._redis = redis.Redis.from_pool(pool)
        self.up = False
        """Whether the last command was answered."""
        self.answered_at = -math.inf
        """This process's monotonic clock."""
        self.failures = 0

    async def close(self) -> None:
        await self._redis.aclose()

    async def take_lease(self, gateway_id: str, lease_s: float) -> Lease | None:
        """The lease, new or renewed; ``None`` while another gateway leads, which is the normal case."""
        asked_at = time.monotonic()
        token = await self._eval(_TAKE_LEASE, [keys.LEADER, keys.LEADER_TOKEN], [gateway_id, str(int(lease_s * 1000))])
        return Lease(gateway_id, int(token), asked_at + lease_s) if token else None

    async def drop_lease(self, lease: Lease) -> None:
        await self._eval(_DROP_LEASE, [keys.LEADER], [lease.holder])

    async def publish_snapshot(self, lease: Lease, snapshot: Mapping[str, Any]) -> bool:
        """Whether it was written: not if the lease has passed on, whatever this gateway still believes."""
        arguments = [lease.holder, json.dumps(snapshot), str(keys.SNAPSHOT_TTL_MS)]
        return bool(await self._eval(_PUBLISH, [keys.LEADER, keys.SNAPSHOT], arguments))

    async def snapshot(self) -> dict[str, Any] | None:
        value = await self._run(lambda: self._redis.get(keys.SNAPSHOT))
        return json.loads(value) if value is not None else None

    async def register(self, instances: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces the registry: an instance that is gone from the list is gone from Redis."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.delete(keys.INSTANCES)
        if instances:
            pipeline.hset(keys.INSTANCES, mapping={name: json.dumps(value) for name, value in instances.items()})
            pipeline.expire(keys.INSTANCES, keys.INSTANCES_TTL_S)
        await self._run(pipeline.execute)

    async def registered(self) -> dict[str, Any]:
        values = await self._run(lambda: cast(Awaitable[dict[str, str]], self._redis.hgetall(keys.INSTANCES)))
        return {name: json.loads(value) for name, value in values.items()}

    async def write_owners(self, owners: Mapping[str, Owner | None]) -> None:
        """``None`` forgets a request."""
        pipeline = self._redis.pipeline(transaction=False)
        for request_id, owner in owners.items():
            if owner is None:
                pipeline.delete(keys.owner(request_id))
            else:
                value = {"gateway": owner.gateway_id, "instance": owner.instance_id, "model": owner.model}
                pipeline.set(keys.owner(request_id), json.dumps(value), ex=keys.OWNER_TTL_S)
        await self._run(pipeline.execute)

    async def owner(self, request_id: str) -> Owner | None:
        value = await self._run(lambda: self._redis.get(keys.owner(request_id)))
        if value is None:
            return None
        found = json.loads(value)
        return Owner(found["gateway"], found["instance"], found["model"])

    async def add_migrations(self, records: list[dict[str, Any]]) -> None:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.lpush(keys.MIGRATIONS, *(json.dumps(record) for record in records))
        pipeline.ltrim(keys.MIGRATIONS, 0, keys.MIGRATIONS_MAX - 1)
        pipeline.expire(keys.MIGRATIONS, keys.MIGRATIONS_TTL_S)
        await self._run(pipeline.execute)

    async def migrations(self, count: int) -> list[dict[str, Any]]:
        values = await self._run(lambda: cast(Awaitable[list[str]], self._redis.lrange(keys.MIGRATIONS, 0, count - 1)))
        return [json.loads(value) for value in values]

    async def keep_response(self, response_id: str, instance_id: str, boot_id: str) -> None:
        limits = [str(keys.RESPONSES_MAX), keys.RESPONSE]
        value = [f"{instance_id} {boot_id}", str(keys.RESPONSES_TTL_S), str(int(time.time())), response_id]
        await self._eval(_KEEP_RESPONSE, [keys.response(response_id), keys.RESPONSES], value + limits)

    async def response_home(self, response_id: str) -> tuple[str, str] | None:
        """Instance id and boot id."""
        value = await self._run(lambda: self._redis.get(keys.response(response_id)))
        if value is None:
            return None
        instance_id, _, boot_id = value.partition(" ")
        return instance_id, boot_id

    async def run_scripts(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """In this order and in one round trip. One that Redis refuses fails them all, though others may have run."""
        pipeline = self._redis.pipeline(transaction=False)
        for call in calls:
            pipeline.eval(call.script, len(call.keys), *call.keys, *call.arguments)
        answers: list[Any] = await self._run(pipeline.execute)
        return answers

    async def _eval(self, script: str, key_names: list[str], arguments: list[str]) -> Any:
        return await self._run(lambda: self._redis.eval(script, len(key_names), *key_names, *arguments))

    async def _run(self, command: Callable[[], Awaitable[Any]]) -> Any:
        try:
            answer = await command()
        except (RedisError, OSError, TimeoutError) as error:
            self.up = False
            self.failures += 1
            raise StoreUnavailable(f"Redis: {error or type(error).__name__}") from error
        self.up, self.answered_at = True, time.monotonic()
        return answer
