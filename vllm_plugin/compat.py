"""The only module that names vLLM's internals. Written for, and tested on, the versions in ``TESTED_VERSIONS``.

In four parts: the version guard; what the engine core needs (``EnginePort``); what a worker needs; what the API
server's front end needs. Another vLLM version means: read this file against it, run ``tests/vllm``, add the version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
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
        return int(self._scheduler.max_num_running_reqs)

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

    def stop_scheduling(self, request: Request) -> None:
        """Take a running request out of the batch: it keeps its blocks, and what is in flight is still delivered."""
        self._scheduler.running.remove(request)

    def resume_scheduling(self, request: Request) -> None:
        """Put it back into the batch, or, if its place was taken meanwhile, first into the queue, as if preempted."""
        scheduler = self._scheduler
        if len(scheduler.running) < scheduler.max_num_running_reqs:
            scheduler.running.append(request)
        else:
            scheduler._preempt_request(request, time.monotonic())

    def finish(self, request: Request) -> None:
        """End a request without an output; its blocks are freed and stay in the prefix cache."""
        self._scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def park(self, request: Request) -> None:
        """Make a request known, so that an abort finds it, but put it into no queue."""
        self._scheduler.requests[request.request_id] = request

    def ending(self, request: Request, output_token_ids: list[int]) -> tuple[str, int | str | None] | None:
        """Give a parked request its output tokens; finish reason and stop reason if they are all that it may have."""
        from vllm.v1.core.sched.utils import check_stop

        request.append_output_token_ids(output_token_ids)
        if not output_token_ids or not check_stop(request, self._scheduler.max_model_len):
            return None
        reason = str(request.get_finished_reason())
        request.status = RequestStatus.WAITING  # It is ended like any parked request, by ``finish``.
        return reason, request.stop_reason

    def admit(self, request: Request) -> None:
        """Queue a parked request, first in line."""
        scheduler = self._scheduler
        scheduler.requests.pop(request.request_id, None)
        # The stock scheduler asserts that a first prefix hit lies inside the prompt (Scheduler.schedule).
        request.prefill_stats = None
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


def why_engine_cannot_move(request: Request) -> str | None:
    """A reason that only the engine core sees (the front end's come first, ``why_cannot_move``)."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "prompt embeddings"
    if request.has_encoder_inputs:
        return "multimodal input"
    if request.use_structured_output:
        return "structured output"
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


def replay_draws(generator: torch.Generator, count: int) -> None:
    if generator.device.type == "cpu":
        for _ in range(count):
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        return
    # Not tested on a GPU: there each draw advances the Philox offset by four (GPUModelRunner rewinds by as much).
    generator.set_offset(generator.get_offset() + 4 * count)


# 4. The API server's front end.


async def call_engine(engine_client: Any, operation: str, payload: dict[str, Any]) -> Any:
    """Run ``EngineAgent.handle(operation, payload)`` in the engine core, between two of its steps."""
    return await engine_client.engine_core.call_utility_async("kvferry", operation, payload)


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
    if params.structured_outputs is not None:
        return "structured output"
    if params.flat_logprobs:
        return "flat_logprobs"
    if params.logprob_token_ids:
        return "logprob_token_ids"
    if options.get("lora_request") is not None:
        return "LoRA adapter"
    if options.get("reasoning_parser_kwargs") is not None:
        return "reasoning parser"
    if params.extra_args and params.extra_args.get("kv_transfer_params"):
        return "kv_transfer_params"
    if params.watermarking:
        return "watermarking"
    if params.output_kind == RequestOutputKind.CUMULATIVE:
        return "cumulative output"
    if max(params.stream_interval or 1, engine_client.output_processor.stream_interval) > 1:
        return "stream_interval"
    return None


def why_chats_cannot_move(arguments: Any) -> str | None:
    """A parser's state is built from the text as it came, piece by piece; a replay in one piece was not tested."""
    if getattr(arguments, "reasoning_parser", None):
        return "reasoning parser"
    if getattr(arguments, "tool_call_parser", None):
        return "tool parser"
    return None


def is_final_only(params: Any) -> bool:
    from vllm.sampling_params import RequestOutputKind

    return bool(params.output_kind == RequestOutputKind.FINAL_ONLY)


def drop_own_keys(params: Any) -> None:
    """Only a managed request may carry our keys: elsewhere they came from whoever wrote ``vllm_xargs``."""
    if params.extra_args:
        for key in (REQUEST_KEY, RESUME_KEY, PROMPT_TOKENS_KEY):
            params.extra_args.pop(key, None)


def replace_generate(engine_client: Any, wrap: Callable[[Any], Callable[..., AsyncGenerator[Any, None]]]) -> None:
    """Put ``wrap(stock generate)`` in front of ``AsyncLLM.generate``, which every generating route calls."""
    engine_client.generate = wrap(engine_client.generate)


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
