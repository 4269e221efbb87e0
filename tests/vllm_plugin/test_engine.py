"""The engine agent's bookkeeping, with a scheduler's insides that a test can look into."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.slow]

BLOCKS = 20
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def engine() -> ModuleType:
    pytest.importorskip("vllm", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm_plugin import engine
    return engine


class Block(SimpleNamespace):
    block_id: int


class FakePort:
    """As much of EnginePort as the agent calls: a pool of blocks, a batch, and what is in the prefix cache."""

    block_size = BLOCK_SIZE
    blocks_total = BLOCKS
    requests_running_max = 4

    def __init__(self) -> None:
        self.free = [Block(block_id=index) for index in range(BLOCKS)]
        self.batch: list[Any] = []
        self.live: list[Any] = []
        self.cached: list[tuple[int, int]] = []
        self.hits = 0
        self.pinned: list[int] = []
        self.queued: list[tuple[Any, list[int]]] = []
        self.begun: list[bool] = []
        self.queue: list[Any] = []
        self.is_paused = False
        self.orders_by_priority = False
        self.blocks_watermark = 0
        self.unfinished = 0
        self.shared = 0
        self.compiling = False
        self.rejects = -1
        self.rejection: Exception = ValueError()

    @property
    def blocks_free(self) -> int:
        return len(self.free)

    def batch_is_full(self, arriving: int) -> bool:
        return len(self.batch) + arriving >= self.requests_running_max

    def held_blocks(self, request: Any) -> list[Block]:
        return list(request.blocks)

    def computed_tokens(self, request: Any) -> int:
        return int(request.computed)

    def is_live(self, request: Any) -> bool:
        return request in self.live

    def stop_scheduling(self, request: Any) -> None:
        (self.queue if request in self.queue else self.batch).remove(request)

    def resume_scheduling(self, request: Any) -> None:
        (self.batch if request.computed else self.queue).append(request)

    def finish(self, request: Any) -> None:
        self.live.remove(request)

    def park(self, request: Any) -> None:
        self.live.append(request)

    def is_queued(self, request: Any) -> bool:
        return request in self.queue

    def grammar_is_compiling(self, request: Any) -> bool:
        return self.compiling

    def take_output(self, request: Any, token_ids: list[int]) -> None:
        if self.rejects in token_ids:
            raise self.rejection
        request.output_token_ids = [*request.output_token_ids, *token_ids]
        request.num_output_tokens = len(request.output_token_ids)

    def ending(self, request: Any) -> tuple[str, None] | None:
        return ("length", None) if len(request.output_token_ids) >= 9 else None

    def admit(self, request: Any, *, begun: bool) -> None:
        self.queued.append((request, request.output_token_ids))
        self.begun.append(begun)

    def new_blocks(self, count: int) -> list[Block]:
        return [self.free.pop() for _ in range(count)]

    def pin_blocks(self, blocks: list[Block]) -> None:
        self.pinned.extend(block.block_id for block in blocks)

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.block_id in self.pinned:
                self.pinned.remove(block.block_id)
            else:
                self.free.append(block)

    def shadow(self, token_ids: list[int], cache_salt: str | None) -> Any:
        return SimpleNamespace(tokens=list(token_ids), append_output_token_ids=lambda new: None)

    def take_cached_blocks(self, shadow: Any) -> list[Block]:
        return self.new_blocks(self.hits)

    def cache_blocks(self, shadow: Any, blocks: list[Block], have: int, total: int) -> None:
        self.cached.append((have, total))

    def give_all_tokens(self, output: Any) -> None:
        pass

    def running(self) -> list[Any]:
        return self.batch

    def waiting(self) -> list[Any]:
        return self.queue

    def blocks_unfinished(self) -> int:
        return self.unfinished

    def blocks_missing(self, request: Any) -> int:
        return -(-int(request.num_tokens) // BLOCK_SIZE) - self.shared


class Bench:
    def __init__(self, engine: ModuleType) -> None:
        self.port = FakePort()
        self.agent = engine.EngineAgent(self.port, growth_tokens=2 * BLOCK_SIZE)
        self._compat = engine.compat

    def request(self, request_id: str = "r", in_flight: int = 0, resume_id: str | None = None) -> Any:
        extra = {self._compat.REQUEST_KEY: request_id}
        if resume_id is not None:
            extra[self._compat.RESUME_KEY] = resume_id
        request = SimpleNamespace(
            request_id=f"chatcmpl-{request_id}-00000000",
            sampling_params=SimpleNamespace(extra_args=extra),
            status=self._compat.RequestStatus.RUNNING,
            prompt_token_ids=[1] * 6,
            num_prompt_tokens=6,
            output_token_ids=[2] * 5,
            num_output_tokens=5,
            num_tokens=11,
            num_in_flight_tokens=in_flight,
            num_preemptions=0,
            priority=0,
            cache_salt=None,
            prompt_embeds=None,
            has_encoder_inputs=False,
            use_structured_output=False,
            resumable=False,
            prefill_stats=None,
            max_tokens=100,
            computed=10,
            blocks=[Block(block_id=index) for index in (50, 51, 52)],
            is_finished=lambda: False,
        )
        if resume_id is not None:
            request.status = self._compat.RequestStatus.WAITING
            request.output_token_ids, request.num_output_tokens = [], 0
        parked = self.agent.receive(request)
        if not parked:
            self.port.live.append(request)
            self.port.batch.append(request)
        return request

    def queue(self, request: Any) -> None:
        """As if the request had not been scheduled yet, or had been preempted."""
        request.status = self._compat.RequestStatus.WAITING
        self.port.batch.remove(request)
        self.port.queue.append(request)
        request.computed, request.blocks = 0, []

    def do(self, operation: str, **payload: Any) -> Any:
        answer = self.agent.handle(operation, payload)
        return answer.result(0) if isinstance(answer, Future) and answer.done() else answer

    def reserve(self, blocks: int = 3, resume_id: str = "m") -> Any:
        prompt, output = [1] * 11, [2]
        tokens: dict[str, Any] = {"prompt_token_ids": prompt, "output_token_ids": output, "cache_salt": None}
        return self.do("reserve", resume_id=resume_id, **tokens, blocks=blocks, copy=True)


@pytest.fixture
def bench(engine: ModuleType) -> Bench:
    return Bench(engine)


FREEZE: dict[str, Any] = {"request_id": "r", "preemptions": 0, "blocks_from": 0, "tokens_from": 0}


def test_the_report_counts_requests_by_class(bench: Bench) -> None:
    for index, priority in enumerate((0, -1, -100, 100)):
        bench.request(f"r{index}").priority = priority
    queued = bench.request("q")
    queued.priority = -100
    bench.queue(queued)
    report = bench.do("report")
    assert report["running_by_class"] == {"0": 2, "-100": 1, "100": 1}
    assert report["waiting_by_class"] == {"-100": 1}


def test_a_request_that_has_begun_here_has_no_move_to_rest_from(bench: Bench) -> None:
    bench.request()
    assert bench.do("requests")[0]["settled_s"] is None
    bench.agent.arrived_at["r"] = time.monotonic() - 100
    assert bench.do("requests")[0]["settled_s"] >= 100


def test_only_finished_blocks_are_exported(bench: Bench) -> None:
    bench.request()
    export = bench.do("export", request_id="r")
    assert export["state"] == "running"
    assert export["block_ids"] == [50, 51]


def test_the_next_block_is_exported_at_the_step_that_finishes_it(bench: Bench) -> None:
    request = bench.request()
    answer = bench.do("next_block", request_id="r", blocks_from=2, tokens_from=0)
    request.computed = 11
    bench.agent.after_step()
    assert not answer.done()
    request.computed = 12
    bench.agent.after_step()
    assert answer.result(0)["block_ids"] == [52]
    assert bench.agent.awaited == {}


def test_a_block_that_does_not_come_is_not_waited_for_any_longer(
    bench: Bench, engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.request()
    answer = bench.do("next_block", request_id="r", blocks_from=2, tokens_from=0)
    now = engine.time.monotonic()
    monkeypatch.setattr(engine.time, "monotonic", lambda: now + engine.NEXT_BLOCK_LIMIT_S + 0.1)
    bench.agent.expire()
    assert answer.result(0)["block_ids"] == []


@pytest.mark.parametrize("how", ["preempted", "finished"])
def test_a_request_that_stops_running_ends_the_wait_for_its_block(bench: Bench, how: str) -> None:
    request = bench.request()
    answer = bench.do("next_block", request_id="r", blocks_from=2, tokens_from=0)
    if how == "preempted":
        bench.queue(request)
    else:
        bench.port.live.remove(request)
        request.is_finished = lambda: True
    bench.agent.after_step()
    assert answer.result(0)["state"] == ("waiting" if how == "preempted" else "gone")
    assert bench.agent.awaited == {}


def test_a_frozen_request_leaves_the_batch_at_once_and_answers_when_nothing_is_in_flight(bench: Bench) -> None:
    request = bench.request(in_flight=1)
    answer = bench.do("freeze", **FREEZE)
    assert request not in bench.port.batch
    assert not answer.done()
    request.num_in_flight_tokens = 0
    bench.agent.after_step()
    assert answer.result(0)["state"] == "migrating"
    assert bench.do("unfreeze", request_id="r") == {"unfrozen": True}
    assert bench.port.batch == [request]


def test_a_request_that_finishes_while_it_is_being_frozen_is_gone(bench: Bench) -> None:
    request = bench.request(in_flight=1)
    answer = bench.do("freeze", **FREEZE)
    bench.port.live.remove(request)
    bench.agent.after_step()
    assert answer.result(0)["state"] == "gone"
    assert bench.do("detach", request_id="r") == {"detached": False}


def test_a_request_that_was_preempted_is_not_frozen(bench: Bench) -> None:
    bench.request().num_preemptions = 1
    assert bench.do("freeze", **FREEZE)["state"] == "busy"


def test_a_request_that_stays_frozen_goes_on_by_itself_and_cannot_be_detached_then(
    bench: Bench, engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = bench.request()
    bench.do("freeze", **FREEZE)
    now = engine.time.monotonic()
    monkeypatch.setattr(engine.time, "monotonic", lambda: now + engine.FREEZE_LIMIT_S + 0.1)
    assert bench.do("detach", request_id="r") == {"detached": False}
    assert bench.port.batch == [request]


def test_a_longer_freeze_can_be_asked_for(bench: Bench, engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    request = bench.request()
    bench.do("freeze", **FREEZE, limit_s=60.0)
    now = engine.time.monotonic()
    monkeypatch.setattr(engine.time, "monotonic", lambda: now + engine.FREEZE_LIMIT_S + 0.1)
    bench.do("arrivals")
    assert request not in bench.port.batch
    assert bench.do("detach", request_id="r") == {"detached": True}


def test_a_silent_reservation_is_freed_when_its_lease_is_over(
    bench: Bench, engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.reserve()["accepted"]
    assert bench.port.blocks_free == BLOCKS - 4  # Three, and one for the tail.
    now = engine.time.monotonic()
    monkeypatch.setattr(engine.time, "monotonic", lambda: now + engine.RESERVATION_LEASE_S - 1)
    assert bench.do("extend", resume_id="m", blocks=3, output_token_ids=[])["accepted"]  # A sign of life.
    monkeypatch.setattr(engine.time, "monotonic", lambda: now + engine.RESERVATION_LEASE_S + 5)
    assert bench.do("received", resume_id="m", blocks=3)["accepted"]
    bench.do("arrivals")
    assert "m" in bench.agent.reservations
    monkeypatch.setattr(engine.time, "monotonic", lambda: now + 2 * engine.RESERVATION_LEASE_S + 10)
    bench.do("arrivals")
    assert bench.agent.reservations == {}
    assert bench.port.blocks_free == BLOCKS
    assert not bench.do("extend", resume_id="m", blocks=3, output_token_ids=[])["accepted"]


def test_more_blocks_than_there_are_is_refused_and_takes_none(bench: Bench) -> None:
    assert not bench.reserve(blocks=BLOCKS)["accepted"]
    assert bench.port.blocks_free == BLOCKS
    assert bench.reserve(blocks=10)["accepted"]
    assert not bench.do("extend", resume_id="m", blocks=BLOCKS, output_token_ids=[])["accepted"]
    bench.do("cancel", resume_id="m")
    assert bench.port.blocks_free == BLOCKS


def test_a_full_batch_takes_no_more_reservations(bench: Bench) -> None:
    for index in range(4):
        assert bench.reserve(blocks=1, resume_id=f"m{index}")["accepted"]
    assert "batch is full" in bench.reserve(blocks=1, resume_id="m5")["reason"]


def test_blocks_in_the_prefix_cache_are_reused_and_copied_ones_are_entered_once(bench: Bench) -> None:
    bench.port.hits = 2
    answer = bench.reserve(blocks=3)
    assert answer["reused"] == 2
    assert len(answer["block_ids"]) == 1
    assert bench.do("received", resume_id="m", blocks=3)["accepted"]
    assert bench.port.cached == [(2, 3)]


def test_a_parked_request_is_queued_by_the_commit_and_releases_its_blocks_when_scheduled(bench: Bench) -> None:
    bench.reserve()
    request = bench.request(resume_id="m")
    assert bench.port.batch == []
    assert bench.port.queued == []
    assert bench.do("extend", resume_id="m", blocks=3, output_token_ids=[8])["accepted"]
    assert bench.do("commit", resume_id="m", tokens_from=2, output_token_ids=[])["accepted"]
    assert bench.port.queued == [(request, [2, 8])]
    assert bench.port.blocks_free == BLOCKS - 3  # The tail's block is free for the scheduler to take.
    bench.agent.after_schedule(SimpleNamespace(num_scheduled_tokens={request.request_id: 3}))
    assert bench.port.blocks_free == BLOCKS
    assert bench.agent.reservations == {}
    (arrival,) = bench.do("arrivals")
    assert (arrival["request_id"], arrival["computed_tokens"]) == ("r", 3)


def test_tokens_that_are_complete_are_not_run(bench: Bench) -> None:
    bench.reserve()
    request = bench.request(resume_id="m")
    assert bench.do("extend", resume_id="m", blocks=3, output_token_ids=[7] * 8)["accepted"]
    assert bench.do("commit", resume_id="m", tokens_from=9, output_token_ids=[]) == {
        "accepted": True,
        "finish": ("length", None),
    }
    assert bench.port.queued == []
    assert bench.port.live == []
    bench.do("written", resume_id="m")
    assert bench.port.blocks_free == BLOCKS
    assert request.output_token_ids == [2, *[7] * 8]


def test_a_commit_without_a_parked_request_is_refused(bench: Bench) -> None:
    bench.reserve()
    assert not bench.do("commit", resume_id="m", tokens_from=1, output_token_ids=[])["accepted"]
    assert not bench.do("commit", resume_id="other", tokens_from=1, output_token_ids=[])["accepted"]


def test_a_commit_that_lacks_tokens_asks_for_all_of_them(bench: Bench) -> None:
    """A gateway's resume comes without stages."""
    request = bench.request(resume_id="unknown")
    answer = bench.do("commit", resume_id="unknown", tokens_from=2, output_token_ids=[])
    assert (answer["accepted"], answer["lacks_tokens"]) == (False, True)
    assert bench.port.queued == []
    assert bench.do("commit", resume_id="unknown", tokens_from=0, output_token_ids=[7, 8])["accepted"]
    assert bench.port.queued == [(request, [7, 8])]


def test_a_commit_brings_the_last_tokens_itself(bench: Bench) -> None:
    bench.reserve()
    request = bench.request(resume_id="m")
    assert bench.do("commit", resume_id="m", tokens_from=1, output_token_ids=[7, 8])["accepted"]
    assert bench.port.queued == [(request, [2, 7, 8])]


def test_blocks_cannot_come_for_a_resume_that_has_only_tokens(bench: Bench) -> None:
    bench.request(resume_id="unknown")
    assert not bench.do("extend", resume_id="unknown", blocks=1, output_token_ids=[7])["accepted"]
    assert not bench.do("received", resume_id="unknown", blocks=1)["accepted"]


def test_a_request_of_which_nothing_was_computed_keeps_its_own_prefix_hit(bench: Bench) -> None:
    bench.request(resume_id="unknown")
    assert bench.do("commit", resume_id="unknown", tokens_from=0, output_token_ids=[])["accepted"]
    assert bench.port.begun == [False]


def test_a_commit_waits_for_the_grammar_and_then_brings_it_all_tokens(bench: Bench) -> None:
    bench.reserve()
    bench.port.compiling = True
    request = bench.request(resume_id="m")
    answer = bench.do("commit", resume_id="m", tokens_from=1, output_token_ids=[])
    assert (answer["accepted"], answer["compiling"]) == (False, True)
    assert request.output_token_ids == []
    bench.port.compiling = False
    assert bench.do("commit", resume_id="m", tokens_from=1, output_token_ids=[])["accepted"]
    assert bench.port.queued == [(request, [2])]


def test_tokens_that_the_grammar_does_not_take_are_refused_for_good(bench: Bench, engine: ModuleType) -> None:
    bench.reserve()
    bench.port.rejects, bench.port.rejection = 9, engine.compat.GrammarRejected("no such branch")
    bench.request(resume_id="m")
    assert bench.do("extend", resume_id="m", blocks=3, output_token_ids=[9])["reason"] == "no such branch"
    bench.port.rejects = -1
    assert bench.do("commit", resume_id="m", tokens_from=2, output_token_ids=[])["reason"] == "no such branch"
    assert bench.port.queued == []


def test_a_queued_request_can_be_frozen_and_goes_back_to_the_queue(bench: Bench) -> None:
    request = bench.request()
    bench.queue(request)
    assert bench.do("export", request_id="r")["state"] == "waiting"
    frozen = bench.do("freeze", **FREEZE)
    assert (frozen["state"], frozen["block_ids"]) == ("migrating", [])
    assert bench.port.queue == []
    bench.do("unfreeze", request_id="r")
    assert bench.port.queue == [request]


def test_a_request_that_has_just_been_committed_here_is_not_frozen(bench: Bench) -> None:
    bench.reserve()
    request = bench.request(resume_id="m")
    bench.do("commit", resume_id="m", tokens_from=1, output_token_ids=[])
    bench.port.queue.append(request)
    assert bench.do("freeze", **FREEZE)["state"] == "busy"


def test_a_destination_without_room_for_the_whole_sequence_refuses_also_where_nothing_is_copied(bench: Bench) -> None:
    long: dict[str, Any] = {"prompt_token_ids": [1] * (BLOCKS * BLOCK_SIZE), "output_token_ids": [], "cache_salt": None}
    answer = bench.do("reserve", resume_id="m", **long, blocks=0, copy=False)
    assert not answer["accepted"]
    assert bench.port.blocks_free == BLOCKS


@pytest.mark.parametrize("committed", [False, True])
def test_an_aborted_parked_request_gives_its_blocks_back(bench: Bench, committed: bool) -> None:
    bench.reserve()
    request = bench.request(resume_id="m")
    if committed:
        bench.do("commit", resume_id="m", tokens_from=1, output_token_ids=[])
    bench.agent.after_finish([request])
    assert bench.port.blocks_free == BLOCKS
    assert bench.agent.reservations == {}
    assert bench.agent.admitted == {}
    assert bench.agent.managed == {}


def test_blocks_stay_reserved_while_something_writes_into_them(bench: Bench) -> None:
    """The client leaves during a stage: the parked request is aborted, but the worker is still writing."""
    bench.reserve()
    request = bench.request(resume_id="m")
    bench.do("extend", resume_id="m", blocks=3, output_token_ids=[])
    bench.agent.after_finish([request])
    bench.do("cancel", resume_id="m")
    assert bench.port.blocks_free == BLOCKS - 4
    assert not bench.do("extend", resume_id="m", blocks=3, output_token_ids=[])["accepted"]
    bench.do("written", resume_id="m")
    assert bench.port.blocks_free == BLOCKS
    assert bench.agent.reservations == {}


def test_blocks_that_arrive_for_a_reservation_that_was_given_up_are_not_entered(bench: Bench) -> None:
    bench.reserve()
    bench.do("extend", resume_id="m", blocks=3, output_token_ids=[])
    bench.do("cancel", resume_id="m")
    assert not bench.do("received", resume_id="m", blocks=3)["accepted"]
    assert bench.port.cached == []
    assert bench.port.blocks_free == BLOCKS


def test_a_lease_does_not_end_during_a_pull(bench: Bench, engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.reserve()
    bench.do("extend", resume_id="m", blocks=3, output_token_ids=[])
    now = engine.time.monotonic()
    monkeypatch.setattr(engine.time, "monotonic", lambda: now + engine.RESERVATION_LEASE_S + 10)
    bench.do("arrivals")
    assert bench.do("received", resume_id="m", blocks=3)["accepted"]


def test_exported_blocks_are_pinned_until_the_next_export_or_unpin(
    bench: Bench, engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a peer reads keeps its content, even if the request is preempted, or gone, meanwhile."""
    bench.request()
    bench.do("export", request_id="r")
    assert bench.port.pinned == [50, 51]
    bench.do("export", request_id="r", blocks_from=1)
    assert bench.port.pinned == [51]
    bench.do("unpin", request_id="r")
    assert bench.port.pinned == []
    bench.do("freeze", **FREEZE)
    bench.do("detach", request_id="r")
    assert bench.port.pinned == [50, 51]
    now = engine.time.monotonic()
    monkeypatch.setattr(engine.time, "monotonic", lambda: now + engine.PIN_LIMIT_S + 1)
    bench.do("arrivals")
    assert bench.port.pinned == []


def test_unfreezing_does_not_overfill_the_batch(engine: ModuleType) -> None:
    """vLLM asserts that the batch is within its size in each step: one over, and the engine core dies."""
    queue: list[Any] = []
    frozen, other, admitted = (SimpleNamespace(status=engine.compat.RequestStatus.RUNNING, name=name) for name in "foa")
    scheduler = SimpleNamespace(
        running=[frozen, other],
        max_num_running_reqs=2,
        _preempt_request=lambda request, timestamp: queue.insert(0, request),
    )
    port = engine.compat.EnginePort(scheduler)
    port.stop_scheduling(frozen)
    port.resume_scheduling(frozen)
    assert scheduler.running == [other, frozen]
    port.stop_scheduling(frozen)
    scheduler.running.append(admitted)
    port.resume_scheduling(frozen)
    assert scheduler.running == [other, admitted]
    assert queue == [frozen]


def test_unmanaged_requests_are_none_of_the_agents_business(bench: Bench) -> None:
    strangers: list[dict[str, Any] | None] = [None, {}, {"kv_transfer_params": {}}]
    for extra in strangers:
        assert bench.agent.receive(SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))) is False
    assert bench.agent.receive(SimpleNamespace(sampling_params=None)) is False
    assert bench.agent.managed == {}
