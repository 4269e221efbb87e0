"""Two real vLLM servers and the gateway, once for the whole run; nothing may be left on them after any test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from loadtest.client import Client
from loadtest.soak import SERVER_ARGUMENTS
from loadtest.stack import Stack
from tests.vllm import CORRUPT_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
SHARED_STACK = pytest.StashKey[Stack]()
"""For tests that start servers of their own: they end these first, as no machine is asked to hold more than two."""


@pytest.fixture(scope="session")
def corruption_flag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, both servers write zeros instead of copied blocks."""
    return tmp_path_factory.mktemp("corrupt") / "on"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(corruption_flag: Path, request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    async with Stack(
        instances=2,
        vllm_arguments=[*SERVER_ARGUMENTS, "--worker-extension-cls", "tests.vllm.corrupting.CorruptingExtension"],
        vllm_environment={
            CORRUPT_VARIABLE: str(corruption_flag),
            "PYTHONPATH": str(ROOT),
            "VLLM_ENABLE_RESPONSES_API_STORE": "1",
        },
        # Tests that move requests out of a server's queue need it to have one; test_admission.py has its own gateway.
        gateway_environment={"KVFERRY_LATE_BINDING": "off"},
    ) as stack:
        request.session.stash[SHARED_STACK] = stack
        yield stack


@pytest_asyncio.fixture(loop_scope="session")
async def client(stack: Stack) -> AsyncIterator[Client]:
    client = Client(stack)
    try:
        yield client
        await client.wait_until_empty(5.0)
    finally:
        await client.close()
