"""The soak's comparison finds each thing that can go wrong with a reply."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from loadtest.comparison import Heard, honest_error_differences, stream_differences, whole_differences

IDENTITY = {"id": "chatcmpl-r", "created": 7, "model": "m", "object": "chat.completion.chunk"}


def event(index: int = 0, finish: str | None = None, tokens: list[int] | None = None, **delta: Any) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish, "token_ids": tokens or []}
    return {**IDENTITY, "choices": [choice]}


def stream() -> Heard:
    """A chat with text, reasoning, logprobs, two tool calls, a finish and its usage."""
    heard = Heard(status=200, request_id="r", done=1)
    heard.events = [event(role="assistant", content="")]
    heard.events += [event(tokens=[number], content=f"w{number} ", reasoning="so ") for number in range(5)]
    for number, made in enumerate(heard.events[1:]):
        top = [{"token": f"w{number}", "logprob": -0.25}, {"token": "other", "logprob": -2.0}]
        made["choices"][0]["logprobs"] = {"content": [{"token": f"w{number}", "logprob": -0.25, "top_logprobs": top}]}
    for index in range(2):
        begin = {"index": index, "id": f"call-{index}", "function": {"name": "sail", "arguments": ""}}
        rest = [{"index": index, "function": {"arguments": part}} for part in ('{"a"', ": 1}")]
        heard.events += [event(tool_calls=[piece]) for piece in (begin, *rest)]
    heard.events.append(event(finish="stop"))
    heard.events.append({**IDENTITY, "choices": [], "usage": {"completion_tokens": 5}})
    return heard


def choice(heard: Heard, number: int) -> Any:
    return heard.events[number]["choices"][0]


def lose_a_token(heard: Heard) -> None:
    choice(heard, 3)["token_ids"] = []


def double_an_event(heard: Heard) -> None:
    heard.events.insert(3, copy.deepcopy(heard.events[3]))


def change_a_token(heard: Heard) -> None:
    choice(heard, 3)["token_ids"] = [9]


def lose_text(heard: Heard) -> None:
    choice(heard, 5)["delta"]["content"] = ""


def lose_reasoning(heard: Heard) -> None:
    choice(heard, 5)["delta"]["reasoning"] = None


def lose_the_finish(heard: Heard) -> None:
    del heard.events[-2]


def finish_twice(heard: Heard) -> None:
    heard.events.insert(-2, event(finish="stop"))


def finish_otherwise(heard: Heard) -> None:
    choice(heard, -2)["finish_reason"] = "length"


def say_the_role_twice(heard: Heard) -> None:
    heard.events.insert(4, event(role="assistant"))


def lose_the_usage(heard: Heard) -> None:
    del heard.events[-1]


def say_the_usage_twice(heard: Heard) -> None:
    heard.events.append(copy.deepcopy(heard.events[-1]))


def change_the_usage(heard: Heard) -> None:
    heard.events[-1]["usage"]["completion_tokens"] = 6


def let_the_usage_go_back(heard: Heard) -> None:
    heard.events[2]["usage"] = {"completion_tokens": 6}


def lose_done(heard: Heard) -> None:
    heard.done = 0


def say_done_twice(heard: Heard) -> None:
    heard.take_line("data: [DONE]")


def go_on_after_done(heard: Heard) -> None:
    heard.take_line('data: {"id": "chatcmpl-r", "created": 7, "model": "m", "object": "chat.completion.chunk"}')


def change_the_id(heard: Heard) -> None:
    heard.events[4]["id"] = "chatcmpl-other"


def change_the_time(heard: Heard) -> None:
    heard.events[4]["created"] = 8


def show_a_comment(heard: Heard) -> None:
    heard.take_line(": kvferry moved 1 b 40")


def give_a_call_a_second_id(heard: Heard) -> None:
    choice(heard, 7)["delta"]["tool_calls"][0]["id"] = "call-x"


def give_a_call_no_id(heard: Heard) -> None:
    del choice(heard, 6)["delta"]["tool_calls"][0]["id"]


def give_two_calls_one_id(heard: Heard) -> None:
    choice(heard, 9)["delta"]["tool_calls"][0]["id"] = "call-0"


def lose_arguments(heard: Heard) -> None:
    choice(heard, 7)["delta"]["tool_calls"][0]["function"]["arguments"] = ""


def rename_a_call(heard: Heard) -> None:
    choice(heard, 6)["delta"]["tool_calls"][0]["function"]["name"] = "row"


def lose_a_call(heard: Heard) -> None:
    del heard.events[9:12]


def change_a_logprob(heard: Heard) -> None:
    choice(heard, 2)["logprobs"]["content"][0]["logprob"] = -0.3


def lose_a_logprob(heard: Heard) -> None:
    choice(heard, 2)["logprobs"] = None


def fail(heard: Heard) -> None:
    heard.events.append({"error": {"message": "The instance's connection ended."}})


def break_off(heard: Heard) -> None:
    heard.broken = "ReadError()"


def refuse(heard: Heard) -> None:
    heard.status, heard.whole, heard.events = 503, {"error": {"message": "Try again later."}}, []


FAULTS: list[Callable[[Heard], None]] = [
    *(lose_a_token, double_an_event, change_a_token, lose_text, lose_reasoning),
    *(lose_the_finish, finish_twice, finish_otherwise, say_the_role_twice),
    *(lose_the_usage, say_the_usage_twice, change_the_usage, let_the_usage_go_back),
    *(lose_done, say_done_twice, go_on_after_done, change_the_id, change_the_time, show_a_comment),
    *(give_a_call_a_second_id, give_a_call_no_id, give_two_calls_one_id, lose_arguments, rename_a_call, lose_a_call),
    *(change_a_logprob, lose_a_logprob, fail, break_off, refuse),
]


def test_equal_replies_do_not_differ_though_their_ids_do() -> None:
    other = stream()
    for made in other.events:
        made["id"], made["created"] = "chatcmpl-q", 9
    choice(other, 6)["delta"]["tool_calls"][0]["id"] = "call-p"
    assert stream_differences(stream(), other) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_of_a_stream_is_found(fault: Callable[[Heard], None]) -> None:
    heard = stream()
    fault(heard)
    assert stream_differences(stream(), heard)


def test_tokens_may_be_grouped_into_events_otherwise() -> None:
    heard = stream()
    choice(heard, 3)["token_ids"] += choice(heard, 4)["token_ids"]
    choice(heard, 3)["delta"]["content"] += choice(heard, 4)["delta"]["content"]
    choice(heard, 3)["delta"]["reasoning"] += choice(heard, 4)["delta"]["reasoning"]
    choice(heard, 3)["logprobs"]["content"] += choice(heard, 4)["logprobs"]["content"]
    del heard.events[4]
    assert stream_differences(stream(), heard) == []


def test_the_last_digits_of_logprobs_and_the_order_of_equal_ones_may_differ() -> None:
    heard = stream()
    entry = choice(heard, 2)["logprobs"]["content"][0]
    entry["logprob"] -= 1e-4
    entry["top_logprobs"][1] = {"token": "as likely as the other", "logprob": -2.0001}
    assert stream_differences(stream(), heard) == []


def test_a_client_that_left_is_told_nothing_wrong_so_far() -> None:
    heard = stream()
    heard.left, heard.done = True, 0
    del heard.events[4:]
    assert stream_differences(stream(), heard) == []
    change_a_token(heard)
    assert stream_differences(stream(), heard)


def test_an_honest_error_comes_once_last_and_after_what_was_right() -> None:
    heard = stream()
    heard.done = 0
    del heard.events[4:]
    fail(heard)
    assert honest_error_differences(stream(), heard) == []
    for fault in (fail, say_done_twice, change_a_token, lambda heard: heard.events.append(event())):
        wrong = copy.deepcopy(heard)
        fault(wrong)
        assert honest_error_differences(stream(), wrong)


def whole() -> Heard:
    logprobs = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}], "text_offset": [0]}
    call = {"id": "call-0", "function": {"name": "sail", "arguments": "{}"}}
    message = {"role": "assistant", "content": "a", "tool_calls": [call]}
    choices = [{"index": 0, "message": message, "logprobs": logprobs, "token_ids": [3], "finish_reason": "stop"}]
    answer = {"id": "cmpl-r", "created": 7, "model": "m", "choices": choices, "usage": {"completion_tokens": 1}}
    return Heard(status=200, request_id="r", whole=answer)


def test_whole_replies_may_differ_in_ids_time_and_last_digits() -> None:
    heard = whole()
    heard.whole["id"], heard.whole["created"] = "cmpl-q", 9
    heard.whole["choices"][0]["message"]["tool_calls"][0]["id"] = "call-p"
    heard.whole["choices"][0]["logprobs"]["token_logprobs"] = [-0.50001]
    assert whole_differences(whole(), heard) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["choices", 0, "token_ids"], []),
        (["choices", 0, "token_ids"], [3, 3]),
        (["choices", 0, "finish_reason"], None),
        (["choices", 0, "message", "content"], "b"),
        (["choices", 0, "message", "tool_calls", 0, "function", "arguments"], ""),
        (["choices", 0, "message", "tool_calls", 0, "id"], None),
        (["choices", 0, "logprobs", "token_logprobs"], [-0.6]),
        (["usage", "completion_tokens"], 2),
        (["model"], "n"),
        (["new"], 1),
    ],
)
def test_each_fault_of_a_whole_reply_is_found(path: list[Any], value: Any) -> None:
    heard = whole()
    inner = heard.whole
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    assert whole_differences(whole(), heard)


def test_a_refusal_is_found() -> None:
    assert whole_differences(whole(), Heard(status=503, whole={"error": {"message": "Later."}}))
    assert whole_differences(whole(), Heard(broken="ReadError()"))
