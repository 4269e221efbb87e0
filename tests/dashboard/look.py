"""A tab with the dashboard, as a test sees it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from playwright.async_api import Browser, ConsoleMessage, Locator, Page, expect

from tests.conftest import ADMIN_KEY

COMES_IN_MS = 60_000
REFUSED_OR_GONE = "Failed to load resource"
"""What Chromium itself says of a connection that is lost and of a 401: here both are meant."""
# A request that flies from card to card is gone again before a slow machine has looked.
NOTES_FLIGHTS = """
window.flown = [];
document.addEventListener("DOMContentLoaded", () => new MutationObserver((changes) => {
  for (const change of changes) for (const node of change.addedNodes) window.flown.push(node.textContent);
}).observe(document.getElementById("flights"), { childList: true }));
"""


@dataclass(frozen=True, slots=True)
class Look:
    page: Page
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings on the console, and what nobody caught."""
    hosts: set[str] = field(default_factory=set)
    """That anything was asked of."""

    def said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(REFUSED_OR_GONE):
            self.complaints.append(message.text)


@contextlib.asynccontextmanager
async def looking(browser: Browser, url: str) -> AsyncIterator[Look]:
    expect.set_options(COMES_IN_MS)
    async with await browser.new_context() as context:
        context.set_default_timeout(COMES_IN_MS)
        await context.add_init_script(NOTES_FLIGHTS)
        look = Look(await context.new_page())
        look.page.on("console", lambda message: look.said(message))
        look.page.on("pageerror", lambda error: look.complaints.append(str(error)))
        look.page.on("request", lambda request: look.hosts.add(urlsplit(request.url).netloc))
        await look.page.goto(f"{url}/dashboard")
        yield look


async def sign_in(page: Page, key: str = ADMIN_KEY) -> None:
    await page.locator("#key").fill(key)
    await page.locator("#sign-in button").click()


def card(page: Page, instance_id: str) -> Locator:
    return page.locator("#cards > li").filter(has=page.get_by_role("heading", name=instance_id, exact=True))


def bar(page: Page, instance_id: str) -> Locator:
    return card(page, instance_id).locator(".bar")
