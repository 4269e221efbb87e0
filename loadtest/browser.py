"""The Chromium that is on this machine, without a window, and speaking to this machine only."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator

from playwright.async_api import Browser, async_playwright

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
VARIABLE = "KVFERRY_TEST_BROWSER"
MISSING = f"there is no Chromium here: `make browser` installs Debian's, or let {VARIABLE} name one"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
STARTS_IN_MS = 120_000.0


def find_chromium() -> str | None:
    """Its path."""
    return os.environ.get(VARIABLE) or next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """With a profile of its own that is gone afterwards. Playwright brings no browser, and none is fetched."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=find_chromium(), args=ARGUMENTS, timeout=STARTS_IN_MS
        )
        async with browser:
            yield browser
