"""What the dashboard costs (`make bench-dashboard`): in the gateway, and in the browser's main thread.

64 fake instances with ten reports a second each. The gateway's CPU time without anybody who looks, with one, and with
several; its share beyond what it needs anyway is the dashboard's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from playwright.async_api import Browser

from loadtest.bench.process_tree import cpu_s
from loadtest.browser import MISSING, find_chromium, running_browser
from loadtest.dashboard.stage import Plan, Stage, running_stage
from loadtest.processes import run_until_signal

GATEWAY_SHARE_MAX = 0.05
PAGE_SHARE_MAX = 0.20
SETTLES_S = 5.0
VIEWERS = (0, 1, 8)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.dashboard.bench", description="What the dashboard costs.")
    parser.add_argument("--instances", type=int, default=64)
    parser.add_argument("--streams", type=int, default=64, help="that run meanwhile")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    given = parser.parse_args()
    if find_chromium() is None:
        print(MISSING, file=sys.stderr)
        return 2
    return run_until_signal(measure(Plan(given.instances, given.streams, ("--speed", "0.1")), given.seconds))


async def measure(plan: Plan, seconds: float) -> int:
    async with running_stage(plan) as stage:
        shares = {}
        for viewers in VIEWERS:
            async with _viewers(stage, viewers):
                await asyncio.sleep(SETTLES_S)
                shares[viewers] = await _gateway_share(stage, seconds)
            extra = shares[viewers] - shares[0]
            print(
                f"gateway, {viewers} look: {shares[viewers]:.1%} of a core, {extra:+.1%} for the dashboard", flush=True
            )
        async with running_browser() as browser:
            page_share = await _page_share(browser, stage, seconds)
        print(f"the page's main thread: {page_share:.1%} of a core")
    holds = shares[1] - shares[0] < GATEWAY_SHARE_MAX and page_share < PAGE_SHARE_MAX
    print(f"under {GATEWAY_SHARE_MAX:.0%} and {PAGE_SHARE_MAX:.0%}: {'yes' if holds else 'NO'}")
    return 0 if holds else 1


async def _gateway_share(stage: Stage, seconds: float) -> float:
    loop = asyncio.get_running_loop()
    began, used = loop.time(), cpu_s(stage.gateway.pid)
    await asyncio.sleep(seconds)
    return (cpu_s(stage.gateway.pid) - used) / (loop.time() - began)


@contextlib.asynccontextmanager
async def _viewers(stage: Stage, count: int) -> AsyncIterator[None]:
    async def view() -> None:
        headers = {"authorization": f"Bearer {stage.admin_key}"}
        async with stage.client.stream("GET", "/admin/events", headers=headers) as response:
            async for _ in response.aiter_raw():
                pass

    viewing = [asyncio.create_task(view()) for _ in range(count)]
    try:
        yield
    finally:
        for one in viewing:
            one.cancel()
        await asyncio.gather(*viewing, return_exceptions=True)


async def _page_share(browser: Browser, stage: Stage, seconds: float) -> float:
    """Of the renderer's main thread, as the kernel counts it."""
    page = await browser.new_page(viewport={"width": 1280, "height": 900})
    await page.goto(f"{stage.url}/dashboard")
    await page.locator("#key").fill(stage.admin_key)
    await page.locator("#sign-in button").click()
    await page.locator("#cards > li").first.wait_for()
    await asyncio.sleep(SETTLES_S)
    session = await browser.new_browser_cdp_session()
    processes = (await session.send("SystemInfo.getProcessInfo"))["processInfo"]
    renderers = [int(one["id"]) for one in processes if one["type"] == "renderer"]
    loop = asyncio.get_running_loop()
    began, used = loop.time(), {pid: _main_thread_s(pid) for pid in renderers}
    await asyncio.sleep(seconds)
    # Besides the page there may be spare renderers, which do nothing.
    return sum(_main_thread_s(pid) - used[pid] for pid in renderers) / (loop.time() - began)


def _main_thread_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


if __name__ == "__main__":
    sys.exit(main())
