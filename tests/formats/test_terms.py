"""What a body may ask for, how urgent it is, and how many tokens it comes to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.errors import BadRequest
from gateway.openai.body import GenerateBody, read_body, read_forward_body
from gateway.openai.caps import Caps, read_caps
from gateway.openai.meter import Meter
from gateway.openai.terms import Estimate, Terms, Work
from gateway.wire import PriorityClass

HIGH, NORMAL, LOW = PriorityClass.HIGH, PriorityClass.NORMAL, PriorityClass.LOW


def body(terms: Terms | None = None, **fields: Any) -> GenerateBody:
    return read_body(json.dumps(fields).encode(), terms or Terms())


def told(body: GenerateBody) -> int:
    priority: int = json.loads(body.upstream).get("priority", 0)
    return priority


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        (None, NORMAL),
        ("auto", NORMAL),
        ("default", NORMAL),
        ("standard_only", NORMAL),
        ("flex", LOW),
        ("priority", HIGH),
        ("scale", HIGH),
    ],
)
def test_a_service_tier_chooses_the_class_and_goes_on_as_it_came(tier: str | None, expected: PriorityClass) -> None:
    read = body(service_tier=tier)
    assert read.asked.priority_class == expected
    assert told(read) == expected
    assert json.loads(read.upstream)["service_tier"] == tier


def test_a_higher_class_is_a_smaller_number_to_vllm() -> None:
    numbers = [told(body(Terms(priority_header=word))) for word in ("high", "normal", "low")]
    assert numbers == sorted(set(numbers))
    assert numbers[1] == 0


def test_the_default_class_adds_nothing_to_a_body() -> None:
    assert read_body(b'{"prompt":"x"}').upstream == b'{"prompt":"x"}'
    assert read_body(b'{"stream":true,"service_tier":"flex"}').upstream.endswith(
        b'"service_tier":"flex","return_token_ids":true,"priority":100}'
    )


def test_the_header_comes_before_the_tier() -> None:
    assert body(Terms(priority_header=" Low "), service_tier="priority").asked.priority_class == LOW


@pytest.mark.parametrize("priority_max", list(PriorityClass))
def test_nothing_lifts_a_request_above_its_keys_class(priority_max: PriorityClass) -> None:
    asked: list[dict[str, Any]] = [{}, {"service_tier": "priority"}, {"service_tier": "scale"}]
    forged: list[Any] = [-1, -(2**63), 10**400, 0, 1.5, "-5", True, None, [], {}]
    asked += [{"priority": value} for value in forged]
    for fields in asked:
        for header in (None, "high", "normal", "low"):
            read = body(Terms(priority_max=priority_max, priority_header=header), **fields)
            assert read.asked.priority_class >= priority_max
            assert told(read) >= priority_max
            assert read.upstream.count(b'"priority":') <= 1


def test_a_request_below_its_keys_class_stays_there() -> None:
    assert body(Terms(priority_max=HIGH, priority_header="low")).asked.priority_class == LOW


@pytest.mark.parametrize("tier", ["", "Priority", "turbo", 1, True, [], {}])
def test_an_unknown_tier_is_refused_by_name(tier: Any) -> None:
    with pytest.raises(BadRequest, match="service_tier") as refusal:
        body(service_tier=tier)
    assert refusal.value.param == "service_tier"


@pytest.mark.parametrize("word", ["", "urgent", "0", "-100", "high,low"])
def test_an_unknown_class_is_refused_by_name(word: str) -> None:
    with pytest.raises(BadRequest, match="x-kvferry-priority"):
        body(Terms(priority_header=word))


def test_instances_that_take_no_priority_are_told_none() -> None:
    read = body(Terms(priority_header="high", sends_priority=False), priority=3)
    assert "priority" not in json.loads(read.upstream)


@pytest.mark.parametrize(
    ("param", "cap", "allowed", "refused"),
    [
        ("n", "n", 4, 5),
        ("best_of", "n", 4, 5),
        ("n", "n", None, "5"),
        ("n", "n", "4", 5.0),
        ("logprobs", "logprobs", 4, 5),
        ("logprobs", "logprobs", True, -1),
        ("top_logprobs", "logprobs", 4, 5),
        ("prompt_logprobs", "logprobs", 0, 5),
        ("max_tokens", "max_tokens", 4, 5),
        ("max_completion_tokens", "max_tokens", 4, 10**400),
        ("max_output_tokens", "max_tokens", 4, 5),
        ("min_tokens", "max_tokens", 4, 5),
        ("prompt", "prompts", ["x"] * 4, ["x"] * 5),
        ("prompt", "prompts", [1] * 5, [[1]] * 5),
        ("input", "prompts", [{"role": "user"}] * 5, ["x"] * 5),
        ("documents", "prompts", ["x"] * 4, [{"text": "x"}] * 5),
        ("stop", "stop", ["x"] * 4, ["x"] * 5),
        ("stop", "stop", "xxxxx", ["x"] * 5),
        ("bad_words", "stop", ["x"] * 4, ["x"] * 5),
        ("max_tokens", "max_tokens", "four", " 5 "),
    ],
)
def test_a_cap_is_refused_with_its_parameter_and_its_bound(param: str, cap: str, allowed: Any, refused: Any) -> None:
    terms = Terms(Caps(**{cap: 4}))
    body(terms, **{param: allowed})
    with pytest.raises(BadRequest, match="at most 4") as refusal:
        body(terms, **{param: refused})
    assert refusal.value.param == param


def test_a_repeated_key_cannot_hide_from_a_cap() -> None:
    with pytest.raises(BadRequest, match="`n`"):
        read_body(b'{"n":1,"n":500}')


def test_beams_and_sequences_have_bounds_of_their_own() -> None:
    body(n=128, prompt="x")
    with pytest.raises(BadRequest, match="use_beam_search") as refusal:
        body(n=17, use_beam_search=True)
    assert refusal.value.param == "n"
    with pytest.raises(BadRequest, match="use_beam_search"):
        body(Terms(Caps(beam_width=0)), use_beam_search="yes")
    with pytest.raises(BadRequest, match="8192"):
        body(n=128, prompt=["x"] * 65)


def test_what_is_no_number_is_left_to_the_instance() -> None:
    values: list[Any] = [None, True, [], {}, "x", "nan", "1e999"]
    for value in values:
        body(n=value, max_tokens=value, logprobs=value, stop=value, prompt=value)


def test_caps_are_read_by_name() -> None:
    assert read_caps("") == Caps()
    assert read_caps("n=2, stop = 3,") == Caps(n=2, stop=3)
    wrong_ones = (("m=2", "m"), ("n", "n"), ("n=-1", "n"), ("n=x", "n"), ("n=\N{SUPERSCRIPT TWO}", "n"))
    for wrong, name in wrong_ones:
        with pytest.raises(ValueError, match=name):
            read_caps(wrong)


def test_tokens_are_estimated_from_the_size_of_the_body_and_from_what_it_asks_for() -> None:
    estimate = body(prompt="x" * 400, max_tokens=10, n=3).asked.estimate
    assert 100 <= estimate.prompt < 120
    assert estimate.output == 30
    assert body(messages=[], max_completion_tokens=7, max_tokens=9).asked.estimate.output == 7
    assert body(prompt=["x", "y"], max_tokens=5).asked.estimate.output == 10
    assert body(messages=[]).asked.estimate.output > 0
    batch = [[{"role": "user", "content": "x"}]] * 2
    assert body(messages=batch, max_tokens=5).asked.estimate.output == 10
    raw = b'{"input": "' + b"x" * 400 + b'", "messages": []}'
    estimates = [read_forward_body(raw, Terms(work=work)).asked.estimate for work in Work]
    assert [(one.prompt >= 100, one.output > 0) for one in estimates] == [(True, True), (True, False), (False, False)]


ESTIMATE = Estimate(100, 50)


def test_a_meter_takes_the_replys_own_usage_where_there_is_one() -> None:
    meter = Meter()
    assert meter.tokens(ESTIMATE) == 150
    meter.whole(200, b'{"usage":{"prompt_tokens":3,"details":{"a":{}},"total_tokens":11}}')
    nested = b'{"usage": {"input_tokens": 3, "input_tokens_details": {"cached_tokens": 0}, "total_tokens": 12}}'
    for usage, tokens in ((b'{"usage":{"total_tokens":11}}', 11), (nested, 12)):
        meter.whole(200, b'{"text":"\\"usage\\":{\\"total_tokens\\":5}",' + usage[1:])
        assert meter.tokens(ESTIMATE) == tokens
    meter.whole(200, b'{"type":"message","usage":{"input_tokens":3,"output_tokens":4}}')
    assert meter.tokens(ESTIMATE) == 7
    meter.whole(400, b'{"error":{}}')
    assert meter.tokens(ESTIMATE) == 0


def test_a_meter_counts_a_streams_token_ids() -> None:
    meter = Meter()
    meter.event(b'data: {"prompt_token_ids":[1, 2,3],"choices":[]}', 0, usage=False)
    meter.event(b'data: {"choices":[]}', 2, usage=False)
    meter.event(b'data: {"choices":[]}', 1, usage=False)
    assert meter.tokens(ESTIMATE) == 6
    meter.restart()
    meter.event(b'data: {"prompt_token_ids":null}', 1, usage=False)
    assert meter.tokens(ESTIMATE) == 4
    meter.event(b'data: {"usage":{"prompt_tokens":3,"total_tokens":40}}', 0, usage=True)
    assert meter.tokens(ESTIMATE) == 40
