"""Runs the official OpenAI client for Node, where it is installed (``make node-client``)."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent / "node"
ANSWERS_IN_S = 120


def _missing() -> str | None:
    if shutil.which("node") is None:
        return "Node is not installed"
    if not (DIRECTORY / "node_modules" / "openai").is_dir():
        return "the client for Node is not installed: make node-client"
    return None


MISSING = _missing()
"""Why there is none."""


async def run(scenario: str, url: str, key: str, model: str, until: Awaitable[object] | None = None) -> Any:
    """What ``client.js`` says of that scenario. It is sent a line when ``until`` is done."""
    process = await asyncio.create_subprocess_exec(
        "node",
        str(DIRECTORY / "client.js"),
        *(scenario, f"{url}/v1", key, model),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(ANSWERS_IN_S):
            if until is not None:
                await until
            out, complaint = await process.communicate(b"\n" if until is not None else b"")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, complaint.decode()
    return json.loads(out)
