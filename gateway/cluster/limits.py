"""The limits of keys, counted in Redis for all gateways together.

Redis decides, in one script a request and by its own clock, within a budget. When it does not answer, each gateway
applies the limits by itself, from what it has let in, and asks Redis again in the background alone: no request fails
for it, and none waits a second time. All calls go out in order, those of a moment in one round trip.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from gateway.cluster import keys
from gateway.cluster.budget import answered_within
from gateway.cluster.store import LAPSE, OWN, ScriptCall, Store
from gateway.counters import Counters
from gateway.errors import StoreUnavailable
from gateway.policy.limits import WINDOW_S, Granted, KeyLimits, Ledger, Refused
from gateway.telemetry import log

RELEASES_MAX = 10_000
"""Places given back while Redis is away; the oldest are let go, and lapse by themselves."""
RENEWED_AT_ONCE = 500
SENT_AT_ONCE = 200
CLOSE_S = 1.0
PLACE_MS = str(keys.LIMIT_PLACE_TTL_S * 1000)

_WINDOW = f"""
local clock = redis.call('TIME')
local now = tonumber(clock[1])
local now_ms = now * 1000 + math.floor(tonumber(clock[2]) / 1000)
local window = {WINDOW_S}
"""

# KEYS: requests, tokens, running. ARGV: request id, requests and tokens a minute, concurrent requests (-1: no limit),
# tokens asked for, life of a place in ms, life of a window in s.
# Returns {second, requests left, tokens left} or {-1 - the number of the limit, seconds to wait}.
# Asked again for a request that is in already, it counts nothing twice. What cannot have been counted here goes.
_ADMIT = (
    OWN
    + LAPSE
    + _WINDOW
    + """
own(KEYS[1], 'hash')
own(KEYS[2], 'hash')
own(KEYS[3], 'zset')
local function count(key)
  local total, ages = 0, {}
  local fields = redis.call('HGETALL', key)
  for i = 1, #fields, 2 do
    local age = string.match(fields[i], '^%d+$') and now - tonumber(fields[i]) or math.huge
    local amount = string.match(fields[i + 1], '^-?%d+$') and tonumber(fields[i + 1]) or math.huge
    if age > window or age < -window or math.abs(amount) > 1e15 then
      redis.call('HDEL', key, fields[i])
    else
      total = total + amount
      age = math.max(age, 0)
      ages[age] = (ages[age] or 0) + amount
    end
  end
  return total, ages
end
local function wait(total, ages, room)
  for age = window, 0, -1 do
    total = total - (ages[age] or 0)
    if total <= room then return window + 1 - age end
  end
  return window + 1
end
local requests_max, tokens_max, running_max = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local asked = tonumber(ARGV[5])
lapse(KEYS[3], now_ms, ARGV[6])
local requests, request_ages = count(KEYS[1])
local tokens, token_ages = count(KEYS[2])
if not redis.call('ZSCORE', KEYS[3], ARGV[1]) then
  if running_max >= 0 and redis.call('ZCARD', KEYS[3]) >= running_max then return {-1, 1} end
  if requests_max >= 0 and requests + 1 > requests_max then
    return {-2, wait(requests, request_ages, requests_max - 1)}
  end
  if tokens_max >= 0 and tokens + asked > tokens_max then
    return {-3, wait(tokens, token_ages, tokens_max - asked)}
  end
  requests, tokens = requests + 1, tokens + asked
  if requests_max >= 0 then
    redis.call('HINCRBY', KEYS[1], now, 1)
    redis.call('EXPIRE', KEYS[1], ARGV[7])
  end
  if tokens_max >= 0 then
    redis.call('HINCRBY', KEYS[2], now, asked)
    redis.call('EXPIRE', KEYS[2], ARGV[7])
  end
end
redis.call('ZADD', KEYS[3], now_ms + ARGV[6], ARGV[1])
redis.call('PEXPIRE', KEYS[3], ARGV[6])
return {now, requests_max - requests, tokens_max - tokens}
"""
)
_LIMITS = ("concurrent_requests", "requests_per_minute", "tokens_per_minute")

# KEYS: tokens, running. ARGV: request id, the second it was counted under, tokens to add.
# Only the one that takes the place away settles, so that a call that was sent twice counts once.
_RELEASE = (
    OWN
    + _WINDOW
    + """
own(KEYS[1], 'hash')
own(KEYS[2], 'zset')
if redis.call('ZREM', KEYS[2], ARGV[1]) == 0 then return 0 end
local more = tonumber(ARGV[3])
if tonumber(ARGV[2]) < now - window then
  ARGV[2] = now
  more = math.max(more, 0)
end
if more ~= 0 and redis.call('EXISTS', KEYS[1]) == 1 then
  local there = redis.call('HGET', KEYS[1], ARGV[2]) or '0'
  if not string.match(there, '^-?%d+$') or #there > 16 then redis.call('HDEL', KEYS[1], ARGV[2]) end
  redis.call('HINCRBY', KEYS[1], ARGV[2], more)
end
return 1
"""
)

# KEYS: running. ARGV: life of a place in ms, request ids. Also puts in those that were let in while Redis was away.
_RENEW = (
    OWN
    + _WINDOW
    + """
own(KEYS[1], 'zset')
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], now_ms + ARGV[1], ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
"""
)

# KEYS: probe. ARGV: its life in s. A write, because a Redis that only reads does not count.
_PROBE = "return redis.call('SET', KEYS[1], '1', 'EX', ARGV[1])"
_PROBE_CALL = ScriptCall(_PROBE, (keys.LIMIT_PROBE,), (str(keys.LIMIT_PROBE_TTL_S),))


@dataclass(slots=True)
class Place:
    """One request's use of its key, from its admission to :meth:`Limiter.release`."""

    key_name: str
    limits: KeyLimits
    request_id: str
    tokens: int
    """As estimated when it came."""
    granted: Granted
    booked_s: float
    """By this process's own clock; ``granted.second`` is the clock of who has decided."""
    is_shared: bool


@dataclass(slots=True)
class _Call:
    script: ScriptCall
    is_release: bool
    answer: asyncio.Future[Any]


class Limiter:
    """``store`` is its own, so that nobody else's calls stand before a request's."""

    def __init__(self, store: Store, budget_s: float, counters: Counters) -> None:
        self._store = store
        self._budget_s = budget_s
        self._counters = counters
        self._ledgers: dict[str, Ledger] = {}
        self._places: dict[str, Place] = {}
        self._queue: deque[_Call] = deque()
        self._sending: asyncio.Task[bool] | None = None
        self._renewed_at = time.monotonic()
        self.is_shared = True
        """False: Redis has not answered, and the limits are this gateway's own until it does."""

    async def admit(self, key_name: str, limits: KeyLimits, request_id: str, tokens: int) -> Place | Refused:
        tokens, now_s = limits.booked(tokens), time.monotonic()
        asks = self.is_shared
        verdict = await self._ask(key_name, limits, request_id, tokens) if asks else None
        ledger = self._ledgers.setdefault(key_name, Ledger())
        is_shared = verdict is not None
        if verdict is None:
            self._counters.add("limits_applied_alone")
            verdict = ledger.judge(limits, tokens, now_s)
        if isinstance(verdict, Refused):
            self._counters.add("limits_refused", limit=verdict.limit)
            if asks and not is_shared:
                self._give_up(key_name, request_id)
            return verdict
        ledger.book(request_id, tokens, now_s)
        place = Place(key_name, limits, request_id, tokens, verdict, now_s, is_shared)
        self._places[request_id] = place
        return place

    def release(self, place: Place, tokens_used: int) -> asyncio.Future[Any] | None:
        """At once, and only once: no cancellation can come between. The future is done when Redis knows of it."""
        if self._places.pop(place.request_id, None) is None:
            return None
        more = tokens_used - place.tokens
        self._ledgers[place.key_name].settle(place.request_id, place.booked_s, more, time.monotonic())
        # What was let in without Redis is not counted there, and so not corrected either.
        settled = (place.granted.second, more) if place.is_shared else (0, 0)
        return self._put_release(place.key_name, place.request_id, *settled)

    async def release_and_wait(self, place: Place, tokens_used: int) -> None:
        """So that a client that has its whole reply finds its place free, whichever gateway it goes to next."""
        told = self.release(place, tokens_used)
        if told is not None and self.is_shared and not await self._answered(told):
            self._trip("no answer in time")

    async def tick(self) -> None:
        """A round of the background loop: renews the places, and while Redis is away looks whether it is back."""
        if not self.is_shared:
            await self._try_again()
        elif self._sending is None:
            self._put(_PROBE_CALL)  # So that the first request finds a connection.
            self._send()
        elif self._places and time.monotonic() - self._renewed_at >= keys.LIMIT_PLACE_RENEWAL_S:
            self._renew()
            self._send()

    async def close(self) -> None:
        """What is left is given back, if Redis takes it."""
        if self.is_shared and self._queue:
            self._send()
        if self._sending is not None:
            await asyncio.wait({self._sending}, timeout=CLOSE_S)
            self._sending.cancel()
            await asyncio.wait({self._sending})

    async def _ask(self, key_name: str, limits: KeyLimits, request_id: str, tokens: int) -> Granted | Refused | None:
        """``None`` if Redis has not answered in time."""
        asked = self._put(_admission(key_name, limits, request_id, tokens))
        self._send()
        try:
            if await self._answered(asked.answer):
                return _verdict(asked.answer.result(), limits)
        except asyncio.CancelledError:
            self._give_up(key_name, request_id)
            raise
        self._trip("no answer in time")
        return None

    async def _answered(self, answer: asyncio.Future[Any]) -> bool:
        """Whether it comes within the budget, and while the others' answers do."""
        return await answered_within(answer, self._budget_s, lambda: self.is_shared)

    def _give_up(self, key_name: str, request_id: str) -> None:
        """A question that nobody waits for any longer: Redis may have said yes, or may still do so."""
        self._put_release(key_name, request_id, 0, 0)

    def _put_release(self, key_name: str, request_id: str, second: int, more: int) -> asyncio.Future[Any]:
        names = (keys.limit_tokens(key_name), keys.limit_running(key_name))
        call = self._put(ScriptCall(_RELEASE, names, (request_id, str(second), str(more))), is_release=True)
        if self.is_shared:
            self._send()
        elif len(self._queue) > RELEASES_MAX:
            self._queue.popleft().answer.cancel()
        return call.answer

    def _put(self, script: ScriptCall, *, is_release: bool = False) -> _Call:
        call = _Call(script, is_release, asyncio.get_running_loop().create_future())
        self._queue.append(call)
        return call

    def _renew(self) -> None:
        self._renewed_at = time.monotonic()
        names: dict[str, list[str]] = {}
        for place in self._places.values():
            names.setdefault(place.key_name, []).append(place.request_id)
        for name, ids in names.items():
            for begin in range(0, len(ids), RENEWED_AT_ONCE):
                arguments = (PLACE_MS, *ids[begin : begin + RENEWED_AT_ONCE])
                self._put(ScriptCall(_RENEW, (keys.limit_running(name),), arguments))

    def _send(self) -> asyncio.Task[bool]:
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._drain(), name="limits")
        return self._sending

    async def _drain(self) -> bool:
        """Sends all that waits, in order. False when Redis fails: then only what must still be said is kept."""
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), SENT_AT_ONCE))]
            batch = [call for call in batch if call.is_release or not call.answer.done()]
            try:
                answers = await self._store.run_scripts([call.script for call in batch])
            except StoreUnavailable as error:
                self._fail(batch, error)
                return False
            for call, answer in zip(batch, answers, strict=True):
                if not call.answer.done():
                    call.answer.set_result(answer)
        return True

    def _fail(self, batch: list[_Call], error: StoreUnavailable) -> None:
        calls = [*batch, *self._queue]
        releases = [call for call in calls if call.is_release][-RELEASES_MAX:]
        self._queue = deque(releases)
        for call in calls:
            if not call.is_release:
                call.answer.cancel()
        self._trip(error.message)

    def _trip(self, reason: str) -> None:
        """Changes of state only: one line when Redis goes, one when it is back."""
        if self.is_shared:
            self.is_shared = False
            log("limits_alone", level=logging.WARNING, reason=reason)

    async def _try_again(self) -> None:
        if self._sending is not None and not self._sending.done():
            return  # The last answer is still waited for.
        asked_at = time.monotonic()
        self._renew()
        self._put(_PROBE_CALL)
        if await self._send() and time.monotonic() - asked_at <= self._budget_s:
            self.is_shared = True
            log("limits_shared", level=logging.WARNING)


def _admission(key_name: str, limits: KeyLimits, request_id: str, tokens: int) -> ScriptCall:
    maxima = (limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent_requests)
    names = (keys.limit_requests(key_name), keys.limit_tokens(key_name), keys.limit_running(key_name))
    said = ["-1" if maximum is None else str(maximum) for maximum in maxima]
    return ScriptCall(_ADMIT, names, (request_id, *said, str(tokens), PLACE_MS, str(keys.LIMIT_WINDOW_TTL_S)))


def _verdict(answer: list[int], limits: KeyLimits) -> Granted | Refused:
    if answer[0] < 0:
        return Refused(_LIMITS[-1 - answer[0]], answer[1])
    second, requests, tokens = answer
    return Granted(
        second,
        None if limits.requests_per_minute is None else max(0, requests),
        None if limits.tokens_per_minute is None else max(0, tokens),
    )
