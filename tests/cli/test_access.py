"""Which gateway, with which key, and what is said when that does not work."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.processes import free_port
from tests.cli.conftest import Kvferry
from tests.conftest import ADMIN_KEY, StartGateway
from tests.fake_instance import instances


def written(directory: Path, text: str) -> str:
    path = directory / "key"
    path.write_text(text)
    return str(path)


async def test_the_admin_key_is_in_a_file_or_a_variable(
    start_gateway: StartGateway, kvferry: Kvferry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        assert "missing" in (await kvferry("status", url=running.url, key=None)).fails(4)
        assert "another admin key" in (await kvferry("status", key="wrong")).fails(4)
        assert "another admin key" in (await kvferry("requests", key="wrong")).fails(4)
        path = written(tmp_path, f"{ADMIN_KEY}\n")
        assert (await kvferry("status", "--admin-key-file", path, key="wrong")).status == 0
        monkeypatch.setenv("KVFERRY_ADMIN_KEY_FILE", path)
        assert (await kvferry("status", key="")).status == 0
        (await kvferry("status", key="wrong")).fails(4)


async def test_a_key_file_that_holds_no_key_is_refused_by_name(kvferry: Kvferry, tmp_path: Path) -> None:
    for text in ("", "two words", "two\nlines", "schlüssel"):
        path = written(tmp_path, text)
        error = (await kvferry("status", "--admin-key-file", path)).fails(2)
        assert path in error
        assert text not in error or not text
    assert "cannot be read" in (await kvferry("status", "--admin-key-file", str(tmp_path / "none"))).fails(2)


async def test_the_key_itself_is_no_argument(kvferry: Kvferry) -> None:
    assert (await kvferry("status", "--admin-key", ADMIN_KEY)).status == 2


async def test_a_gateway_that_cannot_be_reached(kvferry: Kvferry) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    commands = [["status"], ["instances"], ["requests"], ["requests", "show", "x"], ["migrate", "x", "b"]]
    for command in [*commands, ["drain", "a"], ["drain", "a", "--undo"]]:
        assert url in (await kvferry(*command, url=url)).fails(3)


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://a", "http://", "http://u:p@a", "http://a?b", "http://a:0", "http://a:x", ","]
)
async def test_a_wrong_url_is_refused_by_name(url: str, kvferry: Kvferry) -> None:
    assert "--url" in (await kvferry("status", "--url", url)).fails(2)
