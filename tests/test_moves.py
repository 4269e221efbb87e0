"""A request moves, and the client does not notice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway import wire
from gateway.config import Budgets
from tests.conftest import Running, StartGateway
from tests.fake_instance import Exchange, FakeInstance, Generation, generate, instances, token_ids
from tests.scripts import gone, in_turn, moved, moves_after, normal, one_byte_each, prebind, unbind

PATHS = ("/v1/chat/completions", "/v1/completions")


async def stream(running: Running, path: str = PATHS[0], **fields: Any) -> bytes:
    prompt = {"prompt": "hello"} if path == PATHS[1] else {"messages": [{"role": "user", "content": "hello"}]}
    body = {"model": "kvferry-test", "max_tokens": 8, "stream": True, **prompt, **fields}
    response = await running.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return normal(response.content)


async def moves_of(running: Running) -> list[dict[str, Any]]:
    """Of the last request that ended."""
    recent = (await running.admin("GET", "/admin/requests")).json()["recent"]
    moves: list[dict[str, Any]] = recent[0]["moves"]
    return moves


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_is_the_same_wherever_it_moves(path: str, start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        b.created = 5
        fields: dict[str, Any]
        usage = {"include_usage": True}
        running_usage = usage | {"continuous_usage_stats": True}
        for fields in ({"stream_options": usage}, {"stream_options": running_usage}, {"return_token_ids": True}):
            a.script = generate
            unmoved = await stream(running, path, **fields)
            for tokens in range(1, 8):
                a.script = moves_after(tokens, b, f"m{tokens}{len(b.received)}")
                assert await stream(running, path, **fields) == unmoved, f"moved after {tokens} tokens"


async def test_a_stream_is_the_same_however_its_bytes_are_cut(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = await stream(running)

        async def source(exchange: Exchange) -> None:
            await exchange.start()
            blocks = [prebind(b), *Generation(exchange.request).upto(3), moved(b, 3)]
            b.commit("m1", 3)
            await exchange.send(*one_byte_each(blocks))
            await exchange.finish()

        async def destination(exchange: Exchange) -> None:
            await exchange.start(200, {wire.RESUMED_HEADER: "m1 3"})
            await exchange.send(*one_byte_each(Generation(exchange.request).rest(3)))
            await exchange.finish()

        a.script, b.script = source, destination
        assert await stream(running) == unmoved


async def test_all_of_a_streams_bytes_may_come_at_once(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = await stream(running)
        b.commit("m1", 3)

        async def source(exchange: Exchange) -> None:
            await exchange.start()
            await exchange.send(b"".join([*Generation(exchange.request).upto(3), prebind(b), moved(b, 3)]))
            await exchange.finish()

        a.script = source
        assert await stream(running) == unmoved


async def test_a_stream_moves_while_its_reasoning_is_hidden(start_gateway: StartGateway) -> None:
    """Nothing but the role has been shown, so the instance's count of tokens is the only one there is."""
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:

        async def source(exchange: Exchange) -> None:
            await exchange.start()
            b.commit("m1", 3)
            await exchange.send(Generation(exchange.request).role(), prebind(b), moved(b, 3))
            await exchange.finish()

        a.script = source
        reply = await stream(running, include_reasoning=False)
        assert reply.count(b'finish_reason":"length') == 1
        assert [move["kind"] for move in await moves_of(running)] == ["migrated"]
        assert not b.resumes, "a live move, not a resume"


async def test_the_same_body_and_id_go_to_both_instances(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = moves_after(3, b)
        await stream(running, seed=9007199254740993)
        (at_a,), (at_b,) = a.received, b.received
        assert at_a.body == at_b.body
        assert b'"seed": 9007199254740993' in at_a.body or b'"seed":9007199254740993' in at_a.body
        assert at_a.headers[wire.REQUEST_ID_HEADER] == at_b.headers[wire.REQUEST_ID_HEADER]
        assert (at_a.resume_id, at_b.resume_id) == (None, "m1")


async def test_a_destination_that_is_ready_is_switched_to_without_waiting(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        ready = asyncio.Event()

        async def source(exchange: Exchange) -> None:
            await exchange.start()
            await exchange.send(prebind(b), *Generation(exchange.request).upto(3))
            b.commit("m1", 3)
            await ready.wait()
            await exchange.send(moved(b, 3))
            await exchange.client_gone.wait()  # It need not even end its stream.

        async def destination(exchange: Exchange) -> None:
            await generate(exchange)
            ready.set()

        a.script, b.script = source, destination
        await stream(running)
        (move,) = await moves_of(running)
        assert (move["source"], move["destination"], move["kind"]) == ("a", "b", "migrated")
        assert move["pause_ms"] > 0


async def test_moved_may_come_before_the_destination_is_live(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = await stream(running)
        has_moved = asyncio.Event()

        async def source(exchange: Exchange) -> None:
            await exchange.start()
            await exchange.send(prebind(b), *Generation(exchange.request).upto(3), moved(b, 3))
            await exchange.finish()
            has_moved.set()

        async def destination(exchange: Exchange) -> None:
            await has_moved.wait()
            b.commit("m1", 3)
            await generate(exchange)

        a.script, b.script = source, destination
        assert await stream(running) == unmoved


async def test_a_move_without_prebind_is_followed_all_the_same(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = await stream(running)
        b.commit("m1", 3)

        async def source(exchange: Exchange) -> None:
            await exchange.start()
            await exchange.send(*Generation(exchange.request).upto(3), moved(b, 3))
            await exchange.finish()

        a.script = source
        assert await stream(running) == unmoved


async def test_after_unbind_the_source_goes_on_and_the_destination_is_let_go(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = await stream(running)

        async def source(exchange: Exchange) -> None:
            generation = Generation(exchange.request)
            await exchange.start()
            await exchange.send(*generation.upto(3), prebind(b))
            waiting = await b.exchange()
            await exchange.send(unbind())
            await gone(waiting)
            await exchange.send(*generation.rest(3))
            await exchange.finish()

        a.script = source
        assert await stream(running) == unmoved
        assert await moves_of(running) == []


async def test_what_a_destination_says_before_moved_is_not_shown(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = await stream(running)

        async def source(exchange: Exchange) -> None:
            generation = Generation(exchange.request)
            await exchange.start()
            await exchange.send(*generation.upto(3), prebind(b))
            b.commit("m1", 3)
            await b.exchange()
            await exchange.send(*generation.rest(3))
            await exchange.finish()

        a.script = source
        assert await stream(running) == unmoved
        assert await moves_of(running) == []


async def test_an_unknown_destination_is_ignored_until_the_request_is_there(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = await stream(running)
        nobody = FakeInstance("nobody")

        async def source(exchange: Exchange) -> None:
            await exchange.start()
            await exchange.send(prebind(nobody), *Generation(exchange.request).upto(3), moved(nobody, 3))
            await exchange.finish()

        a.script = in_turn(source, generate)
        assert await stream(running) == unmoved


async def test_a_second_migration_replaces_the_first(start_gateway: StartGateway) -> None:
    async with instances("a", "b", "c") as (a, b, c), start_gateway(a, b, c) as running:
        unmoved = await stream(running)

        async def source(exchange: Exchange) -> None:
            generation = Generation(exchange.request)
            await exchange.start()
            await exchange.send(*generation.upto(2), prebind(b, "m1"))
            first = await b.exchange()
            await exchange.send(unbind("m1"), prebind(c, "m2"))
            await gone(first)
            c.commit("m2", 2)
            await exchange.send(moved(c, 2, "m2"))
            await exchange.finish()

        a.script = source
        assert await stream(running) == unmoved


async def test_a_request_moves_there_and_back(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        fields: dict[str, Any] = {"stream_options": {"include_usage": True}}
        unmoved = await stream(running, **fields)

        async def there(exchange: Exchange) -> None:
            await exchange.start(200, {wire.RESUMED_HEADER: "m1 2"})
            generation = Generation(exchange.request, created=7)
            await exchange.send(prebind(a, "m2"), generation.token(2), generation.token(3))
            a.commit("m2", 4)
            await exchange.send(moved(a, 4, "m2"))
            await exchange.finish()

        a.script, b.script = in_turn(moves_after(2, b), generate), there
        back = await stream(running, **fields)
        assert back == unmoved
        assert back.count(b"data: [DONE]") == back.count(b'"usage":{') == back.count(b'"finish_reason":"length"') == 1
        assert [(move["source"], move["destination"]) for move in await moves_of(running)] == [("a", "b"), ("b", "a")]


async def test_a_destination_that_answers_410_is_made_good_from_the_gateways_own_tokens(
    start_gateway: StartGateway,
) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = await stream(running)
        b.abort("m1")

        async def source(exchange: Exchange) -> None:
            await exchange.start()
            await exchange.send(prebind(b), *Generation(exchange.request).upto(3), moved(b, 3))
            await exchange.finish()

        a.script = in_turn(source, generate)
        assert await stream(running) == unmoved
        ((_, resume),) = a.resumes.items()
        assert resume == wire.Resume(a.received[-1].headers[wire.REQUEST_ID_HEADER], token_ids(0, 3), moves=1)
        assert [move["kind"] for move in await moves_of(running)] == ["migrated", "resumed"]


@pytest.mark.parametrize(("said_by_source", "said_by_destination"), [(4, 3), (3, 4), (3, 2), (4, 4)])
async def test_a_count_that_is_not_ours_is_not_followed(
    said_by_source: int, said_by_destination: int, start_gateway: StartGateway
) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = await stream(running)
        b.commit("m1", said_by_destination)

        async def source(exchange: Exchange) -> None:
            await exchange.start()
            await exchange.send(prebind(b), *Generation(exchange.request).upto(3), moved(b, said_by_source))
            await exchange.finish()

        a.script = in_turn(source, generate)
        assert await stream(running) == unmoved
        ((_, resume),) = a.resumes.items()
        assert resume.output_token_ids == token_ids(0, 3)


async def test_a_destination_that_stays_silent_after_moved_is_given_up(start_gateway: StartGateway) -> None:
    budgets = Budgets(moved_s=0.5, header_grace_s=0.05)
    async with instances("a", "b") as (a, b), start_gateway(a, b, budgets=budgets) as running:
        unmoved = await stream(running)

        async def source(exchange: Exchange) -> None:
            await exchange.start()
            await exchange.send(prebind(b), *Generation(exchange.request).upto(3), moved(b, 3))
            await exchange.finish()

        a.script = in_turn(source, generate)
        assert await stream(running) == unmoved
        await gone(await b.exchange())


async def test_a_reply_in_one_piece_moves_too(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = await running.chat()

        async def source(exchange: Exchange) -> None:
            b.commit("m1", 3)
            await exchange.json(409, {}, {wire.MOVED_HEADER: "m1 b 3"})

        a.script = source
        reply = await running.chat()
        assert (reply.status_code, normal(reply.content)) == (200, normal(unmoved.content))
        assert wire.MOVED_HEADER not in reply.headers
        assert wire.RESUMED_HEADER not in reply.headers
        (move,) = await moves_of(running)
        assert (move["destination"], move["output_tokens"], move["pause_ms"]) == ("b", 3, None)


async def test_a_reply_in_one_piece_begins_again_when_its_destination_has_lost_it(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = await running.chat()
        b.abort("m1")

        async def source(exchange: Exchange) -> None:
            await exchange.json(409, {}, {wire.MOVED_HEADER: "m1 b 3"})

        a.script = in_turn(source, generate)
        assert normal((await running.chat()).content) == normal(unmoved.content)


async def test_a_move_records_its_pause_beside_the_usual_gap(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:

        async def source(exchange: Exchange) -> None:
            generation = Generation(exchange.request)
            await exchange.start()
            await exchange.send(prebind(b), generation.role())
            for index in range(3):
                await asyncio.sleep(0.01)
                await exchange.send(generation.token(index))
            await exchange.send(moved(b, 3))
            await asyncio.sleep(0.1)
            b.commit("m1", 3)
            await exchange.finish()

        a.script = source
        await stream(running)
        recent = (await running.admin("GET", "/admin/requests")).json()["recent"][0]
        (move,) = recent["moves"]
        assert recent["token_gap_ms"] > 0
        assert move["pause_ms"] >= 100


async def test_reasoning_without_token_ids_moves_on_the_instances_word(start_gateway: StartGateway) -> None:
    """With hidden reasoning vLLM tells no token ids: the gateway cannot count, and cannot resume by itself."""

    def hidden(blocks: list[bytes]) -> list[bytes]:
        return [block.replace(b'"token_ids":[', b'"token_ids":null,"was":[') for block in blocks]

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:

        async def source(exchange: Exchange) -> None:
            await exchange.start()
            await exchange.send(prebind(b), *hidden(Generation(exchange.request).upto(3)))
            b.commit("m1", 3)
            await exchange.send(moved(b, 3))
            await exchange.finish()

        a.script = source
        data = await stream(running)
        assert data.count(b"content") == 9
        assert data.endswith(b"data: [DONE]\n\n")
        assert not a.resumes
        assert not b.resumes
