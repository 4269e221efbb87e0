"""The gateway's benchmark: what it makes of its measurements, and that mock and client understand each other."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench.gateway_result import MODES, Run, bars, build_memory, build_result, describe
from loadtest.bench.load_client import Load, measure
from loadtest.bench.process_tree import cpu_s, memory_bytes, tree
from loadtest.bench.proxies import HOST, ROUTE, Place, start_mock, wait_until_serving
from loadtest.processes import free_port


def figures(cpu: float = 0.1, token_ms: float = 1.0, requests: int = 100) -> dict[str, Any]:
    return {
        "seconds": 2.0,
        "requests": requests,
        "events": 1000,
        "failures": [],
        "cpu_s": cpu,
        "token_ms_p50": token_ms,
        "token_ms_p99": token_ms * 2,
        "ttft_ms_p50": token_ms * 3,
        "ttft_ms_p99": None,
        "memory": [],
    }


def test_a_row_is_the_median_of_its_rounds_less_the_direct_run_of_the_same_round() -> None:
    runs = [Run(number, "direct", "paced", figures(token_ms=1.0 + number)) for number in range(3)]
    runs += [
        Run(number, "kvferry", "paced", figures(token_ms=1.0 + number + added, cpu=added))
        for number, added in enumerate((0.2, 0.1, 0.4))
    ]
    row = next(row for row in build_result(runs, {}, {})["rows"] if row["proxy"] == "kvferry")
    assert row["added_token_ms_p50"] == pytest.approx(0.2)
    assert row["added_token_ms_p50_spread"] == pytest.approx([0.1, 0.4])
    assert row["cpu_ms_per_1000_events"] == pytest.approx(200)
    assert (row["requests_per_s"], row["events_per_s"], row["rounds"]) == (50, 500, 3)


def test_bars_compare_with_the_peers_and_say_where_one_is_missing() -> None:
    runs = [
        Run(0, proxy, mode, figures(cpu, requests=requests))
        for mode in MODES
        for proxy, cpu, requests in (
            ("direct", 0.0, 1),
            ("kvferry", 0.1, 100),
            ("kvferry-2", 0.1, 180),
            ("vllm-router", 0.05, 1),
        )
    ]
    result = build_result(runs, {"litellm": "not there"}, {})
    found = {bar["bar"]: (bar["measured"], bar["met"]) for bar in bars(result["rows"])}
    assert found["burst: CPU per 1,000 events at most 1.5x vllm-router's"] == (2.0, False)
    assert found["burst: CPU per 1,000 events at most 0.05x litellm's"] == (None, None)
    assert found["two workers serve at least 1.7x the requests of one (short)"] == (1.8, True)
    assert "NOT MET" in describe(result)


@pytest.mark.parametrize(("growth_bytes", "met"), [(0, True), (10_000, False)])
def test_memory_is_flat_when_it_no_longer_grows_once_everything_has_filled_up(growth_bytes: int, met: bool) -> None:
    samples = [[count, 1_000_000 + min(count, 10) * 50_000 + count * growth_bytes] for count in range(101)]
    (bar,) = build_memory(figures() | {"memory": samples})["bars"]
    assert bar["met"] is met


async def test_the_client_counts_what_the_mock_sends(tmp_path: Path) -> None:
    mock = start_mock(Place(free_port(), "", "", tmp_path))
    url = f"http://{HOST}:{mock.command[-1]}"
    try:
        await wait_until_serving(url, mock)
        load = Load(url + ROUTE, 4, 3, 0, 1000, 0.0, 60.0, pid=mock.pid, requests_max=40, leave_every=5)
        found = await asyncio.wait_for(measure(load), 60)
    finally:
        mock.end()
    assert not found.failures
    assert found.requests >= 40
    assert 3 * found.requests * 0.5 < found.events <= 3 * (found.requests + 4)
    assert found.cpu_s is not None
    assert found.memory[-1][1] > 1_000_000


def test_a_process_tree_has_all_of_its_descendants() -> None:
    assert os.getpid() in tree(os.getppid())
    assert cpu_s(os.getpid()) > 0
    assert memory_bytes(os.getppid()) >= memory_bytes(os.getpid()) > sys.getsizeof("")
