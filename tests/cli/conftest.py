"""The command in this process, against a gateway that the test runs beside it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.cli.command import main
from tests.conftest import ADMIN_KEY


@dataclass(frozen=True, slots=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.err == ""
        return json.loads(self.out)

    @property
    def rows(self) -> list[list[str]]:
        """Cells are two blanks apart."""
        return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in self.out.splitlines() if line]

    def fails(self, status: int) -> str:
        """One sentence, and nothing else."""
        assert (self.status, self.out) == (status, "")
        assert self.err.startswith("kvferry: ")
        assert self.err.endswith(".\n") or self.err.endswith("?\n"), self.err
        assert self.err.count("\n") == 1
        return self.err


Kvferry = Callable[..., Awaitable[Ran]]


@pytest.fixture
def kvferry(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Kvferry:
    """``await kvferry("status", url=running.url)``."""
    for name in ("KVFERRY_URL", "KVFERRY_ADMIN_KEY", "KVFERRY_ADMIN_KEY_FILE", "KVFERRY_CONFIG"):
        monkeypatch.delenv(name, raising=False)

    async def run(*arguments: str, url: str | None = None, key: str | None = ADMIN_KEY) -> Ran:
        for name, value in (("KVFERRY_URL", url), ("KVFERRY_ADMIN_KEY", key)):
            if value is not None:
                monkeypatch.setenv(name, value)
        capsys.readouterr()
        status = await asyncio.to_thread(_status, arguments)
        return Ran(status, *capsys.readouterr())

    return run


def _status(arguments: tuple[str, ...]) -> int:
    try:
        return main(arguments)
    except SystemExit as ended:  # argparse's way.
        return int(ended.code or 0)
