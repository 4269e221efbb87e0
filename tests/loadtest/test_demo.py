"""The demo's own judgement: it must see what differs, and measure the gap at the move."""

from typing import Any

import pytest

from gateway.wire import MigrationResult
from loadtest.demo import Output, choose_stop_string, differences, measure_moves


def build_output(**changes: Any) -> Output:
    values: dict[str, Any] = {
        "token_ids": [5, 6, 7],
        "text": " one two three",
        "logprob_tokens": [" one"],
        "logprobs": [-1.0],
        "finish_reasons": ["length"],
        "roles": ["assistant"],
        "ids": {"chatcmpl-1"},
        "created": {1},
        "usage": (4, 3, 7),
    }
    return Output(**{**values, **changes})


def build_result(output_tokens: int) -> MigrationResult:
    return MigrationResult(
        migration_id="m1",
        request_id="r1",
        source_id="a",
        destination_id="b",
        outcome="committed",
        reason=None,
        stages=2,
        blocks_sent=3,
        blocks_reused=0,
        bytes_sent=100,
        output_tokens=output_tokens,
        duration_ms=1.0,
        final_ms=1.0,
    )


def test_equal_runs_do_not_differ_even_under_another_id() -> None:
    assert differences(build_output(), build_output(ids={"chatcmpl-2"}, created={2}), is_chat=True) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"token_ids": [5, 9, 7]}, "tokens differ from token 2 on"),
        ({"token_ids": [5, 6]}, "tokens differ in number"),
        ({"text": " one two"}, "text differ"),
        ({"finish_reasons": ["stop"]}, "finish_reasons differ"),
        ({"finish_reasons": ["length", "length"]}, "finish reasons"),
        ({"usage": (7, 3, 10)}, "usage differ"),
        ({"logprobs": [-1.5]}, "logprobs differ by up to 0.5"),
        ({"logprobs": []}, "1 and 0 logprobs"),
        ({"ids": {"chatcmpl-1", "chatcmpl-2"}}, "2 ids"),
        ({"roles": ["assistant", "assistant"]}, "roles"),
    ],
)
def test_a_difference_is_named(changes: dict[str, Any], expected: str) -> None:
    assert expected in "; ".join(differences(build_output(), build_output(**changes), is_chat=True))


def test_two_empty_runs_are_not_identical() -> None:
    empty = build_output(token_ids=[], text="", usage=(4, 0, 4))

    assert "no tokens" in differences(empty, empty, is_chat=True)


def test_the_pause_is_the_gap_after_the_last_token_from_the_source() -> None:
    output = build_output(token_ids=[1, 2, 3, 4, 5], arrivals=[(0.0, 1), (0.01, 2), (0.02, 3), (0.12, 4), (0.13, 5)])

    (move,) = measure_moves(output, [build_result(output_tokens=3)])

    assert move.pause_ms == pytest.approx(100)
    assert move.usual_gap_ms == pytest.approx(30 / 4)
    assert move.largest_other_gap_ms == pytest.approx(10)


def test_a_reply_in_one_piece_has_no_pause() -> None:
    output = build_output(arrivals=[(1.0, 3)])

    (move,) = measure_moves(output, [build_result(output_tokens=2)])

    assert move.pause_ms is None


def test_the_stop_string_spans_two_tokens_and_is_new_where_it_ends() -> None:
    pieces = [" river", " stone", " river", " stone", " bridge", " water"]

    stop = choose_stop_string(pieces, at_token=2)

    assert stop == "one br"
    assert "".join(pieces).index(stop) > len("".join(pieces[:3]))
