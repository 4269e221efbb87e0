"""Where instances may be: lists, names, operators' orders; and what becomes of those that are wanted no more."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from gateway.cluster import keys, targets
from gateway.cluster.members import Members
from gateway.cluster.store import Store
from gateway.cluster.targets import Targets, read_name, read_url
from gateway.config import Intervals
from loadtest.processes import free_port
from tests.conftest import INTERVALS, Running, StartGateway, chat_body, until, until_true
from tests.cutting_proxy import CuttingProxy
from tests.fake_instance import FakeInstance, instances
from tests.scripts import starts_and_waits
from tests.test_admin import assert_openai_error
from tests.test_discovery import gateway_of

QUICK: Intervals = dataclasses.replace(INTERVALS, unheard_s=0.3)


@pytest_asyncio.fixture(autouse=True)
async def no_orders(redis_url: str) -> AsyncIterator[None]:
    """They never expire."""
    yield
    store = Store(redis_url)
    await store._redis.delete(keys.TARGETS)
    await store.close()


def known(running: Running) -> set[str]:
    return {member.instance.instance_id for member in running.gateway.members.all()}


def usable(running: Running) -> set[str]:
    return {
        one.instance_id
        for one in running.gateway.members.view(time.monotonic()).instances
        if one.healthy and not one.draining
    }


async def add(running: Running, url: str) -> dict[str, Any]:
    answer = await running.admin("POST", "/admin/instances", json={"url": url})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


class Names:
    """A resolver under a test's control."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[str] = []
        self.error: OSError | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked = 0
        monkeypatch.setattr(targets, "RESOLVE_S", 0.05)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.asked += 1
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return list(self.addresses)


async def test_a_name_stands_for_all_its_addresses(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,):
        name = f"dns://localhost:{urlsplit(a.url).port}"
        async with start_gateway(instance_urls=(name,)) as running:
            assert known(running) == {"a"}
            assert (await running.chat()).status_code == 200
            shown = (await running.admin("GET", "/admin/instances")).json()
            assert {"url": a.url, "source": name} in [
                {key: one[key] for key in ("url", "source")} for one in shown["addresses"]
            ]


@pytest.mark.slow
async def test_addresses_of_a_name_come_and_those_that_neither_resolve_nor_answer_go(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(monkeypatch)
    async with instances("a", "b") as (a, b):
        names.addresses = [a.url]
        async with start_gateway(instance_urls=("dns://vllm:1",), intervals=QUICK, resolve=names.resolve) as running:
            assert known(running) == {"a"}
            names.addresses = [a.url, b.url]
            await until(lambda: known(running) == {"a", "b"})
            names.addresses = [b.url]  # As a resolver does that tells some of many at a time.
            asked = names.asked
            await until(lambda: names.asked > asked + 2)
            assert usable(running) == {"a", "b"}
            await a.stop()
            await until(lambda: known(running) == {"b"})
            names.error = OSError("no such name")
            asked = names.asked
            await until(lambda: names.asked > asked + 2)
            assert usable(running) == {"b"}
            await a.listen()


async def test_a_resolver_that_hangs_is_asked_once_and_holds_up_nothing(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(monkeypatch)
    names.answers.clear()
    async with instances("a", "b") as (a, b):
        names.addresses = [b.url]
        async with start_gateway(a, instance_urls=(a.url, "dns://vllm:1"), resolve=names.resolve) as running:
            assert (await running.chat()).status_code == 200
            assert names.asked == 1
            names.answers.set()
            await until(lambda: known(running) == {"a", "b"})


async def test_names_that_hang_hold_up_no_other_name(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's look-up cannot be called off: more of them than there are threads to share would stop all others."""
    ends, look_up = threading.Event(), socket.getaddrinfo

    def hangs(host: Any, *arguments: Any, **named: Any) -> Any:
        if str(host).startswith("hangs-"):
            ends.wait()
            raise OSError("it has hung")
        return look_up(host, *arguments, **named)

    monkeypatch.setattr(targets, "RESOLVE_S", 0.5)
    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    hanging = tuple(f"dns://hangs-{number}:1" for number in range(40))
    try:
        async with instances("a") as (a,):
            names = (*hanging, f"dns://localhost:{urlsplit(a.url).port}")
            async with start_gateway(instance_urls=names) as running:
                await until(lambda: known(running) == {"a"})
                await asyncio.get_running_loop().getaddrinfo("localhost", 1)  # As for Redis, in the shared threads.
                assert (await running.chat()).status_code == 200
    finally:
        ends.set()


async def test_of_a_name_with_more_addresses_than_are_followed_so_many_are() -> None:
    """Each once, and never more of them, though the name tells others every time."""
    followed: Counter[str] = Counter()

    async def follow(url: str) -> None:
        followed[url] += 1
        try:
            await asyncio.Event().wait()
        finally:
            followed[url] -= 1

    rounds = itertools.count()

    async def tells(host: str, port: int) -> Sequence[str]:
        first = 1_000 * next(rounds)
        return [f"http://10.0.{number // 250}.{number % 250}:1" for number in range(first, first + 3_000)]

    one = Targets(("dns://many:1",), Members(10.0), lambda url: [follow(url)], lambda instance_id: 0, tells)
    for _ in range(4):
        one._names[0].asked_at = None
        await one.resolve_names()
        await asyncio.sleep(0)
        assert len(one.urls()) == targets.ADDRESSES_MAX
        await until(lambda: sorted(followed.elements()) == sorted(one.urls()))
    await one.stop()
    assert followed.total() == 0


async def test_an_instance_that_is_added_or_removed_at_one_gateway_is_so_at_all_and_after_a_restart(
    start_gateway: StartGateway,
) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a) as one:
        async with start_gateway(a) as other:
            assert await add(one, b.url + "/") == {"url": b.url, "source": "added"}
            await until(lambda: known(one) == known(other) == {"a", "b"})
            assert (await other.admin("DELETE", "/admin/instances/a")).status_code == 200
            await until(lambda: known(one) == known(other) == {"b"})
        async with start_gateway(a) as another:
            assert known(another) == {"b"}
            await add(another, a.url)
            await until(lambda: known(one) == known(another) == {"a", "b"})


async def test_what_is_removed_gets_nothing_new_and_keeps_what_it_has_until_its_end(
    start_gateway: StartGateway,
) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = starts_and_waits
        async with running.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response:
            chunks = response.aiter_bytes()
            await anext(chunks)
            await running.admin("DELETE", "/admin/instances/a")
            assert usable(running) == {"b"}
            assert (await running.chat()).status_code == 200
            assert len(b.received) == 1
            rounds = len(a.control_headers)
            await until(lambda: len(a.control_headers) > rounds + 10)  # It is probed and felt all the while.
            assert known(running) == {"a", "b"}
            assert not a.exchanges[0].client_gone.is_set()
        await until(lambda: known(running) == {"b"})
        rounds = len(a.control_headers)
        await until_true(lambda: nothing_new(a))


async def nothing_new(fake: FakeInstance) -> bool:
    asked = len(fake.control_headers)
    await asyncio.sleep(0.5)
    return len(fake.control_headers) == asked


async def test_an_address_where_nobody_answers_is_removed_by_its_url(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        nobody = f"http://127.0.0.1:{free_port()}"
        await add(running, nobody)

        async def state() -> dict[str, Any] | None:
            shown = (await running.admin("GET", "/admin/instances")).json()["addresses"]
            return next((one for one in shown if one["url"] == nobody), None)

        async def is_tried() -> bool:
            shown = await state()
            return shown is not None and "unhealthy" in (shown["state"] or "")

        await until_true(is_tried)
        assert (await running.admin("DELETE", "/admin/instances", json={"url": nobody})).status_code == 200
        assert await state() is None


async def test_wrong_orders_about_addresses_are_refused_and_without_redis_none_is_taken(
    start_gateway: StartGateway,
) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        wrong: Any
        for wrong in ([], {}, {"url": 1}, {"url": "a:1"}, {"url": "dns://a:1"}, {"url": "http://u:p@a:1"}):
            assert_openai_error(await running.admin("POST", "/admin/instances", json=wrong), 400)
        assert_openai_error(await running.admin("DELETE", "/admin/instances/nobody"), 404)
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    async with instances("a") as (a,), start_gateway(a, redis_url=nowhere) as running:
        answer = await running.admin("POST", "/admin/instances", json={"url": "http://127.0.0.1:1"})
        assert_openai_error(answer, 503)
        assert running.gateway.targets.urls() == (a.url,)


async def test_what_was_removed_while_redis_was_out_of_reach_is_removed_when_it_is_back(
    start_gateway: StartGateway, redis_url: str
) -> None:
    """F47: no event is waited for, so none can be missed: the whole is read again with every beat."""
    port = urlsplit(redis_url).port
    assert port is not None
    async with (
        CuttingProxy(port).running() as proxy,
        instances("a", "b") as (a, b),
        start_gateway(a) as other,
        start_gateway(a, redis_url=f"redis://127.0.0.1:{proxy.port}/0") as behind,
    ):
        await add(other, b.url)
        await until(lambda: known(behind) == known(other) == {"a", "b"})
        proxy.refusing = True
        proxy.cut()
        failures = behind.gateway.store.failures
        await other.admin("DELETE", "/admin/instances/b")
        await until(lambda: behind.gateway.store.failures > failures + 2)
        assert usable(behind) == {"a", "b"}  # What is known goes on being so.
        proxy.refusing = False
        await until(lambda: known(behind) == {"a"})


async def test_an_instance_that_dies_without_a_word_leaves_readiness_with_the_last_one(
    start_gateway: StartGateway,
) -> None:
    """F47: no answer is no health, whoever still lists it."""
    async with instances("a") as (a,), start_gateway(a) as running:
        assert (await running.client.get("/health")).status_code == 200
        await a.stop()
        await until(lambda: running.gateway.members.healthy_count() == 0)
        assert (await running.client.get("/health")).status_code == 503
        await a.listen()


async def test_an_instance_that_comes_up_elsewhere_takes_its_id_with_it_once_nobody_answers_where_it_was() -> None:
    async with instances("a", "a") as (before, after):
        gateway = gateway_of(before, after)
        await gateway.discovery.probe_all()
        assert [member.instance.url for member in gateway.members.all()] == [before.url]
        await before.stop()
        await gateway.discovery.probe_all()
        await gateway.discovery.probe_all()
        assert [(member.instance.url, member.usable) for member in gateway.members.all()] == [(after.url, True)]
        await before.listen()
        await gateway.discovery.probe_all()
        assert [member.instance.url for member in gateway.members.all()] == [after.url]
        await gateway.stop()


async def test_another_model_at_the_same_address_is_another_instances(start_gateway: StartGateway) -> None:
    """F46: a new life, whatever it is, has nothing of the old one."""
    async with instances("a") as (a,), start_gateway(a) as running:
        await running.chat()
        a.boot_id, a._sequence, a.models = "boot-2", 0, ("another",)
        await until(lambda: running.gateway.members.knows_model("another"))
        assert not running.gateway.members.knows_model("kvferry-test")
        assert (await running.chat()).status_code == 404
        assert (await running.chat(model="another")).status_code == 200
        (member,) = running.gateway.members.all()
        assert (member.instance.boot_id, member.report is not None and member.report.boot_id) == ("boot-2", "boot-2")


@pytest.mark.parametrize("url", ["http://a:1", "https://a", "http://[::1]:8000", "http://a:1/v", "HTTP://a:1/"])
def test_an_instances_address_is_written_in_one_way(url: str) -> None:
    assert read_url(read_url(url)) == read_url(url)
    assert not read_url(url).endswith("/")
    assert read_url("HTTP://A:1/") == "http://a:1"


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "a",
            "ftp://a",
            "file:///etc/passwd",
            "http://",
            "http://a:x",
            "http://a:70000",
            "http://a:0",
            "http://a:+1",
        ),
        *(
            "http://a/?q",
            "http://a/#f",
            "http://a/?",
            "http://a\n",
            "http://a b",
            "http://a/ b",
            "http://%41",
            "http://-",
        ),
        *("http://b@a", "http://b:c@a", "http://@a", "http://a..b", "http://.", "http://" + "a" * 64, "http://a/../b"),
        *("http://a/%zz", "http://a\\b", "http://\ud800", "http://[v1.x]", "http://[::1", "http://a/" + "b" * 512),
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"must be|[Pp]ort|IPv6"):
        read_url(url)


@pytest.mark.parametrize("url", ["dns://a", "dns://:1", "dns://a:1/x", "http://a:1"])
def test_what_is_no_name_is_refused(url: str) -> None:
    assert read_name("dns://a:1") == "dns://a:1"
    with pytest.raises(ValueError, match="dns://name:port"):
        read_name(url)
