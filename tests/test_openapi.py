"""The page of the API, and random requests made from it: none of them is an error of ours, and all of them end."""

from __future__ import annotations

import asyncio
import random
import re
import time
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core.result import Ok

from gateway.endpoints import ENDPOINTS
from tests.conftest import StartGateway
from tests.fake_instance import Exchange, instances

RUN_S = 10.0
"""A bound on the whole; what has not been tried by then is left out, on a slow machine. Each run begins elsewhere."""
PAGE = "/openapi.json"
QUICK = settings(
    max_examples=3,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


async def answers_anything(exchange: Exchange) -> None:
    await exchange.json(200, {"id": "resp_1", "choices": []})


def run(page: dict[str, Any], url: str) -> set[str]:
    """The paths that were asked. Raises what a request raises, so one that hangs is its client's time-out."""
    asked: set[str] = set()

    def ask(case: schemathesis.Case[Any]) -> None:
        if time.monotonic() < until or not asked:
            response = case.call(base_url=url, timeout=10)
            assert response.status_code < 500, response.text
            asked.add(case.operation.path)

    results = list(schemathesis.openapi.from_dict(page).get_all_operations())
    begin = random.randrange(len(results))
    until = time.monotonic() + RUN_S
    print(f"begins with operation {begin}")
    for result in results[begin:] + results[:begin]:
        assert isinstance(result, Ok), result
        if time.monotonic() < until or not asked:
            QUICK(given(case=result.ok().as_strategy())(ask))()
    return asked


async def test_the_page_lists_every_endpoint(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        page = (await running.client.get(PAGE)).json()
        listed = {(path, method.upper()) for path, operations in page["paths"].items() for method in operations}
        assert listed == {(endpoint.path, endpoint.method) for endpoint in ENDPOINTS}
        assert re.fullmatch(r"3\.1\.\d", page["openapi"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
async def test_random_requests_from_the_page_are_no_500_and_all_end(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = answers_anything
        page = (await running.client.get(PAGE)).json()
        asked = await asyncio.to_thread(run, page, running.url)
        assert asked
        assert running.gateway.counters.get("internal_errors") == 0
        assert running.gateway.dispatcher.in_flight("a") == 0
