"""A leg is lost: start again, resume, or say so."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from gateway.config import Budgets
from gateway.telemetry import cancel_all
from gateway.wire import OWN_REQUEST_ID_HEADER, REQUEST_ID_HEADER, RESUMED_HEADER, encode_resumed_header
from loadtest.processes import free_port
from tests.conftest import Running, StartGateway, chat_body, until
from tests.fake_instance import (
    MODEL,
    Exchange,
    FakeInstance,
    Generation,
    Script,
    error_body,
    generate,
    instances,
    token_ids,
)
from tests.scripts import (
    answers,
    end,
    gone,
    in_turn,
    loses_after,
    moves_after,
    normal,
    prebind,
    resets,
    silent,
    starts_and_waits,
)

ENDS = ("fin", "clean", "cut", "reset")


def events_of(data: bytes) -> list[bytes]:
    return [block for block in data.split(b"\n\n") if block]


def assert_honest_end(data: bytes, tokens: int, *, role: bool = True, reset: bool = False) -> None:
    """The tokens, one error event, and nothing invented. A reset may take with it what was not read yet."""
    events = events_of(data)
    assert len(events) == role + tokens + 1 or (reset and 1 < len(events) < 1 + tokens + 1)
    error = json.loads(events[-1].removeprefix(b"data: "))["error"]
    assert error["code"] in (502, 504)
    assert set(error) == {"message", "type", "param", "code"}
    assert b"[DONE]" not in data
    assert b'"finish_reason":"' not in data


@pytest.mark.parametrize("how", ENDS)
async def test_a_stream_that_is_cut_goes_on_elsewhere(how: str, start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = normal(await running.stream())
        a.script = loses_after(3, how)
        assert normal(await running.stream()) == unmoved
        if how != "reset":  # Which may take with it what was not read yet.
            ((_, resume),) = b.resumes.items()
            assert resume.output_token_ids == token_ids(0, 3)


@pytest.mark.parametrize("how", ENDS)
async def test_a_stream_that_is_cut_with_nowhere_to_go_ends_in_one_error_event(
    how: str, start_gateway: StartGateway
) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = loses_after(3, how)
        assert_honest_end(await running.stream(), 3, reset=how == "reset")


@pytest.mark.parametrize("how", ENDS)
async def test_a_stream_without_an_event_starts_again_elsewhere(how: str, start_gateway: StartGateway) -> None:
    async def script(exchange: Exchange) -> None:
        await loses_after_start(exchange, how)

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = normal(await running.stream())
        a.script = script
        assert normal(await running.stream()) == unmoved
        assert not b.resumes
        assert b.received[-1].resume_id is None


async def loses_after_start(exchange: Exchange, how: str) -> None:
    await exchange.start(chunked=how != "fin")
    if how == "cut":
        await exchange.cut()
    elif how == "clean":
        await exchange.finish()
    elif how == "reset":
        await exchange.reset()


async def test_a_stream_without_an_event_and_nowhere_to_go_is_a_real_502(start_gateway: StartGateway) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start(chunked=False)

    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = script
        response = await running.chat(stream=True)
        assert response.status_code == 502
        assert response.headers["content-type"] == "application/json"
        assert response.json()["error"]["type"] == "BadGatewayError"


async def test_an_instance_that_is_gone_is_passed_over(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        await a.stop()
        try:
            response = await running.chat()
            assert response.status_code == 200
            assert len(b.received) == 1
        finally:
            await a.listen(free_port())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_under_which_two_instances_die_is_not_tried_on_a_third(
    stream: bool, start_gateway: StartGateway
) -> None:
    async with instances("a", "b", "c") as fakes, start_gateway(*fakes) as running:
        for fake in fakes:
            fake.script = resets
        response = await running.chat(stream=stream)
        assert response.status_code == 502
        assert response.json()["error"]["type"] == "BadGatewayError"
        assert sorted(len(fake.received) for fake in fakes) == [0, 1, 1]


async def test_a_stream_under_which_two_instances_die_ends_in_one_error_event(start_gateway: StartGateway) -> None:
    async def resumed_then_lost(exchange: Exchange) -> None:
        await exchange.start(200, {RESUMED_HEADER: encode_resumed_header(exchange.request.resume_id or "", 2)})
        await exchange.send(Generation(exchange.request).token(2))
        await exchange.cut()

    async with instances("a", "b", "c") as (a, b, c), start_gateway(a, b, c) as running:
        a.script, b.script, c.script = loses_after(2, "cut"), resumed_then_lost, resumed_then_lost
        assert_honest_end(await running.stream(), 3)
        assert len(b.received) + len(c.received) == 1


async def test_an_instance_that_fails_before_it_goes_on_with_a_request_is_no_death_under_it(
    start_gateway: StartGateway,
) -> None:
    async with instances("a", "b", "c") as (a, b, c), start_gateway(a, b, c) as running:
        unmoved = normal(await running.stream())
        b.freeness_steps = 9_000
        await until(lambda: running.gateway.dispatcher.choose(None, "a").instance_id == "b")
        a.script, b.resets_resumes = loses_after(3, "cut"), True
        assert normal(await running.stream()) == unmoved
        assert (len(b.received), len(c.received)) == (0, 1)


def heard_of(running: Running, *fakes: FakeInstance) -> bool:
    """Whether each has said what it says now."""
    reports = [member.report for member in running.gateway.members.all()]
    return [report and report.freeness_steps for report in reports] == [fake.freeness_steps for fake in fakes]


async def test_instances_that_have_not_seen_the_request_or_are_busy_are_no_deaths(start_gateway: StartGateway) -> None:
    async def busy(exchange: Exchange) -> None:
        await exchange.json(503, error_body("shutting down", "ServiceUnavailableError", 503))

    async with instances("a", "b", "c", "d") as (a, b, c, d), start_gateway(a, b, c, d) as running:
        a.freeness_steps, b.freeness_steps, c.freeness_steps, d.freeness_steps = 15_000, 9_000, 6_000, 3_000
        await until(lambda: heard_of(running, a, b, c, d))
        # So that nobody notices that c has gone before the request is sent there.
        await cancel_all([loop for loop in running.gateway._loops if loop.get_name() == "discovery"])
        a.script, b.script = resets, busy
        await c.stop()
        try:
            assert (await running.chat()).status_code == 200
            assert (len(a.received), len(b.received), len(d.received)) == (1, 1, 1)
            assert running.gateway.counters.get("legs_lost") == 3
        finally:
            await c.listen(free_port())


async def test_a_reply_in_one_piece_that_is_cut_starts_again(start_gateway: StartGateway) -> None:
    async def cut(exchange: Exchange) -> None:
        await exchange.start(200, {"content-length": "1000"}, content_type="application/json", chunked=False)
        await exchange.raw(b'{"id":')

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = normal((await running.chat()).content)
        a.script = cut
        response = await running.chat()
        assert (response.status_code, normal(response.content)) == (200, unmoved)


async def test_an_instances_own_500_is_tried_elsewhere_and_then_passed_on(start_gateway: StartGateway) -> None:
    async def broken(exchange: Exchange) -> None:
        await exchange.json(500, error_body("engine dead", "InternalServerError", 500), {"x-why": "dead"})

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = broken
        assert (await running.chat()).status_code == 200
        b.script = broken
        response = await running.chat(stream=True)
        assert response.status_code == 500
        assert response.json() == error_body("engine dead", "InternalServerError", 500)
        assert response.headers["x-why"] == "dead"


@pytest.mark.parametrize("wait", ["30", "Mon, 30 Nov 2026 00:00:00 GMT"])
async def test_when_to_come_back_is_told_as_the_last_instance_said_it(wait: str, start_gateway: StartGateway) -> None:
    """F61: where all say that they are too busy."""

    async def busy(exchange: Exchange) -> None:
        await exchange.json(503, error_body("too busy", "ServiceUnavailableError", 503), {"retry-after": wait})

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = b.script = busy
        for stream in (False, True):
            response = await running.chat(stream=stream)
            assert (response.status_code, response.headers.get_list("retry-after")) == (503, [wait])
            assert response.json() == error_body("too busy", "ServiceUnavailableError", 503)
        assert len(a.received) == len(b.received) == 2


@pytest.mark.parametrize("status", [400, 401, 404, 409, 410, 413, 422, 429])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_comes_through_as_it_is_once(status: int, stream: bool, start_gateway: StartGateway) -> None:
    body = b'{"error":  {"message":"no \xe2\x9c\x97","type":"T","param":null,"code":1}}\n'

    async def refuse(exchange: Exchange) -> None:
        headers = {"content-length": str(len(body)), "retry-after": "30"}
        await exchange.start(status, headers, content_type="application/json; x=y", chunked=False)
        await exchange.raw(body)

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = refuse
        response = await running.chat(stream=stream)
        assert (response.status_code, response.content) == (status, body)
        assert response.headers["content-type"] == "application/json; x=y"
        assert response.headers["retry-after"] == "30"
        assert (len(a.received), len(b.received)) == (1, 0)


async def test_the_second_instances_refusal_comes_through_too(start_gateway: StartGateway) -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.json(400, error_body("too long", "BadRequestError", 400))

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script, b.script = resets, refuse
        response = await running.chat(stream=True)
        assert response.status_code == 400
        assert response.json() == error_body("too long", "BadRequestError", 400)


async def test_json_in_answer_to_a_stream_stays_json(start_gateway: StartGateway) -> None:
    async def plain(exchange: Exchange) -> None:
        await exchange.json(200, {"odd": True})

    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = plain
        response = await running.chat(stream=True)
        assert response.headers["content-type"] == "application/json"
        assert response.json() == {"odd": True}


async def test_a_stream_that_hangs_is_lost_after_the_event_budget(start_gateway: StartGateway) -> None:
    budgets = Budgets(event_gap_s=1, header_grace_s=0.05)
    async with instances("a") as (a,), start_gateway(a, budgets=budgets) as running:
        a.script = starts_and_waits
        data = await running.stream()
        assert_honest_end(data, 2)
        assert b'"code": 504' in data
        await gone(await a.exchange())


async def test_an_instance_that_stays_silent_is_a_504_and_let_go(start_gateway: StartGateway) -> None:
    budgets = Budgets(first_byte_s=0.2, whole_reply_s=0.2)
    async with instances("a") as (a,), start_gateway(a, budgets=budgets) as running:
        a.script = silent
        for stream in (False, True):
            response = await running.chat(stream=stream)
            assert response.status_code == 504
            assert response.json()["error"]["type"] == "GatewayTimeoutError"
        await gone(*a.exchanges)


async def test_garbage_instead_of_http_is_a_502(start_gateway: StartGateway) -> None:
    async def garbage(exchange: Exchange) -> None:
        await exchange.raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")

    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = garbage
        response = await running.chat()
        assert response.status_code == 502
        assert "SSH" not in response.text


async def test_an_error_event_that_is_the_requests_own_passes_unchanged(start_gateway: StartGateway) -> None:
    """F30: it would be the same elsewhere. What its code does not say to be the instance's failure is taken for one."""
    chunk = b'data: {"id":"x","created":1,"choices":[{"index":0,"delta":{"content":"x"},"token_ids":[1]}]}\n\n'
    codes = (b"400", b'"429"', b"null", b'"queue_full"', b"499", b"true", b"1e999", b"[500]")
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        for code in codes:
            error = b'data: {"error":{"message":"no","type":"Busy","param":null,"code":%b}}\n\n' % code
            for done in (True, False):
                a.script = answers(chunk, error, done=done)
                data = await running.stream()
                assert error in data
                assert data.endswith(b"data: [DONE]\n\n") == done
                recent = (await running.admin("GET", "/admin/requests")).json()["recent"]
                assert recent[0]["state"] == "failed"
        assert not b.received


async def test_what_is_not_one_sequence_is_not_resumed(start_gateway: StartGateway) -> None:
    """F09: the state of several sequences cannot be rebuilt from one list of tokens."""
    fields: tuple[dict[str, object], ...] = ({"n": 2}, {"best_of": 2}, {"use_beam_search": True})
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = loses_after(3, "cut")
        for one in fields:
            assert_honest_end(await running.stream(**one), 3)
        body = {"model": MODEL, "stream": True}
        for prompt in (["a", "b"], [[1, 2], [3]]):
            response = await running.client.post("/v1/completions", json=body | {"prompt": prompt})
            assert_honest_end(response.content, 3, role=False)
        assert not b.received


async def test_of_several_choices_those_that_are_finished_stay_so(start_gateway: StartGateway) -> None:
    """F09: one has ended and the others have not when their instance dies."""

    async def one_ends(exchange: Exchange) -> None:
        last = Generation(exchange.request).rest()[-2]
        await exchange.start()
        await exchange.send(*Generation(exchange.request).upto(3), last)
        await exchange.send(Generation(exchange.request).token(3).replace(b'"index":0', b'"index":1'))
        await exchange.cut()

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = one_ends
        data = await running.stream(n=2)
        assert (data.count(b'"finish_reason":"'), data.count(b'"error"'), data.count(b"[DONE]")) == (1, 1, 0)
        assert not b.received


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_resumed_stream_is_one_reply(path: str, start_gateway: StartGateway) -> None:
    """F07: the instance that goes on gets the same body, budgets and seeds included, and the tokens as output.
    F13, F14: id, creation time, role, usage and the one finish are as if it had never moved.
    F25: what was sent is not sent again, and the attempt is counted once."""
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    budgets = {"max_tokens": 10, "min_tokens": 8, "ignore_eos": True}
    sampling = {"frequency_penalty": 1.5, "seed": 7, "temperature": 1}
    running_usage = {"include_usage": True, "continuous_usage_stats": True}
    for options in (None, {"include_usage": True}, running_usage):
        body = {"model": MODEL, "stream": True, "stream_options": options} | prompt | budgets | sampling
        async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
            b.created = 5
            unmoved = normal((await running.client.post(path, json=body)).content)
            for tokens in (1, 4, 9):
                a.script = loses_after(tokens, "cut")
                b.resumes.clear()
                before = running.gateway.counters.get("requests_resumed")
                assert normal((await running.client.post(path, json=body)).content) == unmoved
                assert a.received[-1].body == b.received[-1].body
                assert [resume.output_token_ids for resume in b.resumes.values()] == [token_ids(0, tokens)]
                assert running.gateway.counters.get("requests_resumed") == before + 1
            a.script = loses_after(10, "cut")  # All of them, and their finish.
            received = len(b.received)
            assert normal((await running.client.post(path, json=body)).content) == unmoved
            assert len(b.received) == received + bool(options)  # The usage is not made up: the other says it.


async def test_a_stream_that_lacks_only_done_is_ended_without_a_second_finish(start_gateway: StartGateway) -> None:
    async def no_done(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.send(*Generation(exchange.request).rest()[:-1])
        await exchange.finish()

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = normal(await running.stream())
        a.script = no_done
        assert normal(await running.stream()) == unmoved
        assert not b.received


async def test_a_source_that_dies_while_moving_is_resumed_from_our_tokens(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = normal(await running.stream())

        async def dies(exchange: Exchange) -> None:
            await exchange.start()
            await exchange.send(*Generation(exchange.request).upto(2), prebind(b))
            waiting = await b.exchange()
            await exchange.reset()
            await gone(waiting)

        a.script = dies
        assert normal(await running.stream()) == unmoved


async def test_counts_are_given_back_on_every_way_out(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        scripts = [
            generate,
            loses_after(3, "reset"),
            loses_after(0, "fin"),
            moves_after(3, b),
            answers(b"data: x\n\n", done=False),
        ]
        for script in scripts:
            a.script = in_turn(script, generate, generate, generate)
            await running.chat(stream=True)
        dispatcher = running.gateway.dispatcher
        await until(lambda: dispatcher.in_flight("a") == dispatcher.in_flight("b") == 0)


async def test_a_proxy_in_the_environment_is_not_used(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with instances("a") as (a,), start_gateway(a) as running:
        assert (await running.chat()).status_code == 200


async def test_an_instance_that_comes_back_is_used_again(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        port = int(httpx.URL(a.url).port or 0)
        await a.stop()
        await until(lambda: running.gateway.members.healthy_count() == 0, 30)
        assert (await running.chat()).status_code == 503
        a.boot_id = "boot-2"
        a._sequence = 0
        await a.listen(port)
        await until(lambda: running.gateway.members.healthy_count() == 1)
        assert (await running.chat()).status_code == 200
        instance = running.gateway.members.get("a")
        assert instance is not None
        assert instance.boot_id == "boot-2"


@pytest.mark.parametrize("how", ENDS)
async def test_nothing_follows_an_error_event_of_the_instance(how: str, start_gateway: StartGateway) -> None:
    error = b'data: {"error":{"message":"bad","type":"BadRequestError","param":null,"code":400}}\n\n'

    async def script(exchange: Exchange) -> None:
        await exchange.start(chunked=how != "fin")
        await exchange.send(*Generation(exchange.request).upto(2), error)
        await asyncio.sleep(0.05)  # A reset would take with it what was not read yet.
        await end(exchange, how)

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = script
        data = await running.stream()
        assert data.endswith(error)
        assert data.count(b"error") == 1
        assert not b.received
        recent = (await running.admin("GET", "/admin/requests")).json()["recent"]
        assert recent[0]["state"] == "failed"


@pytest.mark.parametrize("how", ENDS)
async def test_a_stream_that_is_cut_after_its_role_has_one_role(how: str, start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = normal(await running.stream())
        a.script = loses_after(0, how)
        assert normal(await running.stream()) == unmoved


async def test_text_whose_tokens_are_not_known_is_never_said_again(start_gateway: StartGateway) -> None:
    async def script(exchange: Exchange) -> None:
        generation = Generation(exchange.request)
        await exchange.start()
        await exchange.send(generation.role(), generation.token(0).replace(b'"token_ids":[', b'"odd":['))
        await exchange.cut()

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = script
        assert_honest_end(await running.stream(), 1)
        assert not b.received


async def test_every_leg_of_a_request_has_the_same_id_and_no_other_request_has_it(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = resets
        body = chat_body(request_id="same")
        post = running.client.post
        replies = [post("/v1/chat/completions", json=body, headers={REQUEST_ID_HEADER: "same"}) for _ in range(2)]
        ids = sorted(reply.headers[OWN_REQUEST_ID_HEADER] for reply in await asyncio.gather(*replies))
        assert len(set(ids)) == 2
        for fake in (a, b):
            assert sorted(received.headers[REQUEST_ID_HEADER] for received in fake.received) == ids


async def test_a_resume_before_the_first_token_does_not_say_the_role_again(start_gateway: StartGateway) -> None:
    """A leg that is resumed from no tokens has nothing to leave out: the instance opens the reply anew."""

    async def opens_and_dies(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.send(Generation(exchange.request).role())
        await exchange.cut()

    async def says_all(exchange: Exchange) -> None:
        assert exchange.request.resume_id is not None
        await exchange.start(200, {RESUMED_HEADER: encode_resumed_header(exchange.request.resume_id, 0)})
        await exchange.send(*Generation(exchange.request).rest())
        await exchange.finish()

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = normal(await running.stream())
        a.script, b.script = opens_and_dies, says_all
        assert normal(await running.stream()) == unmoved


@pytest.mark.parametrize("ids", [b"[1,,2]", b"[" + b"9" * 5000 + b"]"])
async def test_an_event_that_cannot_be_read_is_a_lost_leg(ids: bytes, start_gateway: StartGateway) -> None:
    async def script(exchange: Exchange) -> None:
        generation = Generation(exchange.request)
        await exchange.start()
        await exchange.send(*generation.upto(2))
        await asyncio.sleep(0.05)
        await exchange.send(b'data: {"choices":[{"index":0,"delta":{"content":"x"},"token_ids":%b}]}\n\n' % ids)

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = normal(await running.stream())
        a.script = script
        assert normal(await running.stream()) == unmoved
        assert b.received[-1].resume_id is not None


OWN_FAILURES = {
    "engine dead": (
        500,
        b'data: {"error":{"message":"dead","type":"InternalServerError","param":null,"code":500}}\n\n',
    ),
    "shutting down": (503, b'data: {"error": {"message":"no","type":"X","param":null,"code":"503"}}\n\n'),
}


def fails_after(tokens: int | None, event: bytes) -> Script:
    """Says within its stream that it has failed, and ends it as vLLM does. ``None``: before anything else."""

    async def script(exchange: Exchange) -> None:
        await exchange.start()
        said = [] if tokens is None else Generation(exchange.request).upto(tokens)
        await exchange.send(*said[:-1], b"".join([*said[-1:], event]), b"data: [DONE]\n\n")
        await exchange.finish()

    return script


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_instances_failure_within_its_stream_is_a_lost_leg(path: str, start_gateway: StartGateway) -> None:
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    body = {"model": MODEL, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}, **prompt}
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = normal((await running.client.post(path, json=body)).content)
        for _, event in OWN_FAILURES.values():
            for tokens in (None, 0, 1, 7):
                a.script = fails_after(tokens, event)
                b.resumes.clear()
                assert normal((await running.client.post(path, json=body)).content) == unmoved, (tokens, event)
                if tokens:
                    assert [resume.output_token_ids for resume in b.resumes.values()] == [token_ids(0, tokens)]


@pytest.mark.parametrize("failure", OWN_FAILURES)
async def test_an_instances_failure_within_its_stream_is_passed_on_once_when_nobody_can_go_on(
    failure: str, start_gateway: StartGateway
) -> None:
    status, event = OWN_FAILURES[failure]
    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = fails_after(3, event)
        data = await running.stream()
        assert data.endswith(event)
        assert (data.count(b"error"), data.count(b"[DONE]"), data.count(b'"finish_reason":"')) == (1, 0, 0)
        assert data.count(b'"content":" w') == 3
        a.script = fails_after(None, event)
        response = await running.chat(stream=True)
        assert (response.status_code, response.content) == (status, event.removeprefix(b"data: ").rstrip())


def aborted(block: bytes) -> bytes:
    """As a vLLM server ends its requests that has got SIGTERM."""
    return block.replace(b'"finish_reason":null', b'"finish_reason":"abort"').replace(b" w", b"")


async def test_an_abort_that_nobody_asked_for_is_a_lost_leg(start_gateway: StartGateway) -> None:
    async def aborts(exchange: Exchange) -> None:
        generation = Generation(exchange.request)
        if exchange.request.json.get("stream"):
            await exchange.start()
            await exchange.send(*generation.upto(3), aborted(generation.token(3)), b"data: [DONE]\n\n")
            await exchange.finish()
        else:
            whole = generation.whole()
            whole["choices"][0]["finish_reason"] = "abort"
            await exchange.json(200, whole)

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved, whole = normal(await running.stream()), normal((await running.chat()).content)
        a.script = aborts
        assert normal(await running.stream()) == unmoved
        assert normal((await running.chat()).content) == whole
        b.script = aborts
        assert_honest_end(await running.stream(n=2), 3)
        assert (await running.chat()).status_code == 502


async def test_a_failure_after_hidden_tokens_is_one_error_event(start_gateway: StartGateway) -> None:
    """With hidden reasoning vLLM tells no token ids, so nobody knows from where to go on."""

    async def hides(exchange: Exchange) -> None:
        shown = Generation(exchange.request).upto(3)
        await exchange.start()
        await exchange.send(*(block.replace(b'"token_ids":[', b'"token_ids":null,"was":[') for block in shown))
        await exchange.cut()

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = hides
        assert_honest_end(await running.stream(include_reasoning=False), 3)
        assert not b.received


@pytest.mark.parametrize("how", ["cut", "reset"])
async def test_an_instance_that_dies_on_its_last_word_has_said_all(how: str, start_gateway: StartGateway) -> None:
    async def no_done(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.send(*Generation(exchange.request).rest()[:-1])
        await asyncio.sleep(0.1)  # A reset would take with it what was not read yet.
        await end(exchange, how)

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = normal(await running.stream())
        a.script = no_done
        assert normal(await running.stream()) == unmoved
        assert not b.received


async def test_a_stream_that_is_cut_before_its_usage_gets_it_elsewhere(start_gateway: StartGateway) -> None:
    """The finish has been said: the other instance says it again, with the usage behind it."""

    async def no_usage(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.send(*Generation(exchange.request).rest()[:-2])
        await exchange.cut()

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        fields = {"stream_options": {"include_usage": True}}
        unmoved = normal(await running.stream(**fields))
        a.script = no_usage
        assert normal(await running.stream(**fields)) == unmoved
        assert len(b.received) == 1
