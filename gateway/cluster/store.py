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

import msgspec
import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisError

from gateway.cluster import keys
from gateway.errors import StoreUnavailable
from gateway.wire import FENCE_MAX

CONNECTIONS_MAX = 32
SOCKET_TIMEOUT_S = 1.0
POP_S = 0.5
"""How long Redis may hold a question for the next entry of a list: less than the time after which it counts as gone, so
that a connection that is dead without a sign is noticed."""
LEASE_MARGIN = 0.1
"""The share of a lease by which its holder stops sooner than Redis lets it go: its clock may be the slower one, and its
last orders are on their way."""

OWN = """
local function own(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', key) end
end
"""
"""Before a script: what stands under one of our names (keys.py) and is of another type is nothing of ours, and would
fail the script at every try. It goes."""

LAPSE = """
local function lapse(key, now, life)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', string.format('%.0f', now))
  redis.call('ZREMRANGEBYSCORE', key, string.format('(%.0f', now + life), '+inf')
end
"""
"""For scripts with a sorted set by the time at which each entry lapses: those go whose time has come, and those that
seem to last for longer than any may. The latter are from a clock that has been set since: who lives says so again."""

# KEYS: leader, token counter. ARGV: gateway id, lease in ms, the highest token seen anywhere, the highest that can be.
# Returns the fencing token, or 0 if another one leads. A Redis that has lost its memory goes on from what was seen; so
# does a holder whose token is not the highest, since nobody would take its orders. What is no lease, or no count of
# leases, counts as lost too; and no lease is for ever.
_TAKE_LEASE = (
    OWN
    + """
own(KEYS[1], 'string')
own(KEYS[2], 'string')
local seen, most = tonumber(ARGV[3]), tonumber(ARGV[4])
local id, token = string.match(redis.call('GET', KEYS[1]) or '', '^(.*):(%d+)$')
if id and tonumber(token) <= most then
  if redis.call('PTTL', KEYS[1]) < 0 then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
  if id ~= ARGV[1] then return 0 end
  if tonumber(token) >= seen then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return tonumber(token)
  end
end
local granted = string.match(redis.call('GET', KEYS[2]) or '', '^[1-9]%d*$')
if not granted or tonumber(granted) > most then redis.call('SET', KEYS[2], '0') end
local token = redis.call('INCR', KEYS[2])
if token <= seen then
  token = seen + 1
  redis.call('SET', KEYS[2], string.format('%d', token))
end
redis.call('SET', KEYS[1], ARGV[1] .. ':' .. string.format('%d', token), 'PX', ARGV[2])
return token
"""
)

# KEYS: leader. ARGV: the holder as it was written. A successor's lease is never deleted.
_DROP_LEASE = (
    OWN
    + """
own(KEYS[1], 'string')
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
)

# KEYS: leader, snapshot. ARGV: holder, value, TTL in ms, number of the snapshot among those of this lease. Only the
# present leader writes, and nothing older than what is there: a Redis that stood still reads what was sent meanwhile
# in any order.
_PUBLISH = (
    OWN
    + """
own(KEYS[1], 'string')
own(KEYS[2], 'hash')
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local there = redis.call('HMGET', KEYS[2], 'holder', 'number')
if there[1] == ARGV[1] and (tonumber(there[2]) or 0) > tonumber(ARGV[4]) then return 1 end
redis.call('HSET', KEYS[2], 'holder', ARGV[1], 'number', ARGV[4], 'json', ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return 1
"""
)

# KEYS: leader, instances. ARGV: holder, TTL in s, then id and value of each. Only the present leader writes.
_REGISTER = (
    OWN
    + """
own(KEYS[1], 'string')
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[2])
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
if #ARGV > 2 then redis.call('EXPIRE', KEYS[2], ARGV[2]) end
return 1
"""
)

# KEYS: epoch, gateways, targets. ARGV: a new epoch, its life in ms, gateway id, its life in ms, most gateways.
# Returns the epoch, the gateways that live, and the operators' orders about addresses.
_BEAT = (
    OWN
    + LAPSE
    + """
own(KEYS[1], 'string')
own(KEYS[2], 'zset')
own(KEYS[3], 'hash')
local clock = redis.call('TIME')
local now_ms = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
lapse(KEYS[2], now_ms, ARGV[4])
redis.call('ZADD', KEYS[2], now_ms + ARGV[4], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
local gateways = redis.call('ZREVRANGE', KEYS[2], 0, ARGV[5] - 1)
return {redis.call('GET', KEYS[1]), gateways, redis.call('HGETALL', KEYS[3])}
"""
)

# KEYS: targets. ARGV: url, 1 to add and 0 to remove, most, how long a removal is kept in s. Returns the order as it
# was written, or false where there is no room.
_ORDER_TARGET = (
    OWN
    + """
own(KEYS[1], 'hash')
local now = tonumber(redis.call('TIME')[1])
local order = 'added'
if ARGV[2] == '0' then order = 'removed:' .. string.format('%d', now) end
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then
  local orders = redis.call('HGETALL', KEYS[1])
  for i = 1, #orders, 2 do
    local at = string.match(orders[i + 1], '^removed:(%d+)$')
    if at and now - tonumber(at) > tonumber(ARGV[4]) then redis.call('HDEL', KEYS[1], orders[i]) end
  end
  if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then return false end
end
redis.call('HSET', KEYS[1], ARGV[1], order)
return order
"""
)

# KEYS: calls. ARGV: call, most, TTL in ms. The oldest go first.
_CALL = """
redis.call('RPUSH', KEYS[1], ARGV[1])
redis.call('LTRIM', KEYS[1], -ARGV[2], -1)
return redis.call('PEXPIRE', KEYS[1], ARGV[3])
"""

# KEYS: response, index. ARGV: value, TTL in s, response id, most, prefix. Expired ones leave the index too.
_KEEP_RESPONSE = (
    OWN
    + """
own(KEYS[2], 'zset')
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
redis.call('ZADD', KEYS[2], now, ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[2])
local over = redis.call('ZCARD', KEYS[2]) - ARGV[4]
if over > 0 then
  local oldest = redis.call('ZPOPMIN', KEYS[2], over)
  for i = 1, #oldest, 2 do redis.call('DEL', ARGV[5] .. oldest[i]) end
end
return 1
"""
)

# KEYS: migrations. ARGV: most, TTL in s, then the records, oldest first.
_ADD_MIGRATIONS = (
    OWN
    + """
own(KEYS[1], 'list')
for i = 3, #ARGV do redis.call('LPUSH', KEYS[1], ARGV[i]) end
redis.call('LTRIM', KEYS[1], 0, ARGV[1] - 1)
return redis.call('EXPIRE', KEYS[1], ARGV[2])
"""
)


@dataclass(frozen=True, slots=True)
class Lease:
    """``ends_at`` is this process's own monotonic clock, counted from before the request to Redis was sent, less a
    margin."""

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
class Beat:
    """What Redis says when a gateway says that it lives."""

    epoch: str
    gateways: frozenset[str]
    """That live, this one included."""
    orders: Mapping[str, str]
    """Operators', by URL: see ``keys.TARGETS``."""


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
            encoding_errors="replace",
        )
        self._redis = redis.Redis.from_pool(pool)
        self.up = False
        """Whether the last command was answered."""
        self.answered_at = -math.inf
        """This process's monotonic clock."""
        self.failures = 0
        self._quick: tuple[float, float] = (-math.inf, math.inf)
        """When the last answer came that nothing but Redis had to be waited for, and how long it took."""

    def quick_at(self, budget_s: float) -> float:
        """When the last answer came, if it took no longer than that. This process's monotonic clock."""
        at, took_s = self._quick
        return at if took_s <= budget_s else -math.inf

    async def close(self) -> None:
        await self._redis.aclose()

    async def take_lease(self, gateway_id: str, lease_s: float, seen: int = 0) -> Lease | None:
        """The lease, new or renewed; ``None`` while another gateway leads, which is the normal case.

        ``seen``: the highest token that is known to have been used. A new one is higher.
        """
        asked_at = time.monotonic()
        arguments = [gateway_id, str(int(lease_s * 1000)), str(seen), str(FENCE_MAX)]
        token = await self._eval(_TAKE_LEASE, [keys.LEADER, keys.LEADER_TOKEN], arguments)
        return Lease(gateway_id, int(token), asked_at + lease_s * (1 - LEASE_MARGIN)) if token else None

    async def drop_lease(self, lease: Lease) -> None:
        await self._eval(_DROP_LEASE, [keys.LEADER], [lease.holder])

    async def publish_snapshot(self, lease: Lease, snapshot: Mapping[str, Any], number: int) -> bool:
        """Whether the lease is still this one's, whatever this gateway believes. ``number`` grows with each. In the
        snapshot, messages may stand as they are."""
        arguments = [lease.holder, msgspec.json.encode(snapshot).decode(), str(keys.SNAPSHOT_TTL_MS), str(number)]
        return bool(await self._eval(_PUBLISH, [keys.LEADER, keys.SNAPSHOT], arguments))

    async def snapshot(self) -> dict[str, Any] | None:
        value = await self._run(lambda: cast(Awaitable[str | None], self._redis.hget(keys.SNAPSHOT, "json")))
        return json.loads(value) if value is not None else None

    async def register(self, lease: Lease, instances: Mapping[str, Mapping[str, Any]]) -> bool:
        """Replaces the registry: an instance that is gone from the list is gone from Redis. The leader's alone."""
        arguments = [lease.holder, str(keys.INSTANCES_TTL_S)]
        for name, value in instances.items():
            arguments += [name, json.dumps(value)]
        return bool(await self._eval(_REGISTER, [keys.LEADER, keys.INSTANCES], arguments))

    async def registered(self) -> dict[str, Any]:
        values = await self._run(lambda: cast(Awaitable[dict[str, str]], self._redis.hgetall(keys.INSTANCES)))
        return {name: json.loads(value) for name, value in values.items()}

    async def beat(self, gateway_id: str, new_epoch: str) -> Beat:
        """This gateway lives. ``new_epoch``: to be taken by a Redis that has none."""
        arguments = [new_epoch, str(keys.EPOCH_TTL_MS), gateway_id, str(keys.GATEWAYS_TTL_MS), str(keys.GATEWAYS_MAX)]
        epoch, gateways, orders = await self._eval(_BEAT, [keys.EPOCH, keys.GATEWAYS, keys.TARGETS], arguments)
        return Beat(epoch, frozenset(gateways), dict(zip(orders[::2], orders[1::2], strict=True)))

    async def leave(self, gateway_id: str) -> None:
        """This gateway ends."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.zrem(keys.GATEWAYS, gateway_id)
        pipeline.delete(keys.calls(gateway_id))
        await self._run(pipeline.execute)

    async def order_target(self, url: str, *, added: bool) -> str | None:
        """The order as all gateways will read it; ``None`` if there are too many."""
        arguments = [url, str(int(added)), str(keys.TARGETS_MAX), str(keys.TARGETS_REMOVED_KEPT_S)]
        order: str | None = await self._eval(_ORDER_TARGET, [keys.TARGETS], arguments)
        return order

    async def restore_targets(self, orders: Mapping[str, str]) -> None:
        """After Redis has lost them. What was ordered since then is newer, and stays."""
        pipeline = self._redis.pipeline(transaction=False)
        for url, order in orders.items():
            pipeline.hsetnx(keys.TARGETS, url, order)
        await self._run(pipeline.execute)

    async def call(self, gateway_id: str, call: Mapping[str, Any]) -> None:
        arguments = [json.dumps(call), str(keys.CALLS_MAX), str(keys.CALLS_TTL_MS)]
        await self._eval(_CALL, [keys.calls(gateway_id)], arguments)

    async def next_call(self, gateway_id: str) -> Any | None:
        """What this gateway is asked; ``None`` if nothing comes for a moment."""
        return await self._pop(keys.calls(gateway_id), POP_S)

    async def answer(self, call_id: str, answer: Mapping[str, Any]) -> None:
        arguments = [json.dumps(answer), str(keys.GATEWAYS_MAX), str(keys.ANSWERS_TTL_MS)]
        await self._eval(_CALL, [keys.answers(call_id)], arguments)

    async def next_answer(self, call_id: str, wait_s: float) -> Any | None:
        return await self._pop(keys.answers(call_id), min(wait_s, POP_S))

    async def _pop(self, key: str, wait_s: float) -> Any | None:
        popped = await self._run(
            lambda: cast(Awaitable[list[str] | None], self._redis.blpop([key], wait_s)), may_wait=True
        )
        return _read(popped[1]) if popped is not None else None

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
        match _read(value):
            case {"gateway": str(gateway_id), "instance": str(instance_id), "model": str(model)}:
                return Owner(gateway_id, instance_id, model)
            case _:
                return None

    async def add_migrations(self, records: list[dict[str, Any]]) -> None:
        arguments = [str(keys.MIGRATIONS_MAX), str(keys.MIGRATIONS_TTL_S), *(json.dumps(record) for record in records)]
        await self._eval(_ADD_MIGRATIONS, [keys.MIGRATIONS], arguments)

    async def migrations(self, count: int) -> list[dict[str, Any]]:
        values = await self._run(lambda: cast(Awaitable[list[str]], self._redis.lrange(keys.MIGRATIONS, 0, count - 1)))
        return [json.loads(value) for value in values]

    async def keep_response(self, response_id: str, instance_id: str, boot_id: str) -> None:
        limits = [str(keys.RESPONSES_MAX), keys.RESPONSE]
        value = [f"{instance_id} {boot_id}", str(keys.RESPONSES_TTL_S), response_id]
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

    async def _run(self, command: Callable[[], Awaitable[Any]], *, may_wait: bool = False) -> Any:
        """``may_wait``: the answer takes time of its own, which says nothing about Redis."""
        asked_at = time.monotonic()
        try:
            answer = await command()
        except (RedisError, OSError, TimeoutError) as error:
            self.up = False
            self.failures += 1
            if isinstance(error, ReadOnlyError):
                # It is a replica now: whoever leads instead is found by the same name, but by a new connection only.
                await self._redis.connection_pool.disconnect(inuse_connections=False)
            raise StoreUnavailable(f"Redis: {error or type(error).__name__}") from error
        self.up, self.answered_at = True, time.monotonic()
        if not may_wait:
            self._quick = self.answered_at, self.answered_at - asked_at
        return answer


def _read(value: str) -> Any | None:
    """What is not JSON was not written by a gateway, and counts as not written at all."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
