"""A connection that is not there in time, and whose fault that is."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.cluster.members import Instance
from gateway.config import Budgets
from gateway.connection import ConnectTimeout
from gateway.errors import LegNotConnected
from gateway.serving.backend import Backend, Call

CONNECT_S = 0.05
INSTANCE = Instance("a", "http://127.0.0.1:9", "boot")


class Pool:
    """As much of a pool as a leg asks for. The first connection is not there in time."""

    def __init__(self, stands_still_s: float) -> None:
        self.posts = 0
        self._stands_still_s = stands_still_s

    async def request(self, *_: object, **__: object) -> Any:
        self.posts += 1
        if self.posts == 1:
            time.sleep(self._stands_still_s)  # noqa: ASYNC251
            raise ConnectTimeout
        return SimpleNamespace(status=200, headers=CIMultiDictProxy(CIMultiDict()), close=lambda: None)

    def close(self) -> None:
        pass


async def head(pool: Pool) -> int:
    backend = Backend("secret", "", Budgets(connect_s=CONNECT_S))
    backend._pools[INSTANCE.instance_id] = (INSTANCE, pool)  # type: ignore[assignment]
    with backend.open(INSTANCE, Call("r", "/v1/completions", b"{}"), lambda: None, stream=True) as leg:
        try:
            return (await leg.head()).status
        finally:
            await backend.close()


async def test_a_gateway_that_stood_still_while_it_connected_tries_again() -> None:
    pool = Pool(stands_still_s=CONNECT_S + 0.3)
    assert await head(pool) == 200
    assert pool.posts == 2


async def test_an_instance_that_is_out_of_reach_is_asked_once() -> None:
    pool = Pool(stands_still_s=CONNECT_S)
    with pytest.raises(LegNotConnected):
        await head(pool)
    assert pool.posts == 1
