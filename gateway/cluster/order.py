"""The order of the requests that wait for room, shared by all gateways through Redis.

A gateway tells Redis of its own waiting requests and is told who comes first among all, in one round trip for all
models, and only when there may be room. Ages are by Redis's clock alone. Entries of a gateway that is not heard of
vanish. When Redis does not answer within the budget each gateway goes on by itself at once, and asks again in the
background: nobody waits for it a second time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.cluster import keys
from gateway.cluster.budget import answered_within
from gateway.cluster.store import LAPSE, OWN, ScriptCall, Store
from gateway.counters import Counters
from gateway.errors import StoreUnavailable
from gateway.telemetry import log
from gateway.wire import PriorityClass, is_count

CLASSES = sorted(PriorityClass)
LOOKED_AT = 128
"""Entries that a look is shown of each model's line."""
COUNTED_AT_ONCE = 1_000
"""Entries that are looked at for those of dead gateways, while nobody waits here."""
PUT_AT_ONCE = 1_000
"""Entries that one look should tell at most; the next one tells the others."""
RETRY_S = 0.5

# KEYS: gateways, then order and details of a model. ARGV[2]: a gateway's life in ms. An entry whose gateway does not
# live goes.
_BEGIN = (
    OWN
    + LAPSE
    + """
own(KEYS[1], 'zset')
own(KEYS[2], 'zset')
own(KEYS[3], 'hash')
local clock = redis.call('TIME')
local now = (tonumber(clock[1]) - 1672531200) * 1e6 + tonumber(clock[2])
lapse(KEYS[1], now, ARGV[2] * 1000)
local alive = {}
local function details_of(id)
  local details = redis.call('HGET', KEYS[3], id)
  local gateway = details and string.match(details, '^(%S+)') or ''
  if alive[gateway] == nil then alive[gateway] = redis.call('ZSCORE', KEYS[1], gateway) and true or false end
  if alive[gateway] then return details end
  redis.call('ZREM', KEYS[2], id)
  redis.call('HDEL', KEYS[3], id)
end
"""
)

# KEYS: gateways, then order and details of a model. ARGV: gateway id, its life in ms, life of the keys in ms, number of
# entries to show, number of classes, number of entries to put, its former id; of each of those to put id, class, us
# waited, tokens; then the ids to take out. Scores are class * span + the time of arrival in us since 2023: a double
# holds them exactly.
# Returns {now in us, number of entries, id, score, details, id, ...}: the first ones in order, and each class's oldest.
# An entry keeps its score when it is told again, unless the clock was set by more than a second meanwhile.
_LOOK = (
    _BEGIN
    + """
local span = 1e15
redis.call('ZADD', KEYS[1], string.format('%.0f', now + tonumber(ARGV[2]) * 1000), ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('ZREM', KEYS[1], ARGV[7])
local at = 8
for i = 1, tonumber(ARGV[6]) do
  local score = tonumber(ARGV[at + 1]) * span + now - tonumber(ARGV[at + 2])
  local there = tonumber(redis.call('ZSCORE', KEYS[2], ARGV[at]))
  if not there or math.abs(there - score) > 1e6 then
    redis.call('ZADD', KEYS[2], string.format('%.0f', score), ARGV[at])
  end
  redis.call('HSET', KEYS[3], ARGV[at], ARGV[1] .. ' ' .. ARGV[at + 3])
  at = at + 4
end
for i = at, #ARGV do
  redis.call('ZREM', KEYS[2], ARGV[i])
  redis.call('HDEL', KEYS[3], ARGV[i])
end
local answer, shown = {string.format('%.0f', now), 0}, {}
local function show(found)
  for i = 1, #found, 2 do
    local id = found[i]
    local details = details_of(id)
    if details and not shown[id] then
      shown[id] = true
      answer[#answer + 1], answer[#answer + 2], answer[#answer + 3] = id, found[i + 1], details
    end
  end
end
show(redis.call('ZRANGE', KEYS[2], 0, tonumber(ARGV[4]) - 1, 'WITHSCORES'))
for class = 0, tonumber(ARGV[5]) - 1 do
  local low, high = string.format('%.0f', class * span), string.format('%.0f', class * span + span - 1)
  show(redis.call('ZRANGEBYSCORE', KEYS[2], low, high, 'WITHSCORES', 'LIMIT', 0, 1))
end
answer[2] = redis.call('ZCARD', KEYS[2])
if answer[2] > 0 then
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
  redis.call('PEXPIRE', KEYS[3], ARGV[3])
end
return answer
"""
)
SPAN_US = 10**15

# KEYS: as above. ARGV: -, a gateway's life in ms, number of entries to look at. Returns how many wait. Those of
# gateways that have died do not count: none of them if no other is left, else none of those that are looked at.
_COUNT = (
    _BEGIN
    + """
if redis.call('ZCARD', KEYS[1]) == 0 then
  redis.call('DEL', KEYS[2], KEYS[3])
  return 0
end
for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, tonumber(ARGV[3]) - 1)) do details_of(id) end
return redis.call('ZCARD', KEYS[2])
"""
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A request that waits. ``gateway_id``: whose it is; only that one starts it."""

    request_id: str
    priority_class: PriorityClass
    waited_s: float
    tokens: int
    gateway_id: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """``put``: own entries that are new, have changed, or are told again so that they last."""

    model: str
    put: Sequence[Entry]
    take_out: Collection[str]


@dataclass(frozen=True, slots=True)
class Line:
    """The head of a model's line, of all gateways, in no particular order; ``length`` is all of it."""

    entries: tuple[Entry, ...]
    length: int


class SharedOrder:
    """``store`` is its own, so that nobody else's calls stand before a look."""

    def __init__(self, store: Store, gateway_id: str, budget_s: float, counters: Counters) -> None:
        self._store = store
        self._gateway_id = gateway_id
        self._times_shared = 1
        self._former_id = "-"
        self._budget_s = budget_s
        self._counters = counters
        self._turn = asyncio.Lock()
        """One asks at a time: of the answer that does not come, the next one hears as well."""
        self._asking: asyncio.Task[list[Any]] | None = None
        """Asked in vain, or to see whether Redis is back."""
        self._tried_at = time.monotonic()
        self._took_s = 0.0
        """The last answer."""
        self.is_shared = True
        """False: Redis has not answered, and this gateway's order is its own until it does."""

    @property
    def own_id(self) -> str:
        """What this gateway's entries are told under: another one each time that Redis has been away. What became of
        the former ones meanwhile was not told, and they count no longer."""
        return f"{self._gateway_id}.{self._times_shared}"

    async def look(self, asks: Sequence[Ask]) -> list[Line] | None:
        """A line for each, or ``None`` without Redis. Waits no longer than the budget."""
        if not self.is_shared:
            return None
        self._counters.add("waiting_looks")
        answers = await self._answered([self._script(ask) for ask in asks])
        return None if answers is None else [_line(answer) for answer in answers]

    async def lengths(self, models: Sequence[str]) -> dict[str, int] | None:
        """How many wait for each model, anywhere."""
        if not self.is_shared or not models:
            return None
        arguments = ("", str(keys.WAITING_GATEWAY_TTL_MS), str(COUNTED_AT_ONCE))
        calls = [ScriptCall(_COUNT, _names(model), arguments) for model in models]
        answers = await self._answered(calls)
        return None if answers is None else dict(zip(models, answers, strict=True))

    async def try_again(self) -> bool:
        """While Redis is away: whether it is back. Asks now and then, and waits for nothing."""
        if self._asking is not None and not self._asking.done():
            return False  # The last answer is still waited for.
        if self._asking is not None and self._succeeded(self._asking) and self._took_s <= self._budget_s:
            self._asking, self.is_shared = None, True
            self._former_id = self.own_id
            self._times_shared += 1
            log("waiting_shared", level=logging.WARNING)
            return True
        if time.monotonic() - self._tried_at >= RETRY_S:
            self._tried_at = time.monotonic()
            self._asking = asyncio.create_task(self._run([self._script(Ask("", (), ()))]), name="waiting")
        return False

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def _script(self, ask: Ask) -> ScriptCall:
        lives = (str(keys.WAITING_GATEWAY_TTL_MS), str(keys.WAITING_TTL_MS))
        arguments = [self.own_id, *lives, str(LOOKED_AT), str(len(CLASSES)), str(len(ask.put)), self._former_id]
        for one in ask.put:
            waited_us = str(max(0, round(one.waited_s * 1e6)))
            arguments += [one.request_id, str(CLASSES.index(one.priority_class)), waited_us, str(one.tokens)]
        return ScriptCall(_LOOK, _names(ask.model), (*arguments, *ask.take_out))

    async def _answered(self, calls: list[ScriptCall]) -> list[Any] | None:
        """``None``, and from now on alone, if no answer comes within the budget."""
        async with self._turn:
            return await self._answered_in_time(calls) if self.is_shared else None

    async def _answered_in_time(self, calls: list[ScriptCall]) -> list[Any] | None:
        asking = asyncio.create_task(self._run(calls), name="waiting")
        try:
            if not await answered_within(asking, self._budget_s):
                self._asking = asking
                self._trip("no answer in time")
                return None
        except asyncio.CancelledError:
            asking.cancel()
            raise
        if not self._succeeded(asking):
            self._trip(str(asking.exception()))
            return None
        return asking.result()

    async def _run(self, calls: list[ScriptCall]) -> list[Any]:
        asked_at = time.monotonic()
        try:
            return await self._store.run_scripts(calls)
        finally:
            self._took_s = time.monotonic() - asked_at

    def _succeeded(self, asked: asyncio.Task[list[Any]]) -> bool:
        if (error := asked.exception()) is None:
            return True
        if not isinstance(error, StoreUnavailable):
            raise error
        return False

    def _trip(self, reason: str) -> None:
        """Changes of state only: one line when Redis goes, one when it is back."""
        self.is_shared, self._tried_at = False, time.monotonic()
        log("waiting_alone", level=logging.WARNING, reason=reason)


def _names(model: str) -> tuple[str, ...]:
    return keys.WAITING_GATEWAYS, keys.waiting_order(model), keys.waiting_details(model)


def _line(answer: list[Any]) -> Line:
    """Without what cannot be read: another version's entries, which that starts by itself."""
    now, length, *found = answer
    read = (_entry(int(now), *one) for one in zip(found[::3], found[1::3], found[2::3], strict=True))
    return Line(tuple(entry for entry in read if entry is not None), length)


def _entry(now_us: int, request_id: str, score: str, details: str) -> Entry | None:
    gateway_id, _, tokens = details.partition(" ")
    if not is_count(tokens) or not 0 <= float(score) < len(CLASSES) * SPAN_US:
        return None
    index, arrived_us = divmod(int(float(score)), SPAN_US)
    return Entry(request_id, CLASSES[index], max(0, now_us - arrived_us) / 1e6, int(tokens), gateway_id)
