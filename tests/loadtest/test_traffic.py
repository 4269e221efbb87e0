"""The soak's random choices, and a whole phase of it on fake instances: what they do wrong is found."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from gateway import wire
from loadtest.client import Client
from loadtest.comparison import Heard
from loadtest.kinds import CHAT, COMPLETIONS, Kind, build_kinds
from loadtest.leaks import held
from loadtest.soak import Phase, table, to_json
from loadtest.stack import Stack
from loadtest.traffic import Choices, Finding, KindCounts, Plan, Tally, Traffic, judge, outcome_of, run_alone
from tests.conftest import ADMIN_KEY, Running, StartGateway, until_true
from tests.fake_instance import MODEL, SECRET, Exchange, FakeInstance, Generation, Script, instances

KINDS = build_kinds(think_end_token_id=9)
FAKE_KINDS = [
    Kind("chat", CHAT, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}),
    Kind("completion", COMPLETIONS, {"prompt": "hello", "max_tokens": 5, "stream_options": {"include_usage": True}}),
    Kind("whole", COMPLETIONS, {"prompt": "hello", "max_tokens": 4}, stream=False),
]


def test_the_same_seed_draws_the_same_whatever_else_was_drawn() -> None:
    one, other = Choices(5, KINDS), Choices(5, KINDS)
    drawn = [one.request(index) for index in range(300)]
    assert [other.request(index) for index in reversed(range(300))] == drawn[::-1]
    assert [one.fractions("move", index) for index in range(50)] == [
        other.fractions("move", index) for index in range(50)
    ]
    assert [Choices(6, KINDS).request(index) for index in range(300)] != drawn


def test_every_kind_comes_up_once_a_round_in_changing_order() -> None:
    choices = Choices(1, KINDS)
    rounds = [
        [choices.request(turn * len(KINDS) + index).kind.name for index in range(len(KINDS))] for turn in range(3)
    ]
    assert all(Counter(names) == Counter(kind.name for kind in KINDS) for names in rounds)
    assert rounds[0] != rounds[1] != rounds[2]


def test_salts_are_of_one_request_each_and_some_clients_leave() -> None:
    drawn = [Choices(2, KINDS).request(index) for index in range(600)]
    salts = [draw.salt for draw in drawn if draw.salt is not None]
    assert len(set(salts)) == len(salts) > 400
    assert 10 < sum(draw.leaves_after_s is not None for draw in drawn) < 80


def test_no_two_kinds_share_a_name_and_each_is_deterministic() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    for kind in KINDS:
        assert kind.body["temperature"] == 0 or "seed" in kind.body, kind.name
        assert "cache_salt" not in kind.body or "cache_salt" in kind.name


def test_an_error_is_honest_only_where_a_death_cannot_be_made_good() -> None:
    error = Heard(status=200, events=[{"error": {"message": "lost"}}])
    twin = Heard(status=200, done=1)
    lasting, fragile = FAKE_KINDS[0], Kind("n=2", CHAT, {}, resumes=False)
    assert judge(fragile, twin, error, deaths=1) == ("honest_errors", [])
    assert judge(fragile, twin, error, deaths=0)[0] == "different"
    assert judge(lasting, twin, error, deaths=1)[0] == "different"
    assert judge(lasting, twin, error, deaths=2) == ("honest_errors", [])


def test_outcomes_are_counted_without_what_is_new_in_each() -> None:
    assert outcome_of({"outcome": "committed"}) == "committed"
    assert outcome_of({"outcome": "aborted", "reason": "the request has finished"}) == "the request has finished"
    assert outcome_of({"outcome": "aborted", "reason": "no answer: Cut(port=1)"}) == "no answer: Cut"
    first, second = ({"error": {"message": f"no request {name} here"}} for name in ("a1b2", "c3d4"))
    assert outcome_of(first) == outcome_of(second) == "no request N here"


async def slow(exchange: Exchange) -> None:
    """As ``generate``, with a while between events, so that there is time to move and to kill."""
    request = exchange.request
    generation = Generation(request)
    if not request.json.get("stream"):
        await exchange.json(200, generation.whole())
        return
    begin = await exchange.instance.resumed(request.resume_id) if request.resume_id is not None else None
    resumed = {} if begin is None else {wire.RESUMED_HEADER: wire.encode_resumed_header(str(request.resume_id), begin)}
    await exchange.start(200, resumed)
    blocks = generation.rest(begin)
    for block in blocks[:-3]:
        await exchange.send(block)
        await asyncio.sleep(0.01)
    await exchange.send(*blocks[-3:])  # The end comes at once, as vLLM's does.
    await exchange.finish()


def fake_stack(running: Running, fakes: list[FakeInstance]) -> Stack:
    named = [SimpleNamespace(id=fake.instance_id, url=fake.url, pid=0) for fake in fakes]
    by_id = {one.id: one for one in named}
    stack = SimpleNamespace(
        model=MODEL,
        gateway_url=running.url,
        api_key="any",
        admin_key=ADMIN_KEY,
        secret=SECRET,
        instances=named,
        instance=by_id.__getitem__,
    )
    return cast(Stack, stack)


async def refuse(order: wire.MigrateOrder) -> tuple[int, Any]:
    return 409, {"error": {"message": "the destination is full", "code": "cannot_move"}}


async def soaked(running: Running, fakes: list[FakeInstance], script: Script) -> tuple[Traffic, list[Finding]]:
    """Traffic on instances that go by ``script`` once the twins are known."""
    client = Client(fake_stack(running, fakes))
    try:
        await until_true(lambda: everyone_is_known(running, len(fakes)))
        twins = {kind.name: await run_alone(client, kind, client.url) for kind in FAKE_KINDS}
        for fake in fakes:
            fake.script, fake.migrate = script, refuse
        seen: list[Finding] = []
        traffic = Traffic(client, Choices(3, FAKE_KINDS), twins, seen.append)
        await traffic.run(Plan(seconds=2, streams=3, move_every_s=0.1))
        await until_true(lambda: nothing_held(client))
    finally:
        await client.close()
    return traffic, seen


async def everyone_is_known(running: Running, total: int) -> bool:
    entries = (await running.admin("GET", "/admin/instances")).json()["instances"]
    return [entry["healthy"] and entry["report"] is not None for entry in entries] == [True] * total


async def nothing_held(client: Client) -> bool:
    return not [what for what in await held(client) if what.startswith("the gateway")]


async def test_right_replies_are_equal_and_every_refused_move_is_counted(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as fakes, start_gateway(*fakes) as running:
        traffic, seen = await soaked(running, fakes, slow)
    tally = traffic.tally
    assert (seen, tally.problems) == ([], [])
    assert tally.total("equal") > 0
    assert tally.total("equal") + tally.total("left") == tally.total("requests")
    assert set(tally.kinds) <= {kind.name for kind in FAKE_KINDS}
    assert tally.orders["the destination is full"] > 0


async def test_a_doubled_token_is_found_and_told(start_gateway: StartGateway) -> None:
    async def stutter(exchange: Exchange) -> None:
        if not exchange.request.json.get("stream"):
            await slow(exchange)
            return
        generation = Generation(exchange.request)
        await exchange.start(200)
        await exchange.send(*generation.upto(3), *generation.rest(2))
        await exchange.finish()

    async with instances("a", "b") as fakes, start_gateway(*fakes) as running:
        traffic, seen = await soaked(running, fakes, stutter)
    assert seen == traffic.tally.findings
    assert traffic.tally.total("equal") > 0, "the whole ones"
    assert traffic.tally.total("different") == len(seen) > 0
    assert all("tokens differ from number 3 on" in finding.differences[0] for finding in seen)
    assert {finding.kind for finding in seen} == {"chat", "completion"}


def test_a_phase_fails_for_each_thing_that_is_wrong() -> None:
    def phase(left_over: tuple[str, ...] = (), **changes: Any) -> Phase:
        tally = Tally(kinds={"chat": KindCounts(requests=2, equal=2, migrated=1)})
        for name, value in changes.items():
            setattr(tally, name, value)
        return Phase("moves", 60.0, tally, list(left_over), {}, {})

    finding = Finding("chat", 4, "r4", ["tokens differ from number 3 on"], [], Heard(), Heard())
    assert phase().failures() == []
    assert "nothing differs" in table([phase()])
    for wrong, word in (
        (phase(left_over=("a has 1 requests",)), "a has 1 requests"),
        (phase(findings=[finding]), "tokens differ"),
        (phase(problems=["a drain failed"]), "a drain failed"),
        (phase(kinds={"chat": KindCounts(requests=2, equal=2)}), "no request has moved"),
    ):
        assert len(wrong.failures()) == 1
        assert word in wrong.failures()[0]
        assert f"WRONG: {wrong.failures()[0]}" in table([wrong])
    assert json.loads(json.dumps(to_json(phase(findings=[finding]))))["findings"][0]["request_id"] == "r4"
