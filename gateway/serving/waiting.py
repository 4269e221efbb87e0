"""A request for which no instance is usable at the moment waits a little here, instead of failing at once.

A machine that stands still for seconds makes all its instances look gone; a model may have one instance, which is just
being restarted. This is the seam where a queue that gateways share can come in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

from gateway.cluster.members import Instance
from gateway.counters import Counters
from gateway.errors import NoInstance, Overloaded
from gateway.policy.view import ModelGroup
from gateway.serving.dispatch import Dispatcher

LOOK_S = 0.05


class Waiting:
    def __init__(self, dispatcher: Dispatcher, wait_s: float, waiters_max: int, counters: Counters) -> None:
        self._dispatcher = dispatcher
        self._wait_s = wait_s
        self._waiters_max = waiters_max
        self._counters = counters
        self._waiters = 0

    async def choose(
        self,
        model: str | None,
        exclude: Collection[str] = (),
        group: ModelGroup | None = None,
        *,
        is_new: bool = True,
    ) -> Instance:
        """As :meth:`Dispatcher.choose`, later. Full queues are not waited for: waiting here would only hide them."""
        try:
            return self._dispatcher.choose(model, exclude, group, is_new=is_new)
        except Overloaded:
            raise
        except NoInstance:
            if self._waiters >= self._waiters_max or not self._dispatcher.may_come(model, exclude, group):
                raise
        self._counters.add("requests_waited")
        self._waiters += 1
        try:
            return await self._wait(model, exclude, group, is_new)
        finally:
            self._waiters -= 1

    async def _wait(
        self, model: str | None, exclude: Collection[str], group: ModelGroup | None, is_new: bool
    ) -> Instance:
        ends_at = time.monotonic() + self._wait_s
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                return self._dispatcher.choose(model, exclude, group, is_new=is_new)
            except Overloaded:
                raise
            except NoInstance:
                if time.monotonic() >= ends_at:
                    raise
