"""Of several workers, each tells the metrics of all."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gateway import worker_pages
from gateway.app import Gateway
from gateway.config import Settings
from gateway.worker_pages import Seat, WorkerPages
from tests.conftest import INTERVALS, Running, http_client, serve, until
from tests.fake_instance import SECRET, FakeInstance, instances
from tests.test_metrics import Samples, parsed


@pytest.fixture
def directory() -> Iterator[Path]:
    """Of a short name: the kernel takes no long one for a socket."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def seats(directory: Path, workers: int) -> list[Seat]:
    paths = tuple(str(directory / str(index)) for index in range(workers))
    found = []
    for index, path in enumerate(paths):
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(path)
        found.append(Seat(index, paths, listening))
    return found


@contextlib.asynccontextmanager
async def worker(seat: Seat, redis_url: str, fake: FakeInstance) -> AsyncIterator[Running]:
    gateway = Gateway(Settings(SECRET, (fake.url,), redis_url, intervals=INTERVALS), seat=seat)
    async with serve(gateway) as url, http_client(url) as client:
        yield Running(gateway, url, client)


async def page(running: Running, accept: str = "*/*") -> Samples:
    response = await running.client.get("/metrics", headers={"accept": accept})
    assert response.status_code == 200
    return parsed(response.text.replace("# EOF\n", ""))


async def test_every_worker_tells_the_metrics_of_all(redis_url: str, directory: Path) -> None:
    async with instances("a") as (a,):
        first, second = seats(directory, 2)
        async with worker(first, redis_url, a) as one, worker(second, redis_url, a) as other:
            for running, times in ((one, 1), (other, 3)):
                for _ in range(times):
                    await running.stream()
            for running in (one, other):
                found = await page(running)
                legs = "kvferry_legs_total{instance_id=a,kind=first,worker=%d}"
                assert [found[legs % index] for index in (0, 1)] == [1, 3]
                first_events = "kvferry_time_to_first_event_seconds_bucket{le=+Inf,model=kvferry-test,worker=%d}"
                assert [found[first_events % index] for index in (0, 1)] == [1, 3]
                assert all(found[f"kvferry_instance_healthy{{instance_id=a,worker={index}}}"] for index in (0, 1))
                assert all(found[f"kvferry_worker_up{{worker={index}}}"] for index in (0, 1))
                assert all(found[f"process_open_fds{{worker={index}}}"] > 0 for index in (0, 1))
            open_metrics = await page(one, "application/openmetrics-text; version=1.0.0")
            assert open_metrics[legs % 1] == 3


async def test_a_worker_that_is_not_there_is_left_out_and_the_page_says_so(redis_url: str, directory: Path) -> None:
    async with instances("a") as (a,):
        first, second = seats(directory, 2)
        second.listening.close()
        async with worker(first, redis_url, a) as one:
            found = await page(one)
            assert [found[f"kvferry_worker_up{{worker={index}}}"] for index in (0, 1)] == [1, 0]
            assert not any("worker=1" in name for name in found if "worker_up" not in name)


@pytest.mark.parametrize("says", [None, b"", b"\0" * 7, b"\0" * 7 + b"\2{]", b"\xff" * 8, b"\0" * 7 + b"\5[]"])
async def test_a_worker_that_talks_nonsense_or_not_at_all_is_left_out(
    says: bytes | None, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if says is None:
        monkeypatch.setattr(worker_pages, "PART_S", 0.1)
    first, second = seats(directory, 2)
    asked = asyncio.Event()

    async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        if says is not None:
            writer.write(says)
            writer.close()
        else:
            silent.append(writer)

    silent: list[asyncio.StreamWriter] = []
    async with await asyncio.start_unix_server(tell, sock=second.listening) as server:
        assert await WorkerPages(first, lambda: ["own"]).all() == [["own"], None]
        await asked.wait()
        for writer in silent:
            writer.close()
        server.close()
    first.listening.close()
    await asyncio.sleep(0)  # The last transports close.


async def test_who_asks_and_leaves_harms_nobody(directory: Path) -> None:
    (seat,) = seats(directory, 1)
    told = 0

    def own() -> list[str]:
        nonlocal told
        told += 1
        return ["x" * 4_000_000]

    pages = WorkerPages(seat, own)
    await pages.start()
    try:
        _, writer = await asyncio.open_unix_connection(seat.paths[0])
        writer.transport.abort()
        await until(lambda: told == 1)
        assert len((await worker_pages._ask(seat.paths[0]))[0]) == 4_000_000
    finally:
        pages.close()
