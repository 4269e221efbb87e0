"""What the engine lets in: on its bookkeeping in miniature, and on vLLM's own scheduler with a few blocks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.vllm_plugin.test_engine import BLOCK_SIZE, BLOCKS, Bench

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def engine() -> ModuleType:
    pytest.importorskip("vllm", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm_plugin import engine
    return engine


@pytest.fixture
def bench(engine: ModuleType) -> Bench:
    return Bench(engine)


class Asking:
    """A stand-in for requests that are to start at once, each of ``blocks`` blocks."""

    def __init__(self, bench: Bench, compat: Any) -> None:
        self._bench = bench
        self._compat = compat
        self._made = 0

    def __call__(self, blocks: int, priority: int = 0) -> bool:
        """Whether it was let in; then it is queued."""
        self._made += 1
        request = self._bench.request(f"filler-{self._made}")
        self._bench.port.batch.remove(request)
        self._bench.port.live.remove(request)
        del self._bench.agent.managed[f"filler-{self._made}"]
        request.request_id, request.num_tokens, request.priority = f"e{self._made}", blocks * BLOCK_SIZE, priority
        request.sampling_params.extra_args[self._compat.ADMIT_KEY] = True
        if self._bench.agent.receive(request):
            return False
        self._bench.port.queue.append(request)
        return True

    @property
    def refusal(self) -> Any:
        return self._bench.do("verdict", engine_id=f"e{self._made}")


@pytest.fixture
def ask(bench: Bench, engine: ModuleType) -> Asking:
    return Asking(bench, engine.compat)


def test_an_empty_engine_lets_in_what_fits_and_nothing_larger(ask: Asking) -> None:
    assert not ask(BLOCKS + 1)
    assert ask.refusal == {"needed": BLOCKS + 1, "blocks": BLOCKS, "places": 4}
    assert ask(BLOCKS)
    assert ask.refusal is None


def test_two_requests_of_one_moment_do_not_count_the_same_blocks(ask: Asking, bench: Bench) -> None:
    assert ask(8)
    assert not ask(9), "8 are promised, and 4 kept to grow into"
    assert ask.refusal == {"needed": 9, "blocks": 8, "places": 3}
    assert ask(8)
    assert [one.request_id for one in bench.port.queue] == ["e1", "e3"], "what is refused enters no queue"
    assert set(bench.agent.managed) == {"filler-1", "filler-3"}


def test_room_to_grow_is_left_for_each_running_request(ask: Asking, bench: Bench) -> None:
    bench.request("one")
    bench.request("two")
    assert not ask(BLOCKS - 5), "8 tokens for each of three"
    assert ask(BLOCKS - 6)


def test_a_full_batch_lets_nobody_in(ask: Asking, bench: Bench) -> None:
    for index in range(4):
        bench.request(f"r{index}")
    assert not ask(1)
    assert ask.refusal == {"needed": 1, "blocks": 0, "places": 0}


def test_requests_that_are_arriving_from_elsewhere_hold_places(ask: Asking, bench: Bench) -> None:
    for index in range(3):
        bench.request(f"r{index}")
    assert bench.reserve(blocks=1)["accepted"]
    assert not ask(1)
    bench.do("cancel", resume_id="m")
    assert ask(1)


def test_a_prompt_that_is_still_being_computed_keeps_its_blocks(ask: Asking, bench: Bench) -> None:
    bench.request("r")
    bench.port.unfinished = 10
    assert not ask(BLOCKS - 13)
    bench.port.unfinished = 0
    assert ask(BLOCKS - 13)


def test_blocks_that_running_requests_share_with_it_are_not_needed_again(ask: Asking, bench: Bench) -> None:
    bench.request("r")
    bench.port.shared = 6
    assert ask(BLOCKS)


def test_what_waits_there_already_is_not_overtaken_within_its_class(ask: Asking, bench: Bench) -> None:
    waiting = bench.request("r")
    bench.queue(waiting)
    waiting.num_tokens, waiting.priority = (BLOCKS + 5) * BLOCK_SIZE, 100
    assert not ask(1), "in a queue in order of arrival, the first one holds up all"
    bench.port.orders_by_priority = True
    assert not ask(1, priority=100)
    assert ask(1, priority=0)


def test_one_that_was_let_in_keeps_its_blocks_against_more_urgent_ones(ask: Asking, bench: Bench) -> None:
    bench.port.orders_by_priority = True
    assert ask(10, priority=100)
    assert not ask(10, priority=-100)


def test_an_engine_that_is_paused_lets_nobody_in(ask: Asking, bench: Bench) -> None:
    bench.port.is_paused = True
    assert not ask(1)


def test_the_report_says_what_there_is_room_for(ask: Asking, bench: Bench) -> None:
    assert (bench.do("report")["room_blocks"], bench.do("report")["room_places"]) == (BLOCKS, 4)
    assert ask(8)
    report = bench.do("report")
    assert (report["room_blocks"], report["room_places"]) == (8, 3)


def test_a_long_queue_is_not_looked_at_to_its_end(bench: Bench) -> None:
    """Ten reports a second are made on the engine's own thread."""
    bench.port.requests_running_max = 10_000
    for index in range(200):
        bench.queue(bench.request(f"r{index}"))
    looked_at: list[Any] = []

    def needs(request: Any) -> int:
        looked_at.append(request)
        return 1

    bench.port.blocks_missing = needs  # type: ignore[method-assign]
    assert bench.do("report")["room_blocks"] == 0
    assert len(looked_at) <= BLOCKS


def test_refusals_that_nobody_asks_for_are_bounded(ask: Asking, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_plugin.admission.REFUSED_KEPT", 3)
    bench.port.is_paused = True
    for _ in range(9):
        assert not ask(1)
    assert list(bench.agent.admission.refused) == ["e7", "e8", "e9"]


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64),
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
}


class Stock:
    """vLLM's own scheduler, with 19 blocks of 16 tokens and a budget of 64 tokens a step."""

    def __init__(self, directory: Path) -> None:
        import torch
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from vllm_plugin.scheduler import KvferryScheduler

        (directory / "config.json").write_text(json.dumps(CONFIG))
        cache = CacheConfig(block_size=16, enable_prefix_caching=True)
        cache.num_gpu_blocks = 20
        config = VllmConfig(
            model_config=ModelConfig(str(directory), skip_tokenizer_init=True, dtype="float32", max_model_len=512),
            scheduler_config=SchedulerConfig(
                max_model_len=512,
                is_encoder_decoder=False,
                async_scheduling=True,
                max_num_seqs=4,
                max_num_batched_tokens=64,
                enable_chunked_prefill=True,
            ),
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
        )
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = KvferryScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(20, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=16,
            hash_block_size=16,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(16, sha256)

    def add(self, name: str, first_token: int, tokens: int = 100) -> Any:
        from vllm.sampling_params import SamplingParams

        from vllm_plugin.compat import ADMIT_KEY, REQUEST_KEY, Request

        params = SamplingParams(max_tokens=9, ignore_eos=True, extra_args={REQUEST_KEY: name, ADMIT_KEY: True})
        prompt = [first_token + index % 50 for index in range(tokens)]
        request = Request(name, prompt, params, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    @property
    def room(self) -> tuple[int, int]:
        found = self.scheduler.kvferry.admission.room(0)
        return found.blocks, found.places


@pytest.fixture
def stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stock:
    monkeypatch.setenv("KVFERRY_GROWTH_TOKENS", "8")
    pytest.importorskip("vllm", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Stock(tmp_path)


def test_on_the_stock_scheduler_a_request_counts_the_same_before_and_while_it_is_computed(stock: Stock) -> None:
    scheduler = stock.scheduler
    assert stock.room == (19, 4)
    stock.add("r1", 1)
    assert stock.room == (19 - 7 - 1, 3)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"r1": 64}
    assert scheduler.kvferry.port.blocks_free == 15, "a part of the prompt is computed, and has its blocks"
    assert stock.room == (19 - 7 - 1, 3)


def test_on_the_stock_scheduler_what_is_refused_never_waits(stock: Stock) -> None:
    scheduler = stock.scheduler
    stock.add("r1", 1, 200)
    stock.add("r2", 2)
    assert scheduler.kvferry.handle("verdict", {"engine_id": "r1"}) is None
    assert scheduler.kvferry.handle("verdict", {"engine_id": "r2"}) == {"needed": 7, "blocks": 5, "places": 3}
    assert list(scheduler.requests) == ["r1"]
    assert scheduler.get_num_unfinished_requests() == 1
    scheduler.finish_requests("r2", scheduler.requests["r1"].status.__class__.FINISHED_ABORTED)
    scheduler.schedule()
    assert not scheduler.waiting


def test_on_the_stock_scheduler_a_prefix_in_use_is_not_counted_twice(stock: Stock) -> None:
    scheduler = stock.scheduler
    stock.add("r1", 1, 64)
    scheduler.schedule()
    twin = stock.add("r2", 1, 240)
    assert scheduler.kvferry.port.blocks_missing(twin) == 15 - 4
    assert scheduler.kvferry.handle("verdict", {"engine_id": "r2"}) is None, "15 would not have fitted into 14"
