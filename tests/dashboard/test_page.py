"""The page itself: static, without data, and asking nobody else for anything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.dashboard.page import DIRECTORY
from tests.conftest import StartGateway
from tests.fake_instance import instances
from tests.test_admin import assert_openai_error


async def test_it_is_there_for_everyone_and_says_nothing(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, api_keys=("client",)) as running:
        page = await running.client.get("/dashboard")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        links = re.findall(r'(?:href|src)="(dashboard/[^"]+)"', page.text)
        assert len(links) >= 3
        for file in DIRECTORY.iterdir():
            if file.name != "page.html":
                links.append(f"dashboard/{file.name}")
        for link in links:
            answer = await running.client.get(f"/{link}")
            assert answer.status_code == 200, link
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert running.gateway.gateway_id not in answer.text


async def test_other_paths_and_methods_are_refused(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        for path in (
            "/dashboard/nothing.js",
            "/dashboard/page.html",
            "/dashboard/../app.py",
            "/dashboard/%2e%2e/app.py",
        ):
            assert (await running.client.get(path)).status_code in (404, 401), path
        assert_openai_error(await running.client.post("/dashboard"), 405)
        moved = await running.client.get("/dashboard/")
        assert (moved.status_code, moved.headers["location"]) == (308, "../dashboard")


@pytest.mark.parametrize("file", sorted(DIRECTORY.iterdir()), ids=lambda file: file.name)
def test_nothing_comes_from_elsewhere_and_no_text_becomes_markup(file: Path) -> None:
    text = file.read_text().replace("http://www.w3.org/2000/svg", "")
    assert "//" not in re.sub(r"(^|\s)//.*|/\*.*?\*/", "", text, flags=re.MULTILINE)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bon\w+=\"| style=\"", text)
