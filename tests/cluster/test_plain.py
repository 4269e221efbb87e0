"""What vLLM's metrics page says, and what it does not say."""

from __future__ import annotations

import pytest

from gateway import wire
from gateway.cluster.plain import Lives, plain_id, read_metrics
from tests.fake_instance import metrics_page


def test_a_page_of_one_engine_is_read() -> None:
    reading = read_metrics(metrics_page(running=3, waiting=2, kv_usage=0.25, tokens=70, started=1234.5))
    assert reading.load is not None
    assert (reading.load.requests_running, reading.load.requests_waiting, reading.load.kv_usage) == (3, 2, 0.25)
    assert (reading.load.blocks_total, reading.load.block_size, reading.load.tokens) == (1000, 16, 70)
    assert reading.started == "1234.5"


def test_samples_of_several_engines_are_summed_and_the_fullest_cache_counts() -> None:
    page = "".join(
        f'vllm:num_requests_running{{engine="{engine}"}} {engine + 1}\n'
        f'vllm:num_requests_waiting{{engine="{engine}"}} 10\n'
        f'vllm:kv_cache_usage_perc{{engine="{engine}"}} 0.{engine + 1}\n'
        for engine in range(3)
    )
    load = read_metrics(page).load
    assert load is not None
    assert (load.requests_running, load.requests_waiting, load.kv_usage, load.tokens) == (6, 30, 0.3, None)
    assert load.blocks_total > 0


@pytest.mark.parametrize(
    "page",
    [
        "",
        "<html><body>vllm:num_requests_running</body></html>",
        metrics_page().replace("vllm:", "renamed:"),
        metrics_page().replace("num_requests_waiting", "num_waiting"),
        metrics_page().replace("kv_cache_usage_perc", "kv"),
        metrics_page(running=5).replace("} 5.0", "} NaN"),
        metrics_page(running=5).replace("} 5.0", "} -1"),
        metrics_page(running=5).replace("} 5.0", "} five"),
        metrics_page(running=5).replace('",model_name=', "").replace('"} 5.0', '{"} 5.0'),
    ],
)
def test_what_cannot_be_read_is_unknown_and_not_idle(page: str) -> None:
    assert read_metrics(page).load is None


def test_a_server_has_another_life_when_its_process_started_at_another_time() -> None:
    lives = Lives()
    first = lives.boot_id("u", "1.0")
    assert lives.boot_id("u", None) == first, "a page that did not come says nothing"
    assert lives.boot_id("u", "1.0") == first
    second = lives.boot_id("u", "2.0")
    assert second != first
    unknown = lives.boot_id("v", None)
    assert lives.boot_id("v", "3.0") == unknown, "the first time that it is known, it is the same life"
    assert lives.boot_id("v", "4.0") != unknown


@pytest.mark.parametrize("url", ["http://10.0.0.1:8001", "https://a.example", "http://[::1]:8000", "http://a/b/c d"])
def test_a_servers_address_makes_an_id(url: str) -> None:
    assert wire.is_identifier(plain_id(url))
    assert plain_id("http://10.0.0.1:8001") == "10.0.0.1:8001"
