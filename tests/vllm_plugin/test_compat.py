"""The one module that names vLLM's internals, against the installed vLLM but without a server."""

from __future__ import annotations

import asyncio
import sys
import warnings
from argparse import Namespace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def compat() -> ModuleType:
    pytest.importorskip("vllm", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm_plugin import compat
    return compat


@pytest.fixture(scope="module")
def torch(compat: ModuleType) -> Any:
    return sys.modules["torch"]


def test_an_untested_vllm_is_refused_unless_allowed(compat: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    from vllm_plugin.settings import SettingsError

    compat.check_version()
    monkeypatch.setattr(vllm, "__version__", "9.9.9+cpu")
    monkeypatch.delenv("KVFERRY_ALLOW_UNTESTED_VLLM", raising=False)
    with pytest.raises(SettingsError, match=r"not tested on vLLM 9\.9\.9.*KVFERRY_ALLOW_UNTESTED_VLLM=1"):
        compat.check_version()
    monkeypatch.setenv("KVFERRY_ALLOW_UNTESTED_VLLM", "1")
    compat.check_version()


def engine_client(
    scheduler_cls: str = "vllm_plugin.scheduler.KvferryScheduler",
    worker_extension_cls: str = "vllm_plugin.worker.WorkerExtension",
    data_parallel_size: int = 1,
) -> Any:
    """As much of AsyncLLM as start-up is checked by, around vLLM's own resolution of the scheduler class."""
    from vllm.config.scheduler import SchedulerConfig

    scheduler_config = SchedulerConfig(
        max_model_len=64, is_encoder_decoder=False, scheduler_cls=scheduler_cls, async_scheduling=True
    )
    parallel = SimpleNamespace(worker_extension_cls=worker_extension_cls, data_parallel_size=data_parallel_size)
    return SimpleNamespace(vllm_config=SimpleNamespace(scheduler_config=scheduler_config, parallel_config=parallel))


@pytest.mark.parametrize(
    ("client", "arguments", "says"),
    [
        ({"scheduler_cls": "vllm.v1.core.sched.async_scheduler.AsyncScheduler"}, {}, "--scheduler-cls vllm_plugin"),
        ({"worker_extension_cls": ""}, {}, "--worker-extension-cls vllm_plugin"),
        ({"data_parallel_size": 2}, {}, "data parallelism.*start one server a replica"),
        ({}, {"api_server_count": 2}, "--api-server-count 1"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_server_that_was_started_otherwise_is_refused_with_what_to_do(
    compat: ModuleType, client: dict[str, Any], arguments: dict[str, Any], says: str
) -> None:
    from vllm_plugin.scheduler import KvferryScheduler
    from vllm_plugin.settings import SettingsError
    from vllm_plugin.worker import WorkerExtension

    needed = (KvferryScheduler, WorkerExtension)
    compat.check_engine(engine_client(), Namespace(api_server_count=1), *needed)
    with pytest.raises(SettingsError, match=says):
        compat.check_engine(engine_client(**client), Namespace(**{"api_server_count": 1, **arguments}), *needed)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"enable_caching": False}, "prefix caching is off"),
        ({"groups": 2}, "more than one KV cache group"),
        ({"num_spec_tokens": 3}, "speculative decoding"),
        ({"hash_block_size": 16}, "differ in size"),
    ],
)
def test_what_keeps_blocks_from_being_copied_is_said(compat: ModuleType, changes: dict[str, Any], says: str) -> None:
    def port(enable_caching: bool = True, groups: int = 1, num_spec_tokens: int = 0, hash_block_size: int = 32) -> Any:
        coordinator = SimpleNamespace(single_type_managers=[SimpleNamespace(block_size=32)])
        return compat.EnginePort(
            SimpleNamespace(
                kv_cache_manager=SimpleNamespace(enable_caching=enable_caching, coordinator=coordinator),
                kv_cache_config=SimpleNamespace(kv_cache_groups=[None] * groups),
                num_spec_tokens=num_spec_tokens,
                hash_block_size=hash_block_size,
            )
        )

    assert port().copy_obstacle() is None
    assert says in port(**changes).copy_obstacle()


def test_blocks_of_all_layers_are_copied_and_no_other_byte_changes(compat: ModuleType, torch: Any) -> None:
    torch.manual_seed(0)
    source = [torch.randn(8, 2, 4, 3), torch.randn(16, 5).to(torch.bfloat16)]  # The second: two kernel blocks a block.
    destination = [torch.randn(8, 2, 4, 3), torch.randn(16, 5).to(torch.bfloat16)]
    before = [layer.clone() for layer in destination]
    from_store, to_store = compat.TensorBlockStore(source, 8), compat.TensorBlockStore(destination, 8)
    assert from_store.block_bytes == 2 * 4 * 3 * 4 + 2 * 5 * 2
    data = from_store.allocate(2 * from_store.block_bytes)
    from_store.gather([6, 1], data)
    to_store.scatter([3, 4], data)
    assert torch.equal(destination[0][[3, 4]], source[0][[6, 1]])
    assert torch.equal(destination[1][6:10], torch.cat([source[1][12:14], source[1][2:4]]))
    untouched = [0, 1, 2, 5, 6, 7]
    assert torch.equal(destination[0][untouched], before[0][untouched])


def test_a_cache_that_does_not_divide_into_blocks_is_an_unknown_layout(compat: ModuleType, torch: Any) -> None:
    with pytest.raises(compat.UnknownLayout):
        compat.TensorBlockStore([torch.zeros(7, 2)], 4)
    worker = SimpleNamespace(model_runner=SimpleNamespace(kv_caches=[[torch.zeros(4)]]))
    with pytest.raises(compat.UnknownLayout):
        compat.kv_caches(worker)


def test_a_resumed_request_is_parted_and_its_seed_stands_where_it_stood(compat: ModuleType, torch: Any) -> None:
    def draw(generator: Any) -> int:
        return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long))

    straight = torch.Generator().manual_seed(5)
    draws = [draw(straight) for _ in range(4)]
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(extra_args={compat.PROMPT_TOKENS_KEY: 4}),
        prompt_token_ids=[1, 2, 3, 4, 50, 51, 52],
        output_token_ids=[],
        num_prompt_tokens=7,
        generator=torch.Generator().manual_seed(5),
    )
    compat.split_resumed(request)
    assert (request.prompt_token_ids, request.output_token_ids, request.num_prompt_tokens) == (
        [1, 2, 3, 4],
        [50, 51, 52],
        4,
    )
    compat.split_resumed(request)  # It enters the batch again after a preemption: nothing is parted twice.
    assert request.output_token_ids == [50, 51, 52]
    assert draw(request.generator) == draws[3]


@pytest.mark.parametrize("output_tokens", [0, 3])
def test_a_draw_inside_the_prompt_is_taken_back(compat: ModuleType, torch: Any, output_tokens: int) -> None:
    """vLLM rewinds by the offset, which a generator on the CPU does not have: stock 0.32.0 fails there."""

    def draw(generator: Any) -> int:
        return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long))

    straight = torch.Generator().manual_seed(5)
    draws = [draw(straight) for _ in range(output_tokens + 1)]
    standing = torch.Generator().manual_seed(5)
    for _ in range(output_tokens):
        draw(standing)
    generator = compat.RewindingGenerator.of(SimpleNamespace(generator=standing, output_token_ids=[7] * output_tokens))
    for _ in range(3):  # As many pieces of a prompt.
        draw(generator)
        generator.set_offset(generator.get_offset() - 4)
    assert draw(generator) == draws[-1]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_server_that_is_told_to_end_is_emptied_first_and_then_ends_all_the_same(
    compat: ModuleType, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As vLLM does it: once from a thread while the loop runs, and once more from the loop, at the very end."""
    order: list[str] = []

    async def empty() -> None:
        order.append("emptied")
        if fails:
            raise RuntimeError("a bug")

    engine_client = SimpleNamespace(shutdown=lambda timeout: order.append(f"stopped after {timeout}"))
    compat.drain_before_shutdown(engine_client, empty)
    await asyncio.get_running_loop().run_in_executor(None, lambda: engine_client.shutdown(timeout=3))
    engine_client.shutdown(timeout=3)
    assert order == ["emptied", "stopped after 3", "stopped after 3"]
    assert ("draining before the end failed" in caplog.text) == fails


async def test_a_call_that_the_engine_can_no_longer_answer_ends_with_it(compat: ModuleType) -> None:
    """vLLM leaves such a call waiting: the server that was told to end then never does."""
    asked = asyncio.Event()

    async def call_utility_async(*_: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    resources = SimpleNamespace(engine_dead=False)
    client = SimpleNamespace(engine_core=SimpleNamespace(call_utility_async=call_utility_async, resources=resources))
    call = asyncio.create_task(compat.call_engine(client, "report", {}))
    await asked.wait()
    assert not (await asyncio.wait({call}, timeout=2 * compat.ENGINE_POLL_S))[0]
    resources.engine_dead = True
    with pytest.raises(compat.EngineDeadError):
        await asyncio.wait_for(call, 10)


def test_our_keys_from_a_stranger_are_dropped(compat: ModuleType) -> None:
    params = SimpleNamespace(extra_args={compat.RESUME_KEY: "x", compat.REQUEST_KEY: "y", "theirs": 1})
    compat.drop_own_keys(params)
    assert params.extra_args == {"theirs": 1}
