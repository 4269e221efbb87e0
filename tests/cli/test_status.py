"""``kvferry status`` and ``kvferry instances``."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import signal
import sys

import pytest

from gateway.cli.command import main
from gateway.cli.output import table
from loadtest.processes import free_port
from tests.cli.conftest import Kvferry
from tests.conftest import ADMIN_KEY, INTERVALS, Running, StartGateway, until, until_true
from tests.fake_instance import FakeInstance, instances, metrics_page
from tests.test_replicas import knows_each_other

INSTANCE_KEYS = {
    *("id", "url", "source", "state", "reason", "models", "freeness_steps", "requests_running", "requests_waiting"),
    *("blocks_total", "blocks_used", "step_ms", "report_age_ms", "plugin_version", "vllm_version", "boot_id"),
}
"""Scripts read them: docs/cli.md."""


async def reported(running: Running, *names: str) -> None:
    members = running.gateway.members
    await until(lambda: all(one.report is not None for one in members.all() if one.instance.instance_id in names))


async def test_status_shows_each_instance_and_who_leads(start_gateway: StartGateway, kvferry: Kvferry) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.report_changes = {"blocks_free": 880, "requests_running": 3, "requests_waiting": 1, "step_ms": 12.25}
        a.freeness_steps = 640.4
        await until(lambda: running.gateway.leader.is_leading)
        await until_true(lambda: _sees(running, "a", 3))
        ran = await kvferry("status", url=running.url)
        assert (ran.status, ran.err) == (0, "")
        assert ran.rows == [
            ["GATEWAY", "URL", "LEADS"],
            [running.gateway.gateway_id, running.url, "yes"],
            ["INSTANCE", "STATE", "FREENESS", "RUNNING", "WAITING", "BLOCKS", "STEP", "VERSION"],
            ["a", "ready", "640", "3", "1", "120/1000", "12.2 ms", "0 on 0.32.0"],
            ["b", "ready", f"{b.freeness_steps:.0f}", "0", "0", "0/1000", "10.0 ms", "0 on 0.32.0"],
        ]
        seen = (await kvferry("status", "--json")).json
        assert set(seen) == {"leader", "gateways", "instances"}
        assert seen["leader"] == running.gateway.gateway_id
        expected = {"id": running.gateway.gateway_id, "url": running.url, "leading": True, "error": None}
        assert seen["gateways"] == [expected]
        assert all(set(one) == INSTANCE_KEYS for one in seen["instances"])
        assert seen["instances"][0] | {"report_age_ms": 0} == {
            "id": "a",
            "url": a.url,
            "source": "listed",
            "state": "ready",
            "reason": None,
            "models": list(a.models),
            "freeness_steps": 640.4,
            "requests_running": 3,
            "requests_waiting": 1,
            "blocks_total": 1000,
            "blocks_used": 120,
            "step_ms": 12.25,
            "report_age_ms": 0,
            "plugin_version": "0",
            "vllm_version": "0.32.0",
            "boot_id": a.boot_id,
        }


async def _sees(running: Running, instance_id: str, requests: int) -> bool:
    shown = (await running.admin("GET", "/admin/instances")).json()["instances"]
    report = next(one["report"] for one in shown if one["id"] == instance_id)
    return report is not None and report["requests_running"] == requests


async def test_an_instance_is_ready_draining_drained_or_down(start_gateway: StartGateway, kvferry: Kvferry) -> None:
    async with instances("a", "b", "c", "d") as (a, b, c, d), start_gateway(a, b, c, d) as running:
        b.draining = c.draining = True
        b.report_changes = {"requests_running": 1}
        await d.stop()
        members = running.gateway.members
        await reported(running, "a", "b", "c")
        await until(lambda: [one.draining for one in members.all()] == [False, True, True, False])
        await until(lambda: not members.all()[3].usable)
        await until_true(lambda: _sees(running, "b", 1))
        ran = await kvferry("instances", url=running.url)
        assert [row[:3] for row in ran.rows] == [
            ["INSTANCE", "STATE", "URL"],
            ["a", "ready", a.url],
            ["b", "draining", b.url],
            ["c", "drained", c.url],
            ["d", "down", d.url],
        ]
        listed = (await kvferry("instances", "list", "--json")).json
        assert [one["state"] for one in listed["instances"]] == ["ready", "draining", "drained", "down"]
        assert listed["instances"][3]["reason"]


async def test_an_instance_without_the_plugin_is_shown_by_its_metrics(
    start_gateway: StartGateway, kvferry: Kvferry
) -> None:
    plain = FakeInstance("plain")
    plain.has_plugin, plain.metrics = False, metrics_page(running=2, waiting=1)
    async with plain, start_gateway(plain) as running:
        await until(lambda: any(one.load is not None for one in running.gateway.members.all()))
        (one,) = (await kvferry("status", "--json", url=running.url)).json["instances"]
        assert (one["requests_running"], one["requests_waiting"], one["plugin_version"]) == (2, 1, None)
        assert (await kvferry("status")).rows[-1][-1] == "no plugin"


async def test_a_gateway_that_is_gone_or_ends_is_a_line_of_the_table_and_no_failure(
    start_gateway: StartGateway, kvferry: Kvferry
) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    async with instances("a") as (a,), start_gateway(a) as running, start_gateway(a) as ending:
        ending.gateway.refuse_new()
        seen = (await kvferry("status", "--url", f"{ending.url},{running.url}", "--json")).json
        assert [bool(one["error"]) for one in seen["gateways"] if one["url"]] == [True, False]
        assert "shutting down" in (await kvferry("status", "--url", ending.url)).fails(1)
        ran = await kvferry("status", "--url", f"{gone},{running.url}/", "--json")
        assert ran.status == 0
        assert [(one["url"], one["error"] is None) for one in ran.json["gateways"] if one["url"]] == [
            (gone, False),
            (running.url, True),
        ]
        assert [one["id"] for one in ran.json["instances"]] == ["a"]


async def test_the_view_is_the_leaders(start_gateway: StartGateway, kvferry: Kvferry) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as one:
        await until(lambda: one.gateway.leader.is_leading)
        async with start_gateway(a) as other:
            seen = (await kvferry("status", "--json", url=f"{other.url},{one.url}")).json
            assert [gateway["leading"] for gateway in seen["gateways"]] == [False, True]
            assert [instance["id"] for instance in seen["instances"]] == ["a", "b"]


async def test_gateways_whose_address_was_not_given_are_shown_and_their_leader_too(
    start_gateway: StartGateway, kvferry: Kvferry
) -> None:
    """Workers behind one port, and replicas behind one balancer, have one address."""
    lasting = dataclasses.replace(INTERVALS, leader_lease_s=60)
    async with instances("a") as (a,), start_gateway(a, intervals=lasting) as leading:
        await until(lambda: leading.gateway.leader.is_leading)
        async with start_gateway(a) as other:
            await knows_each_other(leading, other)
            await other.gateway.store.beat("silent", "epoch")
            await until(lambda: "silent" in other.gateway.replicas.others)
            leader_id = leading.gateway.gateway_id
            rest = {leader_id: (None, True, False), "silent": (None, False, True)}
            expected = {other.gateway.gateway_id: (other.url, False, False), **rest}

            async def is_shown() -> bool:
                await other.gateway.store.beat("silent", "epoch")
                seen = (await kvferry("status", "--json", url=other.url)).json
                shown = {one["id"]: (one["url"], one["leading"], bool(one["error"])) for one in seen["gateways"]}
                return bool(seen["leader"] == leader_id and shown == expected)

            await until_true(is_shown)
            await other.gateway.store.leave("silent")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_width_and_colours_are_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    row = ["b" * 50, "ready"]

    def shown(out: io.StringIO) -> str:
        monkeypatch.setattr(sys, "stdout", out)
        return table(("INSTANCE", "STATE"), [row])

    assert shown(io.StringIO()).splitlines()[1].split() == row
    on_terminal = shown(Terminal())
    assert "\x1b[32mready" in on_terminal
    lines = on_terminal.splitlines()
    assert len(lines) == 3
    assert sum(line.count("b") for line in lines) == 50, "folded, not cut"
    monkeypatch.setenv("COLUMNS", "20")
    assert "b" * 50 in shown(Terminal()), "left to the terminal, rather than folded into a column of letters"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in shown(Terminal())


async def test_watch_looks_again_until_ctrl_c_which_it_takes_quietly(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", "status", "--watch", "0.1", "--json", "--url", running.url),
            env={**os.environ, "KVFERRY_ADMIN_KEY": ADMIN_KEY},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # A shell has what it starts in the background ignore Ctrl-C, and so would this.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert process.stdout is not None
        try:
            for _ in range(3):
                assert json.loads(await process.stdout.readline())["instances"][0]["id"] == "a"
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
            assert (process.returncode, err) == (130, b"")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "often", "1e9"])
def test_a_watch_that_makes_no_sense_is_wrong_usage(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["status", f"--watch={seconds}"])
    assert ended.value.code == 2
    assert "--watch" in capsys.readouterr().err
