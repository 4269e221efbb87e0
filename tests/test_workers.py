"""``kvferry serve --workers``: several gateways on one port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.workers import WORKER_VARIABLE, Workers, given_place, listen, run_workers
from loadtest.processes import ManagedProcess, free_port
from tests.conftest import ADMIN_KEY, until, until_true
from tests.fake_instance import SECRET, instances

STARTS_IN_S = 120.0
ASKED = 8
"""Two workers both answer one of so many connections, but for one time in 128, which the wait makes good."""

WORKER = "from gateway.workers import given_place; given_place(); import signal; signal.pause()"
PARENT = f"""
import sys
from gateway.workers import Workers, listen
sys.exit(Workers(listen("127.0.0.1", 0, 2), [sys.executable, "-c", {WORKER!r}], 5).run())
"""


async def workers(client: httpx.AsyncClient) -> dict[str, bool]:
    """Those that answer, and which of them leads."""
    found: dict[str, bool] = {}
    headers = {"authorization": f"Bearer {ADMIN_KEY}", "connection": "close"}
    for _ in range(ASKED):
        with contextlib.suppress(httpx.TransportError):
            answer = (await client.get("/admin/instances", headers=headers)).json()
            found[answer["gateway"]] = answer["leading"]
    return found


async def test_workers_share_a_port_and_one_of_them_leads(redis_url: str, tmp_path: Path) -> None:
    port = free_port()
    async with (
        instances("a") as (a,),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        environment = {
            **os.environ,
            "KVFERRY_SECRET": SECRET,
            "KVFERRY_INSTANCES": a.url,
            "KVFERRY_REDIS_URL": redis_url,
            "KVFERRY_ADMIN_KEY": ADMIN_KEY,
            "KVFERRY_PORT": str(port),
            "KVFERRY_SHUTDOWN_ACCEPT_S": "0",
        }
        command = [sys.executable, "-m", "gateway", "serve", "--workers", "2"]
        process = ManagedProcess("gateway", command, log=tmp_path / "gateway.log", environment=environment)

        async def two_with_a_leader() -> bool:
            process.require_running()
            return sorted((await workers(client)).values()) == [False, True]

        try:
            await until_true(two_with_a_leader, STARTS_IN_S)
            assert await counted_health(client, 8) == 8
            os.kill(process.pid, signal.SIGTERM)
            await until(lambda: process.exit_status is not None, STARTS_IN_S)
            assert process.exit_status == 0
            assert await workers(client) == {}
        finally:
            process.end()


async def counted_health(client: httpx.AsyncClient, asked: int) -> float:
    """How many of so many requests the page knows of, whichever worker has answered them and tells it."""
    for _ in range(asked):
        assert (await client.get("/ping", headers={"connection": "close"})).status_code == 200
    page = (await client.get("/metrics", headers={"authorization": f"Bearer {ADMIN_KEY}"})).text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    assert [sample.value for sample in samples if sample.name == "kvferry_worker_up"] == [1, 1]
    pings = [sample for sample in samples if sample.labels.get("route") == "/ping"]
    return sum(float(sample.value) for sample in pings if sample.name == "kvferry_requests_total")


@pytest.fixture
def parent(tmp_path: Path) -> ManagedProcess:
    return ManagedProcess("parent", [sys.executable, "-c", PARENT], log=tmp_path / "parent.log")


async def test_a_worker_that_was_killed_is_replaced(parent: ManagedProcess) -> None:
    try:
        await until(lambda: len(children(parent.pid)) == 2, STARTS_IN_S)
        killed, other = children(parent.pid)
        os.kill(killed, signal.SIGKILL)
        await until(lambda: len(children(parent.pid)) == 2 and killed not in children(parent.pid), STARTS_IN_S)
        assert other in children(parent.pid)
    finally:
        parent.end()


async def test_workers_end_with_their_parent_however_it_ends(parent: ManagedProcess) -> None:
    await until(lambda: len(started(children(parent.pid))) == 2, STARTS_IN_S)
    left = children(parent.pid)
    os.kill(parent.pid, signal.SIGKILL)
    try:
        await until(lambda: not any(runs(pid) for pid in left), STARTS_IN_S)
    finally:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        parent.end()


SLOW_WORKER = """
import signal
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
from gateway.workers import given_place
given_place()
while len(seen) < 2:
    signal.pause()
"""


async def test_a_second_signal_reaches_the_workers_too(tmp_path: Path) -> None:
    code = PARENT.replace(repr(WORKER), repr(SLOW_WORKER)).replace(", 5)", ", 600)")
    parent = ManagedProcess("parent", [sys.executable, "-c", code], log=tmp_path / "parent.log")
    try:
        await until(lambda: len(started(children(parent.pid))) == 2, STARTS_IN_S)
        os.kill(parent.pid, signal.SIGTERM)
        await asyncio.sleep(1)  # For the first one to arrive: two at once are one.
        assert parent.exit_status is None
        os.kill(parent.pid, signal.SIGTERM)
        await until(lambda: parent.exit_status is not None, STARTS_IN_S)
    finally:
        parent.end()


def test_workers_that_give_up_at_their_start_end_the_whole() -> None:
    assert Workers(listen("127.0.0.1", 0, 2), [sys.executable, "-c", "raise SystemExit(3)"], 5).run() == 1


def test_a_port_that_is_taken_is_an_error_although_it_could_be_shared(capsys: pytest.CaptureFixture[str]) -> None:
    sockets = listen("127.0.0.1", 0, 2)
    try:
        (port,) = {one.getsockname()[1] for one in sockets}
        for one in sockets:
            one.listen()
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", port, 2)
        assert run_workers("127.0.0.1", port, 2, [], 1) == 1
        assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    finally:
        for one in sockets:
            one.close()


@pytest.mark.parametrize("given", ["4", "", "x", "[]"])
def test_a_variable_that_was_meant_for_another_makes_no_worker(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKER_VARIABLE, given)
    assert given_place() is None


def test_a_worker_that_cannot_be_started_is_an_error_in_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    too_long = tmp_path / ("x" * 100)
    too_long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(too_long))
    assert run_workers("127.0.0.1", 0, 2, [], 1) == 1
    assert "cannot start a worker: AF_UNIX path too long" in capsys.readouterr().err


def children(parent: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return []


def started(pids: list[int]) -> list[int]:
    """Those that watch their parent: in a thread of its own."""
    return [pid for pid in pids if runs(pid) and len(list(Path(f"/proc/{pid}/task").iterdir())) == 2]


def runs(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
