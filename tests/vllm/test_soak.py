"""A third of a minute of the soak (``loadtest/soak.py``) on the servers of these tests."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from loadtest.client import Client
from loadtest.progress import Progress
from loadtest.soak import read_kinds, run_phase, run_twins, table
from loadtest.traffic import Choices, Plan

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

KINDS = 6


@pytest.mark.timeout(600)
async def test_a_short_soak_of_random_traffic_moves_and_drains(client: Client, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    kinds = random.Random(seed).sample(await read_kinds(client.stack), KINDS)
    twins = await run_twins(client.stack, kinds, Progress())
    choices = Choices(seed, kinds)
    phase = await run_phase(client.stack, "moves", Plan(seconds=20), choices, twins, Progress(), tmp_path)
    print(table([phase]))
    assert phase.failures() == []
    assert phase.tally.total("migrated") > 1
    assert phase.tally.blocks_sent > 0
