"""One gateway's own count of what a key uses."""

from __future__ import annotations

import random

from gateway.policy.limits import WINDOW_S, Granted, KeyLimits, Ledger, Refused


def test_a_minutes_requests_are_let_in_and_no_more() -> None:
    ledger, limits = Ledger(), KeyLimits(requests_per_minute=3)
    for number in range(3):
        verdict = ledger.judge(limits, 0, 100.5)
        assert verdict == Granted(100, 2 - number, None)
        ledger.book(str(number), 0, 100.5)
    assert ledger.judge(limits, 0, 130.0) == Refused("requests_per_minute", 31)
    assert isinstance(ledger.judge(limits, 0, 160.9), Refused)
    assert isinstance(ledger.judge(limits, 0, 161.0), Granted)


def test_who_comes_back_after_the_time_that_was_named_is_let_in() -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    limits = KeyLimits(requests_per_minute=5, tokens_per_minute=100)
    ledger, now_s = Ledger(), 0.0
    for number in range(500):
        tokens = chance.randrange(1, 101)
        verdict = ledger.judge(limits, tokens, now_s)
        if isinstance(verdict, Refused):
            assert 1 <= verdict.retry_after_s <= WINDOW_S + 1, f"seed {seed}"
            before = ledger.judge(limits, tokens, int(now_s) + verdict.retry_after_s - 1)
            after = ledger.judge(limits, tokens, int(now_s) + verdict.retry_after_s)
            assert isinstance(before, Refused), f"seed {seed}"
            now_s = int(now_s) + verdict.retry_after_s
            # It may be another limit's turn then.
            assert isinstance(after, Granted) or after.limit != verdict.limit, f"seed {seed}"
            continue
        ledger.book(str(number), tokens, now_s)
        now_s += chance.random() * 10


def test_a_place_is_free_again_after_its_release_and_only_once() -> None:
    ledger, limits = Ledger(), KeyLimits(concurrent_requests=1, tokens_per_minute=100)
    ledger.book("a", 60, 10)
    assert ledger.judge(limits, 1, 10) == Refused("concurrent_requests", 1)
    ledger.settle("a", 10, -40, 11)
    ledger.settle("a", 10, -40, 11)
    assert ledger.tokens.total == 20
    assert ledger.judge(limits, 80, 11) == Granted(11, None, 0)
    assert isinstance(ledger.judge(limits, 81, 11), Refused)


def test_what_a_long_request_used_beyond_its_estimate_counts_when_it_ends() -> None:
    ledger = Ledger()
    ledger.book("a", 10, 0)
    ledger.book("b", 10, 0)
    ledger.settle("a", 0, 500, 200)
    ledger.settle("b", 0, -5, 200)
    assert ledger.tokens.total == 500


def test_a_request_for_more_than_a_minute_has_takes_the_whole_minute() -> None:
    limits = KeyLimits(tokens_per_minute=100)
    assert limits.booked(1000) == 100
    assert isinstance(Ledger().judge(limits, limits.booked(1000), 0), Granted)
    assert KeyLimits().booked(1000) == 1000


def test_a_ledger_is_bounded_by_the_minutes_seconds() -> None:
    ledger = Ledger()
    for number in range(10_000):
        ledger.book(str(number), 1, number / 10)
        ledger.settle(str(number), number / 10, 0, number / 10)
    assert len(ledger.requests._buckets) <= WINDOW_S + 1
    assert ledger.requests.total == sum(count for _, count in ledger.requests._buckets) <= 610
    assert not ledger.running
