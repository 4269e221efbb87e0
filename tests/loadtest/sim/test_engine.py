"""The engine model: what holds whatever happens to it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sim.engine import Engine, EngineError, EngineSettings, Outcome, Prefill, Request, State
from loadtest.sim.profile import FAST, LLAMA_7B_A10, Profile, ProfileError, load_profile
from loadtest.sim.tokens import SyntheticPrompt, tokenize

SEQUENCE_MAX = 40


def settings(**changes: Any) -> EngineSettings:
    small: dict[str, Any] = {
        "block_size": 4,
        "blocks_total": 16,
        "batch_max": 4,
        "step_tokens_max": 48,
        "sequence_tokens_max": SEQUENCE_MAX,
    }
    return EngineSettings(**(small | changes))


def request(request_id: str = "r", prompt: int = 8, output: int = 8, **fields: Any) -> Request:
    key = fields.pop("key", sum(request_id.encode()))
    return Request(request_id, SyntheticPrompt(key, prompt), output, **fields)


def each_step(engine: Engine, now: float = 0.0) -> Iterator[Outcome]:
    """Until nothing is left to do."""
    ends_at: float | None = now
    while ends_at is not None:
        outcome = engine.step(ends_at)
        engine.check()
        yield outcome
        ends_at = outcome.ends_at


def run(engine: Engine, now: float = 0.0, steps: int = 10_000) -> list[Outcome]:
    return list(itertools.islice(each_step(engine, now), steps))


BOTH = pytest.mark.parametrize("prefill", list(Prefill))


# Whatever happens.

REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 30),  # Prompt.
        st.integers(1, 10),  # Output.
        st.sampled_from([-100, 0, 0, 100]),  # Priority.
        st.integers(0, 3),  # Steps that pass before it comes.
        st.integers(0, 2),  # Which prompts begin equally.
    ),
    min_size=1,
    max_size=14,
)
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["abort", "begin", "grow", "commit", "give up", "nothing"]), st.integers(0, 13)),
    max_size=60,
)
SETTINGS = st.builds(
    settings,
    prefill=st.sampled_from(list(Prefill)),
    prefix_caching=st.booleans(),
    batch_max=st.integers(1, 5),
    blocks_total=st.integers(12, 24),
    step_tokens_max=st.integers(SEQUENCE_MAX, 60),
    watermark=st.sampled_from([0.0, 0.05]),
)


class Two:
    """Two engines in one virtual time, requests that come to the first, and migrations to the second."""

    def __init__(self, one: EngineSettings) -> None:
        self.engines = [Engine(one, FAST), Engine(dataclasses.replace(one, batch_max=one.batch_max + 1), FAST)]
        self.ends_at: list[float | None] = [None, None]
        self.now = 0.0
        self.moving: dict[str, Request] = {}
        self.log: list[Any] = []
        self.ended: list[str] = []
        self.tokens: dict[str, int] = {}

    def step(self) -> None:
        """The next step of either that ends; an idle one begins if it can."""
        due = [(at, index) for index, at in enumerate(self.ends_at) if at is not None]
        self.now, index = min(due) if due else (self.now, 0)
        for which in {index, *(i for i, at in enumerate(self.ends_at) if at is None)}:
            before = self._running_keys(which)
            outcome = self.engines[which].step(self.now)
            self.engines[which].check()
            self.ends_at[which] = outcome.ends_at
            self._note(which, outcome, before)

    def _running_keys(self, which: int) -> dict[str, Any]:
        return {one.request_id: one.key for one in self.engines[which].requests() if one.state is State.RUNNING}

    def _note(self, which: int, outcome: Outcome, running_before: dict[str, Any]) -> None:
        names = {
            name: [one.request_id for one in getattr(outcome, name)]
            for name in ("sampled", "finished", "admitted", "preempted")
        }
        self.log.append([which, self.now, outcome.ends_at, names])
        for one in outcome.sampled:
            self.tokens[one.request_id] = self.tokens.get(one.request_id, 0) + 1
            assert one.output_tokens == self.tokens[one.request_id], "a token was lost, or made twice"
        self.ended += names["finished"]
        waiting = [one.key for one in self.engines[which].waiting()]
        for one in outcome.admitted:
            assert all(one.key < key for key in waiting), "it went past one that waits"
        for one in outcome.preempted:
            stay = [key for name, key in running_before.items() if name in self._running_keys(which)]
            assert all(key < one.key for key in stay), "not the last was preempted"

    def do(self, operation: str, request_id: str) -> None:
        source, destination = self.engines
        moving = self.moving.get(request_id)
        match operation:
            case "abort":
                gone = [engine.abort(request_id) for engine in self.engines]
                if any(gone):
                    self.ended.append(request_id)
                    destination.release(request_id)
                    self.moving.pop(request_id, None)
            case "begin" if moving is None and (exported := source.export(request_id)) is not None:
                one = source.get(request_id)
                assert one is not None
                if destination.reserve(request_id, one, len(exported.blocks)) is not None:
                    self.moving[request_id] = one
            case "grow" if moving is not None and (exported := source.export(request_id)) is not None:
                if destination.extend(request_id, len(exported.blocks)):
                    destination.receive(request_id, moving, len(exported.blocks))
            case "commit" if moving is not None and source.freeze(request_id):
                self._settle(request_id)
                if source.is_settled(request_id) and self._fits(request_id):
                    assert source.detach(request_id)
                    assert destination.adopt(request_id, moving)
                else:
                    source.unfreeze(request_id)
                    destination.release(request_id)
                del self.moving[request_id]
            case "give up" if moving is not None:
                assert destination.release(request_id)
                del self.moving[request_id]
        for engine in self.engines:
            engine.check()

    def _settle(self, request_id: str) -> None:
        for _ in range(100):
            if self.engines[0].get(request_id) is None or self.engines[0].is_settled(request_id):
                return
            self.step()
        raise AssertionError("a frozen request is in flight for ever")

    def _fits(self, request_id: str) -> bool:
        one, destination = self.moving[request_id], self.engines[1]
        return destination.extend(request_id, destination.settings.blocks_for(one.total_tokens))

    def finish(self) -> None:
        """No more operations: everything has to end."""
        for request_id in list(self.moving):
            self.do("give up", request_id)
        for _ in range(5_000):
            if all(engine.is_empty for engine in self.engines):
                return
            self.step()
        raise AssertionError(f"not everything ends: {self.engines}")


def play(one: EngineSettings, requests: list[Any], operations: list[tuple[str, int]]) -> Two:
    two = Two(one)
    todo = list(operations)
    for index, (prompt, output, priority, steps, key) in enumerate(requests):
        for _ in range(steps):
            two.step()
            if todo:
                operation, which = todo.pop(0)
                two.do(operation, f"r{which}")
        two.engines[0].add(request(f"r{index}", prompt, output, priority=priority, arrived_at=two.now, key=key))
    for operation, which in todo:
        two.step()
        two.do(operation, f"r{which}")
    two.finish()
    return two


@given(SETTINGS, REQUESTS, OPERATIONS)
def test_whatever_happens_blocks_add_up_and_every_request_ends_once_with_every_token(
    one: EngineSettings, requests: list[Any], operations: list[tuple[str, int]]
) -> None:
    two = play(one, requests, operations)
    assert sorted(two.ended) == sorted(f"r{index}" for index in range(len(requests)))
    aborted = {f"r{which}" for operation, which in operations if operation == "abort"}
    for index, (_, output, *_) in enumerate(requests):
        if f"r{index}" not in aborted:
            assert two.tokens[f"r{index}"] == output
    assert all(engine.pool.free == engine.settings.blocks_total for engine in two.engines)


@given(SETTINGS, REQUESTS, OPERATIONS)
def test_the_same_events_give_the_same_bytes(
    one: EngineSettings, requests: list[Any], operations: list[tuple[str, int]]
) -> None:
    first, second = (json.dumps(play(one, requests, operations).log) for _ in range(2))
    assert first == second


# Scheduling.


def test_chunked_prefill_keeps_to_the_budget_and_lets_decodes_go_on() -> None:
    engine = Engine(settings(step_tokens_max=8), FAST)
    engine.add(request("a", 4, 10))
    run(engine, steps=2)
    long = request("b", 20, 2, arrived_at=1.0)
    engine.add(long)
    computed = []
    outcome = engine.step(1.0)
    while not long.output_tokens:
        assert outcome.ends_at is not None
        outcome = engine.step(outcome.ends_at)
        computed.append(long.computed_tokens)
        assert any(one.request_id == "a" for one in outcome.sampled), "the decode waited"
    assert computed == [7, 14, 20]


def test_without_chunks_a_step_computes_prompts_or_decodes_but_not_both() -> None:
    engine = Engine(settings(prefill=Prefill.WHOLE_PROMPT, prefix_caching=False), FAST)
    engine.add(request("a", 4, 10))
    outcome = run(engine, steps=3)[-1]
    engine.add(request("b", 20, 3, arrived_at=1.0))
    assert outcome.ends_at is not None
    outcome = engine.step(outcome.ends_at)
    assert [one.request_id for one in outcome.sampled] == ["a"]
    assert outcome.ends_at is not None
    outcome = engine.step(outcome.ends_at)
    assert [one.request_id for one in outcome.sampled] == ["b"], "the running one stood still for the prompt"


@BOTH
def test_lower_priority_values_are_let_in_first_and_preempted_last(prefill: Prefill) -> None:
    engine = Engine(settings(prefill=prefill, blocks_total=12, batch_max=2, prefix_caching=False), FAST)
    engine.add(request("normal", 20, 20, arrived_at=0.0))
    engine.add(request("low", 12, 20, priority=100, arrived_at=1.0))
    engine.add(request("high", 20, 20, priority=-100, arrived_at=2.0))
    outcomes = run(engine)
    assert [one.request_id for one in outcomes[0].admitted] == ["high", "normal"]
    preempted = [one.request_id for outcome in outcomes for one in outcome.preempted]
    assert preempted
    assert "high" not in preempted
    finished = [one.request_id for outcome in outcomes for one in outcome.finished]
    assert finished == ["high", "normal", "low"]


@BOTH
def test_a_preempted_request_computes_everything_again_and_loses_no_token(prefill: Prefill) -> None:
    engine = Engine(settings(prefill=prefill, blocks_total=12, prefix_caching=False), FAST)
    first, second = request("a", 20, 20), request("b", 16, 20, arrived_at=1.0)
    engine.add(first)
    engine.add(second)
    seen: list[int] = []
    for outcome in each_step(engine):
        if second in outcome.preempted:
            assert (second.blocks, second.computed_tokens, second.state) == ([], 0, State.WAITING)
            seen.append(second.output_tokens)
    assert seen
    assert second.preemptions == len(seen)
    assert first.preemptions == 0
    assert second.output_tokens == 20


def test_a_preempted_request_finds_its_own_blocks_in_the_prefix_cache() -> None:
    engine = Engine(settings(blocks_total=12), FAST)
    engine.add(request("a", 20, 20))
    engine.add(request("b", 16, 20, arrived_at=1.0))
    computed_again: list[int] = []
    for outcome in each_step(engine):
        computed_again += [one.computed_tokens for one in outcome.admitted if one.preemptions]
    assert max(computed_again) > 0


def test_equal_beginnings_are_computed_once() -> None:
    engine = Engine(settings(), FAST)
    engine.add(request("a", 17, 2, key=1))
    run(engine)
    again, other = request("b", 18, 2, key=1), request("c", 18, 2, key=2)
    engine.add(again)
    engine.add(other)
    run(engine)
    assert (again.cached_tokens, other.cached_tokens) == (16, 0)


def test_the_prefix_cache_holds_no_more_than_its_blocks() -> None:
    engine = Engine(settings(blocks_total=12), FAST)
    for index in range(30):
        engine.add(request(f"r{index}", 12, 4, key=index))
        run(engine)
    assert engine.pool.free == 12


def test_a_step_costs_what_the_profile_says() -> None:
    engine = Engine(EngineSettings(prefill=Prefill.WHOLE_PROMPT, step_tokens_max=8192), LLAMA_7B_A10)
    engine.add(request("a", 1000, 3))
    prefill, decode, _, _ = run(engine)
    assert prefill.ends_at is not None
    assert decode.ends_at is not None
    assert prefill.ends_at == pytest.approx((5.58 + 0.2028 * 1000 + 5.09e-6 * 1000**2) / 1000)
    assert decode.ends_at - prefill.ends_at == pytest.approx((38 + 0.6 + 1.25e-3 * 1000) / 1000)


def test_a_copy_makes_the_steps_beside_it_longer() -> None:
    quiet, busy = Engine(settings(), LLAMA_7B_A10), Engine(settings(), LLAMA_7B_A10)
    busy.transfers = 1
    for engine in (quiet, busy):
        engine.add(request())
    ends = [run(engine, steps=1)[0].ends_at or 0.0 for engine in (quiet, busy)]
    assert ends[1] == pytest.approx(ends[0] * 1.02)


@pytest.mark.parametrize(("prompt", "output"), [(0, 4), (8, 0), (38, 3)])
def test_what_could_never_run_is_refused_at_once(prompt: int, output: int) -> None:
    with pytest.raises(EngineError):
        Engine(settings(), FAST).add(request("a", prompt, output))


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 0},
        {"blocks_total": 9},
        {"watermark": 1.0},
        {"watermark": 0.5},
        {"prefill": Prefill.WHOLE_PROMPT, "step_tokens_max": 39},
    ],
)
def test_settings_with_which_a_request_could_wait_for_ever_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(EngineError):
        settings(**changes)


@given(SETTINGS, REQUESTS)
def test_a_request_for_which_there_is_room_beside_what_is_promised_starts_in_the_next_step(
    one: EngineSettings, requests: list[Any]
) -> None:
    """So an instance that admits by these numbers, with a block of growth for each request, makes nobody wait."""
    engine = Engine(dataclasses.replace(one, step_tokens_max=10_000), FAST)
    now = 0.0
    for index, (prompt, output, priority, steps, key) in enumerate(requests):
        new = request(f"r{index}", prompt, output, priority=priority, arrived_at=float(index), key=key)
        for _ in range(steps):
            now = engine.step(now).ends_at or now
        promised = engine.promised(new)
        demand = engine.missing_blocks(new) + promised.blocks + promised.places
        engine.add(new)
        if demand <= engine.pool.free and promised.places < one.batch_max:
            outcome = engine.step(now)
            assert new in outcome.admitted
            now = outcome.ends_at or now


def test_a_prompt_of_which_a_part_is_computed_is_promised_the_rest() -> None:
    engine = Engine(settings(step_tokens_max=8, batch_max=2), FAST)
    engine.add(request("a", 30, 4))
    run(engine, steps=2)
    queued = request("b", 10, 4, arrived_at=1.0)
    engine.add(queued)
    assert engine.promised(queued).blocks == 8 - 4 + 3
    assert engine.promised(request("high", 4, 4, priority=-1)).blocks == 8 - 4
    assert engine.promised().places == 2


# Migration.


def test_a_request_that_moves_makes_the_same_tokens_and_computes_only_its_tail() -> None:
    source, destination = Engine(settings(), FAST), Engine(settings(), FAST)
    moving = request("a", 10, 12)
    expected = moving.output_token_ids(0, 12)
    source.add(moving)
    outcomes = run(source, steps=5)
    exported = source.export("a")
    assert exported is not None
    assert destination.reserve("m", moving, len(exported.blocks)) is not None
    destination.receive("m", moving, len(exported.blocks))
    assert source.freeze("a")
    assert not source.is_settled("a"), "a step is in flight"
    source.step(outcomes[-1].ends_at or 0.0)
    assert source.detach("a")
    assert destination.adopt("m", moving)
    tail = moving.total_tokens - moving.computed_tokens
    assert tail <= 4 + 1
    run(destination, now=1.0)
    assert moving.output_tokens == 12
    assert moving.output_token_ids(0, 12) == expected
    assert source.is_empty
    assert destination.is_empty


def test_detaching_in_the_middle_of_a_step_is_a_bug_of_the_caller() -> None:
    engine = Engine(settings(), FAST)
    engine.add(request("a"))
    run(engine, steps=1)
    engine.freeze("a")
    with pytest.raises(AssertionError, match="step boundary"):
        engine.detach("a")


def test_blocks_that_the_destination_has_already_are_not_sent() -> None:
    source, destination = Engine(settings(), FAST), Engine(settings(), FAST)
    destination.add(request("earlier", 12, 1, key=7))
    run(destination)
    moving = request("a", 17, 4, key=7)
    source.add(moving)
    run(source, steps=2)
    reservation = destination.reserve("m", moving, 4)
    assert reservation is not None
    assert reservation.reused == 3
    destination.release("m")
    assert destination.pool.free == 16


def test_a_reservation_that_does_not_fit_is_refused_and_takes_nothing() -> None:
    engine = Engine(settings(), FAST)
    engine.add(request("a", 36, 2))
    run(engine, steps=2)
    assert engine.reserve("m", request("b", 30, 2), 7) is None
    engine.check()


def test_a_request_that_is_aborted_in_the_middle_of_a_step_leaves_at_once() -> None:
    engine = Engine(settings(), FAST)
    engine.add(request("a"))
    ends_at = run(engine, steps=1)[0].ends_at
    assert engine.abort("a") is not None
    assert engine.is_empty
    assert ends_at is not None
    assert engine.step(ends_at).sampled == []


def test_an_idle_engine_goes_on_when_a_reservation_is_given_up() -> None:
    engine = Engine(settings(), FAST)
    engine.reserve("m", request("b", 36, 2), 9)
    engine.add(request("a", 30, 2))
    assert engine.step(0.0).ends_at is None
    engine.release("m")
    assert engine.step(1.0).ends_at is not None


# Profiles and tokens.


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"prefill_token_ms": -1}, "prefill_token_ms"),
        ({"step_floor_ms": "1"}, "step_floor_ms"),
        ({"speed": 1}, "speed"),
        ({"copy_bytes_per_s": 0}, "copy_bytes_per_s"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused_by_the_fields_name(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ProfileError, match=word):
        Profile.from_json(LLAMA_7B_A10.to_json() | changes)


def test_a_profile_is_read_from_a_file_as_it_was_written(tmp_path: Any) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(LLAMA_7B_A10.to_json()))
    assert load_profile(str(path)) == LLAMA_7B_A10
    with pytest.raises(ProfileError, match="no profile"):
        load_profile("nobody")


def test_tokens_are_the_same_in_every_process() -> None:
    """Numbers written down once: streams of two servers are compared by them."""
    one = Request("r", tokenize("Hello, world, how are you?"), 4, seed=3)
    assert one.prompt_tokens == 7
    assert one.output_token_ids(0, 4) == [10615, 25396, 9511, 22464]


@BOTH
def test_one_that_can_only_preempt_itself_does_not_hold_up_those_behind_it(prefill: Prefill) -> None:
    engine = Engine(settings(prefill=prefill, prefix_caching=False), FAST)
    early, late = request("early", 6, 20, arrived_at=0.0), request("late", 7, 20, arrived_at=1.0)
    engine.add(early)
    engine.add(late)
    ends_at = engine.step(0.0).ends_at
    assert ends_at is not None
    assert engine.freeze("early")
    ends_at = engine.step(ends_at).ends_at
    assert engine.unfreeze("early")  # From now on the later one comes first in the batch.
    assert engine.reserve("m", request("other", 4), engine.pool.free - 1) is not None
    outcomes = []
    while late.preemptions == 0:
        assert ends_at is not None
        outcomes.append(engine.step(ends_at))
        ends_at = outcomes[-1].ends_at
    assert early.state is State.RUNNING
    assert ends_at is not None, "the engine would be idle for ever"
