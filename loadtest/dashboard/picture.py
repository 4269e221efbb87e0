"""The documentation's pictures of the dashboard (`make dashboard-pictures`): over fake instances, as a move goes on."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
from pathlib import Path
from typing import Literal

from playwright.async_api import Browser

from loadtest.browser import MISSING, find_chromium, running_browser
from loadtest.dashboard.stage import Plan, Stage, running_stage
from loadtest.processes import run_until_signal
from loadtest.progress import Progress

DOCS = Path("docs")
WATCHED_S = 45.0
"""For the lines to have something to say."""
MOVES_EVERY_S = 1.5
PATIENCE_MS = 120_000
ENGINE = ("--profile", "llama-7b-a10", "--blocks", "851", "--batch", "32")
FEW = Plan(instances=4, streams=44, fake_arguments=ENGINE)
MANY = Plan(instances=64, streams=420, fake_arguments=(*ENGINE, "--speed", "0.5"))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.dashboard.picture", description="The dashboard's pictures."
    )
    parser.add_argument("--seconds", type=float, default=WATCHED_S, help="that each page is open before")
    given = parser.parse_args()
    if find_chromium() is None:
        print(MISSING, file=sys.stderr)
        return 2
    return run_until_signal(take_all(given.seconds))


async def take_all(watched_s: float) -> int:
    progress = Progress()
    for plan, scheme, name in ((FEW, "light", "dashboard.png"), (MANY, "dark", "dashboard-64.png")):
        with progress.step(f"{plan.instances} instances, {watched_s:g} s"):
            async with running_stage(plan) as stage, running_browser() as browser:
                await _take(browser, stage, scheme, DOCS / name, watched_s)  # type: ignore[arg-type]
        print(f"{DOCS / name}: written")
    return 0


async def _take(browser: Browser, stage: Stage, scheme: Literal["light", "dark"], path: Path, watched_s: float) -> None:
    page = await browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(PATIENCE_MS)
    await page.goto(f"{stage.url}/dashboard")
    await page.locator("#key").fill(stage.admin_key)
    await page.locator("#sign-in button").click()
    moving = asyncio.create_task(_move_about(stage))
    try:
        await asyncio.sleep(watched_s)
        await page.locator("#flights > span").first.wait_for(state="attached")
        await page.screenshot(path=path)
    finally:
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)


async def _move_about(stage: Stage) -> None:
    """Operators' orders, beside what the leader decides. Some come too late, or have no room to go to."""
    dice = random.Random(1)
    while True:
        await asyncio.sleep(MOVES_EVERY_S)
        requests = (await stage.admin("GET", "/admin/requests")).json()["requests"]
        instances = [one["id"] for one in (await stage.admin("GET", "/admin/instances")).json()["instances"]]
        placed = [one for one in requests if one["instance"] in instances]
        with contextlib.suppress(IndexError):  # None is under way just now.
            request = dice.choice(placed)
            destination = dice.choice([one for one in instances if one != request["instance"]])
            await stage.admin("POST", "/admin/migrate", json={"request": request["id"], "destination": destination})


if __name__ == "__main__":
    sys.exit(main())
