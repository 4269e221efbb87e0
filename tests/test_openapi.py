"""The page of the API, and random requests made from it: none of them is an error of ours, and all of them end."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from gateway.endpoints import ENDPOINTS
from tests.conftest import StartGateway
from tests.fake_instance import Exchange, instances

RUN_S = 15.0
"""A bound on the whole; what has not been tried by then is left out."""
EXAMPLES = 6
PAGE = "/openapi.json"


async def answers_anything(exchange: Exchange) -> None:
    await exchange.json(200, {"id": "resp_1", "choices": []})


def run(page: dict[str, Any], url: str) -> dict[str, int]:
    """Requests by path. Raises what a request raises, so one that hangs is its client's time-out."""
    asked: dict[str, int] = {}
    until = time.monotonic() + RUN_S
    for result in schemathesis.openapi.from_dict(page).get_all_operations():
        operation = result.ok()

        @given(case=operation.as_strategy())
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: schemathesis.Case, path: str = operation.path) -> None:
            if time.monotonic() < until:
                response = case.call(base_url=url, timeout=10)
                assert response.status_code not in (500, 502, 504), response.text
                asked[path] = asked.get(path, 0) + 1

        ask()
    return asked


async def test_the_page_lists_every_endpoint(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        page = (await running.client.get(PAGE)).json()
        listed = {(path, method.upper()) for path, operations in page["paths"].items() for method in operations}
        assert listed == {(endpoint.path, endpoint.method) for endpoint in ENDPOINTS}
        assert re.fullmatch(r"3\.1\.\d", page["openapi"])


@pytest.mark.filterwarnings("ignore")
async def test_random_requests_from_the_page_are_no_500_and_all_end(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = answers_anything
        page = (await running.client.get(PAGE)).json()
        asked = await asyncio.to_thread(run, page, running.url)
        assert asked
        assert running.gateway.counters.get("internal_errors") == 0
        assert running.gateway.dispatcher.in_flight("a") == 0
