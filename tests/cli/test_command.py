"""The command as such: its help, what it imports, and how it ends."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

from gateway.cli.command import COMMANDS, main, parser_for, with_default_action
from tests.test_config import GOOD

LEAVES = (
    *("serve", "status", "instances list", "instances undrain", "instances add", "instances remove"),
    *("requests list", "requests show", "requests cancel", "migrate", "drain", "keys new", "profile", "simulate"),
)
HEAVY = ("uvicorn", "redis", "fastapi", "httpx", "rich", "asyncio")
IMPORTED = f"""
import sys
from gateway.cli.command import main
try:
    main(sys.argv[1:])
finally:
    print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_names_every_command_and_every_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys)
    for name, meaning in COMMANDS.items():
        assert re.search(rf"^    {name}\s+{meaning}$", text, re.MULTILINE)
        assert f"usage: kvferry {name} " in help_of(capsys, name)
    assert "3 gateway not reachable" in text
    assert main([]) == 2


@pytest.mark.parametrize("leaf", LEAVES)
def test_each_command_explains_itself_with_an_example_that_it_understands(
    leaf: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(capsys, *leaf.split())
    assert f"usage: kvferry {leaf} " in text
    examples = re.findall(r"^  kvferry (.+)$", text.partition("\nexample")[2], re.MULTILINE)
    assert examples
    for example in examples:
        arguments = with_default_action(shlex.split(example.partition(" >> ")[0]))
        assert parser_for(arguments).parse_args(arguments).run


def test_help_starts_without_server_redis_and_http() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORTED, "--help"], capture_output=True, text=True, check=True)
    assert ran.stderr.strip() == "[]"


def test_a_reader_that_has_had_enough_ends_it_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "gateway", "serve", "--check"]
        ran = subprocess.run(command, env=os.environ | GOOD, stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, b"")


@pytest.mark.parametrize("arguments", [["stauts"], ["migrate", "x"], ["keys", "drop"], ["status", "--jso"], ["drain"]])
def test_wrong_arguments_are_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: kvferry")


def test_lists_are_what_their_commands_do_without_an_action() -> None:
    for given, meant in (
        (["requests"], ["requests", "list"]),
        (["instances", "--json"], ["instances", "list", "--json"]),
        (["requests", "--help"], ["requests", "--help"]),
        (["requests", "show", "x"], ["requests", "show", "x"]),
        (["status"], ["status"]),
        ([], []),
    ):
        assert with_default_action(given) == meant
