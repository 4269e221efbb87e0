"""The dashboard in a real Chromium, over a live cluster of fake instances."""

from __future__ import annotations

import contextlib
import importlib.resources
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from loadtest.browser import MISSING, find_chromium, running_browser
from loadtest.fake_vllm.server import FakeServers, Options
from loadtest.sim.profile import FAST
from tests.conftest import ADMIN_KEY, StartGateway, chat_body, until
from tests.cutting_proxy import CuttingProxy
from tests.dashboard.look import bar, card, looking, sign_in
from tests.fake_instance import MODEL, SECRET, instances
from tests.scripts import starts_and_waits
from tests.test_admin import Migratable
from tests.test_replicas import streaming

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(find_chromium() is None, reason=MISSING),
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as found:
        yield found


async def test_it_follows_the_instances_and_shows_a_move_that_was_ordered_by_keyboard(
    browser: Browser, start_gateway: StartGateway
) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        Migratable(a, b)
        async with looking(browser, running.url) as look, streaming(running) as (request_id, _):
            page = look.page
            await sign_in(page)
            await expect(page.locator("#connection")).to_have_text("Live")
            await expect(page.locator("#gateway")).to_contain_text(running.gateway.gateway_id[:8])
            a.report_changes = {"blocks_free": 400, "blocks_reserved": 10, "head_of_line_blocks": 96}
            await expect(bar(page, "a")).to_have_attribute(
                "aria-label", "590 of 1000 blocks used; 10 reserved; 400 free; head of line waits for 96"
            )
            b.health_status = 503
            await expect(card(page, "b")).to_have_attribute("data-state", "down")
            b.health_status = 200
            await expect(card(page, "b")).to_have_attribute("data-state", "ready")

            await page.get_by_role("button", name=f"Move request {request_id}").focus()
            await page.keyboard.press("Enter")
            await expect(page.locator("#confirm-title")).to_have_text(f"Move {request_id[:8]} away from a?")
            await expect(page.locator("#move-destination option")).to_have_count(1)
            await page.locator("#confirm-yes").focus()
            await page.keyboard.press("Enter")
            await expect(page.locator("#outcome")).to_contain_text("has moved from a to b: pause")
            row = page.locator("#moves tr")
            await expect(row).to_contain_text(request_id[:8])
            await expect(row.locator("td").nth(5)).to_contain_text("ms")
            await expect(page.locator("#journal")).to_contain_text(f"moved {request_id[:8]} from a to b: a had")
            assert await page.evaluate("window.flown") == [request_id[:8]]
        assert look.complaints == []
        assert look.hosts == {urlsplit(running.url).netloc}


async def test_orders_are_asked_for_once_more_and_refused_without_the_key(
    browser: Browser, start_gateway: StartGateway
) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running, looking(browser, running.url) as look:
        page = look.page
        await sign_in(page, "a wrong key")
        await expect(page.locator("#sign-in-error")).to_have_text(
            "That cannot be a key: it has characters that no header can hold."
        )
        await sign_in(page, "wrong")
        await expect(page.locator("#sign-in-error")).to_have_text("The gateway refuses this key.")
        await expect(page.locator("#board")).to_be_hidden()
        await sign_in(page)
        await page.reload()  # The tab keeps the key.
        drain = page.get_by_role("button", name="Drain a", exact=True)
        await drain.click()
        await page.keyboard.press("Escape")
        await expect(page.locator("#confirm")).to_be_hidden()
        assert not a.draining
        await drain.click()
        await page.locator("#confirm-yes").click()
        await expect(page.locator("#outcome")).to_have_text("a is empty: 0 moved away.")
        await until(lambda: a.draining)
        await expect(card(page, "a")).to_have_attribute("data-state", "drained")
        await page.get_by_role("button", name="Undrain a").click()
        await page.locator("#confirm-yes").click()
        await expect(page.locator("#outcome")).to_have_text("a is taken back.")
        await until(lambda: not a.draining)
        await expect(card(page, "a")).to_have_attribute("data-state", "ready")

        await page.locator("#move-any").click()
        await page.locator("#move-request").fill("nobody")
        await page.locator("#confirm-yes").click()
        await expect(page.locator("#outcome")).to_have_text("There is no running request `nobody`.")

        stored = "JSON.stringify([{...localStorage}, document.cookie, location.href])"
        assert ADMIN_KEY not in await page.evaluate(stored)
        await page.evaluate("sessionStorage.setItem('kvferry.admin-key', 'lost')")
        await drain.click()
        await page.locator("#confirm-yes").click()
        await expect(page.locator("#sign-in-error")).to_have_text("The API key is not valid.")
        assert not a.draining
        assert look.complaints == []


async def test_it_survives_a_cut_connection_and_another_gateway(browser: Browser, start_gateway: StartGateway) -> None:
    async with instances("a") as (a,):
        a.script = starts_and_waits
        async with contextlib.AsyncExitStack() as first_life:
            first = await first_life.enter_async_context(start_gateway(a))
            proxy = CuttingProxy(urlsplit(first.url).port or 0)
            async with proxy.running(), looking(browser, proxy.url) as look:
                page, connection = look.page, look.page.locator("#connection")
                await sign_in(page)
                await expect(connection).to_have_text("Live")
                proxy.lose()
                await expect(connection).to_contain_text("Shown is how it was at")
                await expect(card(page, "a")).to_be_visible()
                proxy.refusing = False
                await expect(connection).to_have_text("Live")
                await first_life.aclose()
                await expect(connection).to_contain_text("Trying again")
                async with start_gateway(a) as second:
                    proxy.target_port = urlsplit(second.url).port or 0
                    await expect(connection).to_have_text("Live")
                    await expect(page.locator("#gateway")).to_contain_text(second.gateway.gateway_id[:8])
                    await expect(card(page, "a")).to_have_attribute("data-state", "ready")
                    proxy.lose()
        assert look.complaints == []


@pytest.mark.parametrize("count", [2, 64])
async def test_axe_finds_nothing_and_a_narrow_screen_holds_it(
    count: int, browser: Browser, start_gateway: StartGateway
) -> None:
    axe = importlib.resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()
    name = "instance-with-a-long-name-"
    options = Options(models=(MODEL,), secret=SECRET, instance_ids=name, profile=FAST.faster(0.1))
    long = chat_body(stream=True, max_tokens=7_000)
    async with FakeServers(options, [0] * count) as fakes:
        urls = tuple(fakes.urls)
        async with start_gateway(instance_urls=urls) as running, looking(browser, running.url) as look:
            page = look.page
            await page.evaluate(axe)
            assert await violations(page) == []  # Before the key is given.
            async with running.client.stream("POST", "/v1/chat/completions", json=long):
                await sign_in(page)
                await expect(page.locator("#cards > li")).to_have_count(count)
                await expect(page.locator("#requests tr")).to_have_count(1)
                for scheme in ("light", "dark"):
                    await page.emulate_media(color_scheme=scheme)
                    assert await violations(page) == []
                await page.get_by_role("button", name="Move request").click()
                assert await violations(page) == []
                await page.keyboard.press("Escape")
                await page.set_viewport_size({"width": 320, "height": 600})
                assert await page.evaluate("document.documentElement.scrollWidth") <= 320
        assert look.complaints == []


async def violations(page: Page) -> Any:
    run = "axe.run(document, {resultTypes: ['violations']})"
    return await page.evaluate(f"{run}.then(found => found.violations.map(one => [one.id, one.nodes[0].html]))")
