"""The only module that names vLLM's internals. Written for, and tested on, the versions in ``TESTED_VERSIONS``.

In four parts: the version guard; what the engine core needs (``EnginePort``); what a worker needs; what the API
server's front end needs. Another vLLM version means: read this file against it, run ``tests/vllm``, add the version.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_plugin.settings import SettingsError

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.engine.output_processor import RequestState

__all__ = ["AsyncScheduler", "EngineDeadError", "ModelRunnerOutput", "Request", "RequestStatus", "SchedulerOutput"]

logger = logging.getLogger("vllm.kvferry.compat")

TESTED_VERSIONS = ("0.32.0",)

# Keys in SamplingParams.extra_args, which vLLM carries from the front end to the engine core and the workers.
REQUEST_KEY = "kvferry_request"
RESUME_KEY = "kvferry_resume"
PROMPT_TOKENS_KEY = "kvferry_prompt_tokens"
ADMIT_KEY = "kvferry_admit"

ENGINE_POLL_S = 0.5
"""How often a call that waits for the engine looks whether there still is one."""

QUEUED_STATUSES = (
    RequestStatus.WAITING,
    RequestStatus.PREEMPTED,
    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
)


# 1. The version guard.


def is_requested() -> bool:
    """Whether this server was started with kvferry named in ``VLLM_PLUGINS``."""
    return "kvferry" in os.environ.get("VLLM_PLUGINS", "").split(",")


def vllm_version() -> str:
    import vllm

    return str(vllm.__version__).split("+")[0]


def check_version() -> None:
    """Raises SettingsError unless the installed vLLM was tested, or ``KVFERRY_ALLOW_UNTESTED_VLLM=1`` is set."""
    version = vllm_version()
    if version in TESTED_VERSIONS:
        return
    if os.environ.get("KVFERRY_ALLOW_UNTESTED_VLLM") == "1":
        logger.warning("kvferry was not tested on vLLM %s (tested: %s)", version, ", ".join(TESTED_VERSIONS))
        return
    raise SettingsError(
        f"kvferry was not tested on vLLM {version} (tested: {', '.join(TESTED_VERSIONS)}). Install a tested version, "
        "set KVFERRY_ALLOW_UNTESTED_VLLM=1 to try this one, or take kvferry out of VLLM_PLUGINS."
    )


# 2. The engine core. Everything here runs on the engine's own thread, between two steps.


def install_engine_method() -> None:
    """Add ``EngineCore.kvferry(operation, payload)``, called through ``call_utility_async`` from the API server."""
    from vllm.v1.engine.core import EngineCore

    def kvferry(self: Any, operation: str, payload: dict[str, Any]) -> Any:
        agent = getattr(self.scheduler, "kvferry", None)
        if agent is None:
            raise SettingsError("start vLLM with --scheduler-cls vllm_plugin.scheduler.KvferryScheduler")
        agent.port.block_hasher = self.request_block_hasher
        return agent.handle(operation, payload)

    EngineCore.kvferry = kvferry


class GrammarRejected(Exception):
    """Output tokens that came from elsewhere do not fit the request's grammar."""


class EnginePort:
    """The scheduler's insides that migration needs, under the names that the rest of the plugin uses."""

    def __init__(self, scheduler: AsyncScheduler) -> None:
        self._scheduler = scheduler
        self.block_hasher: Callable[[Request], list[Any]] | None = None

    @property
    def _pool(self) -> Any:
        return self._scheduler.kv_cache_manager.block_pool

    @property
    def block_size(self) -> int:
        return int(self._scheduler.kv_cache_manager.coordinator.single_type_managers[0].block_size)

    @property
    def blocks_total(self) -> int:
        """Blocks that requests can use: one is vLLM's null block."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def blocks_free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    @property
    def requests_running_max(self) -> int:
        return int(min(self._scheduler.max_num_running_reqs, self._scheduler.max_num_active_reqs))

    def copy_obstacle(self) -> str | None:
        """Why KV blocks cannot be copied into this engine's prefix cache, or ``None``."""
        manager = self._scheduler.kv_cache_manager
        if not manager.enable_caching:
            return "prefix caching is off"
        if len(self._scheduler.kv_cache_config.kv_cache_groups) != 1:
            return "the model has more than one KV cache group"
        if self._scheduler.num_spec_tokens > 0:
            return "speculative decoding is on"
        if self._scheduler.hash_block_size != self.block_size:
            return "block hashes and KV blocks differ in size"
        return None

    def running(self) -> list[Request]:
        return list(self._scheduler.running)

    def waiting(self) -> list[Request]:
        """Queued requests in the order in which they will be looked at."""
        return [*self._scheduler.kv_holding_waiting, *self._scheduler.waiting]

    @property
    def is_paused(self) -> bool:
        """Asleep, or told to start nothing new."""
        return bool(self._scheduler.pause_state != PauseState.UNPAUSED)

    @property
    def orders_by_priority(self) -> bool:
        """``--scheduling-policy priority``: else a queue is served in the order of arrival, whatever the classes."""
        return bool(self._scheduler.policy == SchedulingPolicy.PRIORITY)

    @property
    def blocks_watermark(self) -> int:
        """Blocks that the stock scheduler leaves free when it starts a request beside others."""
        return int(self._scheduler.kv_cache_manager.watermark_blocks)

    def blocks_unfinished(self) -> int:
        """What running requests are still to be given for prompts of which only a part is computed."""
        return int(self._scheduler._inflight_prefill_reserved_blocks())

    def blocks_missing(self, request: Request) -> int:
        """What a queued request is to be given before it can run, by the rule of the stock scheduler itself
        (``allocate_slots(full_sequence_must_fit=True)``). Blocks of its prefix that others use already count as there;
        those that nobody uses do not, as they are among the free ones."""
        manager = self._scheduler.kv_cache_manager
        hit, hit_tokens, _ = manager.get_computed_blocks(request)
        tokens = min(request.num_tokens, self._scheduler.max_model_len)
        missing = manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=tokens,
            new_computed_blocks=hit.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=hit_tokens,
            num_local_computed_tokens=hit_tokens,
            num_tokens_main_model=tokens,
            apply_admission_cap=True,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )
        return int(missing)

    def batch_is_full(self, arriving: int) -> bool:
        return bool(len(self._scheduler.running) + arriving >= self._scheduler.max_num_running_reqs)

    def held_blocks(self, request: Request) -> list[KVCacheBlock]:
        (blocks,) = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        return list(blocks)

    def computed_tokens(self, request: Request) -> int:
        """Leading tokens whose KV is valid now: those of a step in flight and the token last sampled are not."""
        return int(max(0, min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1)))

    def is_live(self, request: Request) -> bool:
        return self._scheduler.requests.get(request.request_id) is request and not request.is_finished()

    def is_queued(self, request: Request) -> bool:
        """Whether it waits for its first step, or was preempted: it holds no blocks."""
        return request.status in QUEUED_STATUSES and request in self._scheduler.waiting

    def stop_scheduling(self, request: Request) -> None:
        """Take a request out of batch or queue: it keeps its blocks, and what is in flight is still delivered."""
        scheduler = self._scheduler
        if request.status == RequestStatus.RUNNING:
            scheduler.running.remove(request)
        else:
            scheduler.waiting.remove_request(request)
            scheduler.deferred_waiting.discard(request)

    def resume_scheduling(self, request: Request) -> None:
        """Put it back where it was; if its place in the batch was taken, first into the queue, as if preempted."""
        scheduler = self._scheduler
        if request.status != RequestStatus.RUNNING:
            scheduler.waiting.prepend_request(request)
            if scheduler._is_blocked_waiting_status(request.status):
                scheduler.deferred_waiting.add(request)
        elif len(scheduler.running) < scheduler.max_num_running_reqs:
            scheduler.running.append(request)
        else:
            scheduler._preempt_request(request, time.monotonic())

    def finish(self, request: Request) -> None:
        """End a request without an output; its blocks are freed and stay in the prefix cache."""
        self._scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def park(self, request: Request) -> None:
        """Make a request known, so that an abort finds it, but put it into no queue."""
        self._scheduler.requests[request.request_id] = request

    def grammar_is_compiling(self, request: Request) -> bool:
        """Structured output: the grammar is made on a thread of its own, from the time when the request arrives."""
        structured = request.structured_output_request
        return structured is not None and structured.grammar is None

    def take_output(self, request: Request, token_ids: list[int]) -> None:
        """Give a parked request output tokens that were made elsewhere; its grammar is advanced over each of them.

        One by one, as when they are sampled: a grammar that begins after the reasoning has to see where that ends.
        Raises GrammarRejected.
        """
        if request.structured_output_request is None:
            request.append_output_token_ids(token_ids)
            return
        if isinstance(request.structured_output_request.grammar, Exception):
            raise GrammarRejected("the grammar could not be compiled")
        for token_id in token_ids:
            request.append_output_token_ids(token_id)
            if not self._scheduler.structured_output_manager.accept_tokens(request, [token_id]):
                raise GrammarRejected("the output so far does not follow the grammar")

    def ending(self, request: Request) -> tuple[str, int | str | None] | None:
        """Finish reason and stop reason if a parked request's output tokens are all that it may have."""
        from vllm.v1.core.sched.utils import check_stop

        if not request.num_output_tokens or not check_stop(request, self._scheduler.max_model_len):
            return None
        reason = str(request.get_finished_reason())
        request.status = RequestStatus.WAITING  # It is ended like any parked request, by ``finish``.
        return reason, request.stop_reason

    def admit(self, request: Request, *, begun: bool) -> None:
        """Queue a parked request, first in line. ``begun``: it has been computed elsewhere, at least in part."""
        scheduler = self._scheduler
        scheduler.requests.pop(request.request_id, None)
        if begun:
            # The stock scheduler asserts that a first prefix hit lies inside the prompt (Scheduler.schedule), and what
            # was copied is no hit that the client should read of.
            request.prefill_stats = None
        if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            request.status = RequestStatus.WAITING  # The grammar is there: ``take_output`` has used it.
        extra = request.sampling_params.extra_args
        extra[PROMPT_TOKENS_KEY] = request.num_prompt_tokens
        AsyncScheduler.add_request(scheduler, request)
        if request in scheduler.waiting:
            scheduler.waiting.remove_request(request)
            scheduler.waiting.prepend_request(request)

    def give_all_tokens(self, output: SchedulerOutput) -> None:
        """Model runner V1 starts new requests from prompt tokens alone: give it all, ``split_resumed`` parts them."""
        if self._scheduler.use_v2_model_runner:
            return
        for new in output.scheduled_new_reqs:
            params = new.sampling_params
            if params is not None and params.extra_args and PROMPT_TOKENS_KEY in params.extra_args:
                new.prompt_token_ids = list(self._scheduler.requests[new.req_id].all_token_ids)

    # Blocks that belong to no request yet.

    def new_blocks(self, count: int) -> list[KVCacheBlock]:
        return list(self._pool.get_new_blocks(count))

    def pin_blocks(self, blocks: list[KVCacheBlock]) -> None:
        """One more reference on each: they keep their content until it is given up, whatever becomes of the request."""
        self._pool.touch(blocks)

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Give references up; the last blocks of a sequence are evicted first."""
        self._pool.free_blocks(reversed(list(blocks)))

    def shadow(self, token_ids: list[int], cache_salt: str | None) -> Request:
        """A request that is never run: it carries the block hashes of a sequence that is arriving."""
        from vllm.sampling_params import SamplingParams

        return Request(
            request_id="kvferry-shadow",
            prompt_token_ids=token_ids,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=cache_salt,
            block_hasher=self.block_hasher,
        )

    def take_cached_blocks(self, shadow: Request) -> list[KVCacheBlock]:
        """Leading blocks of the sequence that the prefix cache holds, with a reference on each."""
        (blocks,) = self._scheduler.kv_cache_manager.get_computed_blocks(shadow)[0].blocks
        self._pool.touch(blocks)
        return list(blocks)

    def cache_blocks(self, shadow: Request, blocks: list[KVCacheBlock], have: int, total: int) -> None:
        """Enter ``blocks[have:total]`` into the prefix cache under the hashes of ``shadow``."""
        self._pool.cache_full_blocks(shadow, blocks, have, total, self.block_size, 0)


def prefix_hit_tokens(request: Request) -> int | None:
    """Prompt tokens that the prefix cache held when the request was first scheduled; ``None`` if that is yet to come,
    or once the front end has been told (``cached_tokens``)."""
    stats = request.prefill_stats
    return int(stats.num_cached_tokens) if stats is not None and stats.num_prompt_tokens > 0 else None


def why_engine_cannot_move(request: Request) -> str | None:
    """A reason that only the engine core sees (the front end's come first, ``why_cannot_move``)."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "prompt embeddings"
    if request.has_encoder_inputs:
        return "multimodal input"
    if request.resumable:
        return "streamed input"
    return None


# 3. Workers.


class UnknownLayout(Exception):
    """The KV cache is not made of tensors whose first dimension counts blocks."""


def kv_caches(worker: Any) -> list[torch.Tensor]:
    """The worker's KV cache tensors, one a layer, blocks first; layers that share a tensor count once."""
    caches: dict[int, torch.Tensor] = {}
    for cache in worker.model_runner.kv_caches:
        if not isinstance(cache, torch.Tensor):
            raise UnknownLayout(f"a layer's KV cache is a {type(cache).__name__}")
        caches.setdefault(cache.data_ptr(), cache)
    if not caches:
        raise UnknownLayout("the model has no KV cache")
    return list(caches.values())


def worker_blocks_total(worker: Any) -> int:
    return int(worker.model_runner.kv_cache_config.num_blocks)


class TensorBlockStore:
    """A BlockStore over KV cache tensors of shape (blocks * kernel blocks a block, ...), as vLLM lays them out.

    In main memory NumPy copies, one thread and no more, without the GIL: torch would spread each copy over a team of
    OpenMP threads of its own, bound to the cores on which the model runs. On a GPU the copies run on a side stream, so
    that they do not wait for a step, from and to pinned memory. (Not tested on a GPU.)
    """

    def __init__(self, caches: Sequence[torch.Tensor], blocks_total: int) -> None:
        self.blocks_total = blocks_total
        self._layers: list[Layer] = []
        self.layout = []
        for cache in caches:
            per_block, remainder = divmod(cache.shape[0], blocks_total)
            if remainder or per_block == 0:
                raise UnknownLayout(
                    f"a KV cache of shape {tuple(cache.shape)} does not divide into {blocks_total} blocks"
                )
            view = cache.unflatten(0, (blocks_total, per_block))
            in_plain_rows = view.device.type == "cpu" and view.is_contiguous()
            self._layers.append(PlainLayer(view) if in_plain_rows else TensorLayer(view))
            self.layout.append([list(view.shape[1:]), str(view.dtype)])
        self.block_bytes = sum(layer.block_bytes for layer in self._layers)
        device = caches[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def allocate(self, size_bytes: int) -> memoryview:
        return memoryview(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._stream is not None).numpy())

    def gather(self, block_ids: Sequence[int], out: memoryview) -> None:
        with self._on_stream():
            for layer, part in self._parts(out, len(block_ids)):
                layer.gather(block_ids, part)

    def scatter(self, block_ids: Sequence[int], data: memoryview) -> None:
        with self._on_stream():
            for layer, part in self._parts(data, len(block_ids)):
                layer.scatter(block_ids, part)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:  # Whatever happens, nothing copies from or to the buffer any more.
                self._stream.synchronize()

    def _parts(self, data: memoryview, count: int) -> Iterator[tuple[Layer, memoryview]]:
        """Each layer, with its run of bytes in a buffer of ``count`` blocks."""
        start = 0
        for layer in self._layers:
            end = start + layer.block_bytes * count
            yield layer, data[start:end]
            start = end


class PlainLayer:
    """One layer whose blocks lie one after the other in main memory."""

    def __init__(self, view: torch.Tensor) -> None:
        self._rows = view.flatten(1).view(torch.uint8).numpy()
        self.block_bytes = int(self._rows.shape[1])

    def gather(self, block_ids: Sequence[int], out: memoryview) -> None:
        # mode: any but the default, which would copy once more; the ids were checked.
        numpy.take(self._rows, block_ids, axis=0, out=self._in_rows(out), mode="clip")

    def scatter(self, block_ids: Sequence[int], data: memoryview) -> None:
        self._rows[block_ids] = self._in_rows(data)

    def _in_rows(self, data: memoryview) -> Any:
        return numpy.frombuffer(data, dtype=numpy.uint8).reshape(-1, self.block_bytes)


class TensorLayer:
    """One layer on a GPU, or whose blocks are not contiguous."""

    def __init__(self, view: torch.Tensor) -> None:
        self._view = view
        self.block_bytes = int(view[0].numel() * view.element_size())

    def gather(self, block_ids: Sequence[int], out: memoryview) -> None:
        blocks = self._view.index_select(0, self._index(block_ids))
        torch.frombuffer(out, dtype=torch.uint8).copy_(blocks.reshape(-1).view(torch.uint8), non_blocking=True)

    def scatter(self, block_ids: Sequence[int], data: memoryview) -> None:
        part = torch.frombuffer(data, dtype=torch.uint8).to(self._view.device, non_blocking=True)
        blocks = part.view(self._view.dtype).view(len(block_ids), *self._view.shape[1:])
        self._view.index_copy_(0, self._index(block_ids), blocks)

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, device=self._view.device)


Layer = PlainLayer | TensorLayer


def install_input_batch_split() -> None:
    """Model runner V1: part a resumed request's tokens into prompt and output again when it enters the batch."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    stock = InputBatch.add_request
    if getattr(stock, "kvferry", False):
        return

    def add_request(self: Any, request: Any) -> Any:
        if request.generator is not None and request.generator.device.type == "cpu":
            request.generator = RewindingGenerator.of(request)
        split_resumed(request)
        return stock(self, request)

    add_request.kvferry = True  # type: ignore[attr-defined]
    InputBatch.add_request = add_request


def split_resumed(request: Any) -> None:
    """Part a CachedRequestState whose prompt still holds the output tokens, and replay its seeded draws.

    V1 keeps one torch.Generator a seeded request. Each token so far took one draw from it: ``torch.randint`` on CPU
    (TopKTopPSampler.forward_cpu), an exponential over the vocabulary on GPU (random_sample).
    """
    params = request.sampling_params
    if params is None or not params.extra_args:
        return
    prompt_tokens = params.extra_args.get(PROMPT_TOKENS_KEY)
    if prompt_tokens is None or request.num_prompt_tokens <= prompt_tokens:
        return
    all_tokens = request.prompt_token_ids
    request.prompt_token_ids = all_tokens[:prompt_tokens]
    request.output_token_ids = all_tokens[prompt_tokens:]
    request.num_prompt_tokens = prompt_tokens
    if request.generator is not None:
        replay_draws(request.generator, len(request.output_token_ids))


class RewindingGenerator(torch.Generator):
    """A seeded request's generator on CPU that can take back the draw of a step that ended inside the prompt.

    The model runner rewinds by offset (GPUModelRunner._bookkeeping_sync), which CPU generators do not have: stock vLLM
    0.32.0 fails there, and a resumed request is computed in pieces more often than a new one.
    """

    _request: Any

    @classmethod
    def of(cls, request: Any) -> RewindingGenerator:
        """For a CachedRequestState, at the point where its own generator stands."""
        if isinstance(request.generator, cls):
            return request.generator
        generator = cls()
        generator.manual_seed(request.generator.initial_seed())
        generator.set_state(request.generator.get_state())
        generator._request = request
        return generator

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Only ever called to rewind: back to where the output tokens so far have brought it."""
        self.manual_seed(self.initial_seed())
        replay_draws(self, len(self._request.output_token_ids))


def replay_draws(generator: torch.Generator, count: int) -> None:
    if generator.device.type == "cpu":
        for _ in range(count):
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        return
    # Not tested on a GPU: there each draw advances the Philox offset by four (GPUModelRunner rewinds by as much).
    generator.set_offset(generator.get_offset() + 4 * count)


# 4. The API server's front end.


async def call_engine(engine_client: Any, operation: str, payload: dict[str, Any]) -> Any:
    """Run ``EngineAgent.handle(operation, payload)`` in the engine core, between two of its steps.

    Raises EngineDeadError also when the engine ends before it answers. vLLM tells nobody who waits for it then, and a
    handler that waits for ever keeps the HTTP server from ending.
    """
    core = engine_client.engine_core
    call = asyncio.ensure_future(core.call_utility_async("kvferry", operation, payload))
    try:
        while not (await asyncio.wait({call}, timeout=ENGINE_POLL_S))[0]:
            if core.resources.engine_dead:
                raise EngineDeadError
        return call.result()
    finally:
        call.cancel()


async def call_workers(engine_client: Any, method: str, *args: Any) -> list[Any]:
    """Run a worker extension's method on each rank; only at start-up, since it waits for a step."""
    return list(await engine_client.collective_rpc(method, args=args))


def check_engine(engine_client: Any, arguments: Any, scheduler: type, worker_extension: type) -> None:
    """Raises SettingsError, with what to do, when the server was not started in the way that kvferry needs.

    ``scheduler``, ``worker_extension``: the plugin's classes, of which the server's must be subclasses.
    """
    from vllm.utils.import_utils import resolve_obj_by_qualname

    config = engine_client.vllm_config
    if not issubclass(config.scheduler_config.get_scheduler_cls(), scheduler):
        raise SettingsError("kvferry needs --scheduler-cls vllm_plugin.scheduler.KvferryScheduler")
    extension = config.parallel_config.worker_extension_cls
    if not extension or not issubclass(resolve_obj_by_qualname(extension), worker_extension):
        raise SettingsError("kvferry needs --worker-extension-cls vllm_plugin.worker.WorkerExtension")
    if config.parallel_config.data_parallel_size > 1:
        raise SettingsError(
            "kvferry does not support data parallelism inside one server: start one server a replica instead."
        )
    if (getattr(arguments, "api_server_count", 1) or 1) > 1:
        raise SettingsError("kvferry needs one API server a vLLM server: start it with --api-server-count 1.")


def kv_format(engine_client: Any, layouts: list[Any]) -> str:
    """A key that is equal on two instances only if a KV block of one can be used by the other."""
    config = engine_client.vllm_config
    model = config.model_config
    parts = {
        "model": PurePath(str(model.model)).name,
        "revision": model.revision,
        "architecture": model.hf_config.to_dict(),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "cache_dtype": str(config.cache_config.cache_dtype),
        "block_size": config.cache_config.block_size,
        "layout": [str(config.cache_config.kv_cache_layout), layouts],
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "pipeline_parallel": config.parallel_config.pipeline_parallel_size,
        "vllm": vllm_version(),
    }
    parts["architecture"].pop("_name_or_path", None)
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def served_models(state: Any) -> list[str]:
    return [model.name for model in state.openai_serving_models.base_model_paths]


def why_cannot_move(engine_client: Any, params: Any, options: dict[str, Any]) -> str | None:
    """Why a request of this kind stays where it is, or ``None``. ``options``: the other arguments of ``generate``."""
    from vllm.sampling_params import RequestOutputKind

    if params.n != 1:
        return "n > 1"
    if params.prompt_logprobs is not None:
        return "prompt_logprobs"
    if params.flat_logprobs:
        return "flat_logprobs"
    if params.logprob_token_ids:
        return "logprob_token_ids"
    if options.get("lora_request") is not None:
        return "LoRA adapter"
    if params.extra_args and params.extra_args.get("kv_transfer_params"):
        return "kv_transfer_params"
    if params.watermarking:
        return "watermarking"
    if params.output_kind == RequestOutputKind.CUMULATIVE:
        return "cumulative output"
    if max(params.stream_interval or 1, engine_client.output_processor.stream_interval) > 1:
        return "stream_interval"
    return None


def parses_chats(arguments: Any) -> bool:
    """Whether chats go through a reasoning or tool parser, whose state is built from the text as it comes."""
    return bool(getattr(arguments, "reasoning_parser", None) or getattr(arguments, "tool_call_parser", None))


def is_final_only(params: Any) -> bool:
    from vllm.sampling_params import RequestOutputKind

    return bool(params.output_kind == RequestOutputKind.FINAL_ONLY)


def drop_own_keys(params: Any) -> None:
    """Only a managed request may carry our keys: elsewhere they came from whoever wrote ``vllm_xargs``."""
    if params.extra_args:
        for key in (REQUEST_KEY, RESUME_KEY, PROMPT_TOKENS_KEY, ADMIT_KEY):
            params.extra_args.pop(key, None)


def replace_generate(engine_client: Any, wrap: Callable[[Any], Callable[..., AsyncGenerator[Any, None]]]) -> None:
    """Put ``wrap(stock generate)`` in front of ``AsyncLLM.generate``, which every generating route calls."""
    engine_client.generate = wrap(engine_client.generate)


def drain_before_shutdown(engine_client: Any, empty: Callable[[], Awaitable[None]]) -> None:
    """Have ``empty`` run before vLLM, told to end by a signal, stops the engine.

    vLLM's API server calls ``AsyncLLM.shutdown`` from a thread while its event loop, and so its HTTP server, goes on
    (``entrypoints/launchers/launcher.py``); a second call, at the very end, comes from the loop itself.
    """
    stock = engine_client.shutdown
    loop = asyncio.get_running_loop()
    asked = False

    def shutdown(*args: Any, **options: Any) -> Any:
        nonlocal asked
        if not asked and threading.current_thread() is not threading.main_thread() and loop.is_running():
            asked = True
            asyncio.run_coroutine_threadsafe(_quietly(empty), loop).result()
        return stock(*args, **options)

    engine_client.shutdown = shutdown


async def _quietly(empty: Callable[[], Awaitable[None]]) -> None:
    try:
        await empty()
    except Exception:  # Whatever it was, the server is to end.
        logger.exception("draining before the end failed")


def front_end_ids(engine_client: Any, external_id: str) -> set[str]:
    """vLLM's internal ids of the requests that are known under ``external_id`` now."""
    return set(engine_client.output_processor.external_req_ids.get(external_id, ()))


def front_end_state(engine_client: Any, external_id: str, but: set[str]) -> RequestState | None:
    """The output processor's state of the request under ``external_id`` that is none of ``but``, once it is there."""
    for internal_id in front_end_ids(engine_client, external_id) - but:
        return engine_client.output_processor.request_states.get(internal_id)
    return None


def front_end_tokens(state: RequestState) -> int:
    """Output tokens that the front end has detokenized."""
    assert state.detokenizer is not None
    return int(state.detokenizer.num_output_tokens())


def replay(state: RequestState, token_ids: list[int], logprobs: list[Any] | None) -> str | None:
    """Take output tokens that came from elsewhere through detokenizer and log probabilities, in one piece.

    What comes of it goes to the request's queue like the engine's own output. ``logprobs`` as ``export_logprobs``
    gives them; without them, positions are filled with the tokens alone (their events are not shown again).
    Returns the stop string with which the tokens end, if they do.
    """
    assert state.detokenizer is not None
    assert state.logprobs_processor is not None
    stop_string: str | None = state.detokenizer.update(list(token_ids), False)
    _replay_logprobs(state.logprobs_processor, token_ids, logprobs)
    output = state.make_request_output(list(token_ids), None, None, None)
    if output is not None and state.queue is not None:
        state.queue.put(output)
    return stop_string


def replay_singly(
    state: RequestState, token_ids: list[int], logprobs: list[Any] | None
) -> tuple[list[Any], str | None]:
    """As ``replay``, but as one output a token, returned instead of queued: for a consumer that parses what it reads.

    Reasoning and tool parsers keep state from piece to piece, and some expect pieces as small as decoding makes them.
    """
    assert state.detokenizer is not None
    assert state.logprobs_processor is not None
    outputs: list[Any] = []
    stop_string: str | None = None
    for index, token_id in enumerate(token_ids):
        stop_string = state.detokenizer.update([token_id], False)
        _replay_logprobs(state.logprobs_processor, [token_id], logprobs[index : index + 1] if logprobs else None)
        if (output := state.make_request_output([token_id], None, None, None)) is not None:
            outputs.append(output)
    return outputs, stop_string


def finish_reply(engine_client: Any, state: RequestState, reason: str, stop_reason: int | str | None) -> None:
    """End a request in the front end that the engine need not run: its tokens were complete when they arrived."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    output = EngineCoreOutput(
        request_id=state.request_id,
        new_token_ids=[],
        finish_reason=FinishReason[reason.upper()],
        stop_reason=stop_reason,
    )
    engine_client.output_processor.process_outputs([output])


def _replay_logprobs(processor: Any, token_ids: list[int], logprobs: list[Any] | None) -> None:
    from vllm.logprobs import Logprob
    from vllm.v1.outputs import LogprobsLists

    if processor.logprobs is None:
        return
    if logprobs is None:  # The tokens' texts still count: completions add their lengths up to text_offset.
        ones: Any = numpy.ones(len(token_ids), dtype=numpy.int32)
        tokens = numpy.array(token_ids, dtype=numpy.int32).reshape(-1, 1)
        processor._update_sample_logprobs(LogprobsLists(tokens, numpy.zeros(tokens.shape), ones))
        return
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        position = {entry[0]: Logprob(entry[1], entry[2], entry[3]) for entry in entries}
        processor.logprobs.append(position)
        processor.cumulative_logprob += position[token_id].logprob


def export_logprobs(state: RequestState, count: int) -> list[Any] | None:
    """Log probabilities of the first ``count`` output tokens: a list a token of [token id, logprob, rank, text]."""
    processor = state.logprobs_processor
    if processor is None or processor.logprobs is None:
        return None
    return [
        [[token_id, entry.logprob, entry.rank, entry.decoded_token] for token_id, entry in position.items()]
        for position in processor.logprobs[:count]
    ]


def cached_tokens(state: RequestState) -> int:
    return int(state.num_cached_tokens)


def set_cached_tokens(state: RequestState, count: int) -> None:
    """The client's own prefix hit, as ``usage.prompt_tokens_details`` shows it: the copy is not one."""
    state.num_cached_tokens = count
