"""The gateways of a cluster, as each of them sees the others: who lives, and what they say of their requests.

A client's stream is held by one gateway, and an operator may ask any. So the one that is asked puts a question into a
list of the other's in Redis, and gets the answer in a list of the question's own. Lists, because

- the processes behind one port (``--workers``) cannot be told apart by address, and replicas on other machines need not
  be able to reach each other: what they share for certain is Redis;
- the instance could be told instead, but a stream that it ends is a lost one to its gateway, which makes it good
  elsewhere; and it knows neither what the client has been sent nor a request that still waits;
- a list keeps what comes while its reader reconnects, and reading it is a question with an end of its own. A
  subscription is silent both when nothing is said and when it is dead.

Nothing of this is on a request's path. Without Redis each gateway answers for itself alone, and says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from gateway.cluster.records import Records
from gateway.cluster.store import Store
from gateway.cluster.targets import Targets
from gateway.errors import StoreUnavailable
from gateway.telemetry import Changes, cancel_all, log

ANSWER_WAIT_S = 2.0
"""For the other gateways; one that has just died or stands still is named as not having answered."""
ANSWERING_MAX = 64
ASKING_MAX = 8
RETRY_S = 0.5

Answer = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""A question's kind and its words; raises ``ValueError`` for one that it does not know."""


class Replicas:
    def __init__(self, gateway_id: str, store: Store, records: Records, targets: Targets, answer: Answer) -> None:
        self._gateway_id = gateway_id
        self._store = store
        self._records = records
        self._targets = targets
        self._answer = answer
        self._epoch: str | None = None
        self._others: frozenset[str] = frozenset()
        self._answering: set[asyncio.Task[None]] = set()
        self._asking = asyncio.Semaphore(ASKING_MAX)
        self._changes = Changes()

    @property
    def others(self) -> frozenset[str]:
        """That lived when Redis was last asked."""
        return self._others

    async def beat(self) -> None:
        """One round of the loop: says that this gateway lives, and follows what the cluster has in common."""
        try:
            beat = await self._store.beat(self._gateway_id, uuid.uuid4().hex)
            orders = dict(beat.orders)
            if self._epoch is not None and beat.epoch != self._epoch:
                orders = await self._write_again(orders)
        except StoreUnavailable as error:
            self._changes("redis", "away", reason=error.message, level=logging.WARNING)
            return
        self._changes("redis", "answers")
        self._epoch = beat.epoch
        self._others = beat.gateways - {self._gateway_id}
        self._targets.follow(orders)

    async def listen(self) -> None:
        """One round of the loop: waits a moment for a question, and answers it beside the next ones."""
        try:
            call = await self._store.next_call(self._gateway_id)
        except StoreUnavailable:  # `beat` speaks of it.
            await asyncio.sleep(RETRY_S)
            return
        if call is not None and len(self._answering) < ANSWERING_MAX:
            task = asyncio.create_task(self._reply(call))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def ask(
        self, gateways: Collection[str], kind: str, words: Mapping[str, Any], wait_s: float | None = None
    ) -> dict[str, Mapping[str, Any]]:
        """By gateway, the answers that came in time. Raises :class:`StoreUnavailable`."""
        if not gateways:
            return {}
        call_id, answers = uuid.uuid4().hex, dict[str, Mapping[str, Any]]()
        async with self._asking:
            ends_at = time.monotonic() + (ANSWER_WAIT_S if wait_s is None else wait_s)
            call = {"id": call_id, "kind": kind, "words": words}
            await asyncio.gather(*(self._store.call(gateway_id, call) for gateway_id in gateways))
            while len(answers) < len(gateways) and (left_s := ends_at - time.monotonic()) > 0:
                match await self._store.next_answer(call_id, left_s):
                    case {"gateway": str(gateway_id), "words": said} if gateway_id in gateways:
                        answers[gateway_id] = said if isinstance(said, dict) else {}
        return answers

    async def stop(self) -> None:
        await cancel_all(self._answering)
        if not self._store.up:
            return
        try:
            await self._store.leave(self._gateway_id)
        except StoreUnavailable:
            return  # It lapses by itself.

    async def _write_again(self, orders: Mapping[str, str]) -> dict[str, str]:
        """Redis has lost its memory: what it was told before is told again. Returns the orders as they are now."""
        known = dict(self._targets.orders)
        log("redis_emptied", level=logging.WARNING, orders=len(known))
        await self._store.restore_targets(known)
        self._records.refresh()
        return known | dict(orders)

    async def _reply(self, call: Any) -> None:
        try:
            call_id, kind, words = str(call["id"]), str(call["kind"]), dict(call["words"])
            answer = await self._answer(kind, words)
            await self._store.answer(call_id, {"gateway": self._gateway_id, "words": answer})
        except (KeyError, TypeError, ValueError, StoreUnavailable) as error:
            log("call_not_answered", level=logging.WARNING, reason=type(error).__name__)
