"""docs/cli.md: each of its commands runs as printed."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path

import pytest

from gateway import wire
from gateway.cli.command import COMMANDS
from gateway.cli.exits import Exit
from tests.cli.conftest import Kvferry
from tests.conftest import ADMIN_KEY, StartGateway, until
from tests.fake_instance import SECRET, instances
from tests.scripts import silent
from tests.test_admin import result

PAGE = (Path(__file__).parent.parent.parent / "docs" / "cli.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines() if line.startswith("kvferry ")]


def test_the_page_lists_every_command_and_every_exit_status() -> None:
    assert dict(re.findall(r"^\| `kvferry (\w+)` \| (.+) \|$", PAGE, re.MULTILINE)) == COMMANDS
    assert re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE) == [str(int(status)) for status in Exit]
    assert {line.split()[1] for line in LINES} == set(COMMANDS)


async def test_every_command_of_the_page_runs_as_printed(
    start_gateway: StartGateway, kvferry: Kvferry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But ``serve`` only checks its settings; a watch is test_status.py's, and a measurement test_profile.py's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "admin.key").write_text(f"{ADMIN_KEY}\n")
    (tmp_path / "kvferry.toml").write_text(f"secret = '{SECRET}'\ninstances = ['http://a']\n")

    async def move(order: wire.MigrateOrder) -> tuple[int, object]:
        return 200, result(order)

    async with instances("a", "b", "c") as (a, b, c), start_gateway(a, b) as running:
        a.migrate, a.script = move, silent

        async def run(lines: list[str], request_id: str) -> None:
            for line in lines:
                stand_for = {"$REQUEST": request_id, "http://10.0.0.3:8001": c.url}
                arguments = [stand_for.get(one, one) for one in shlex.split(line)[1:]]
                if arguments[0] == "serve" and "--check" not in arguments:
                    arguments.append("--check")
                if arguments[0] == "profile":
                    arguments.append("--help")
                ran = await kvferry(*arguments, url=running.url)
                assert (line, ran.status) == (line, 0), ran

        chatting = asyncio.create_task(running.chat())
        request_id = (await a.exchange()).request.headers[wire.REQUEST_ID_HEADER]
        lines = [line for line in LINES if "--watch" not in line]
        drains = [line for line in lines if "drain" in line]
        ends = [line for line in lines if re.search("cancel|add|remove", line)]
        assert ends[-1].startswith("kvferry requests cancel")
        await run([line for line in lines if line not in (*drains, *ends)], request_id)
        # With that request on it no drain would end.
        await run(ends[-1:], request_id)
        assert (await chatting).status_code >= 400
        await until(lambda: not running.gateway.sessions.live())
        await run(drains, request_id)
        await run(ends[:-1], request_id)
