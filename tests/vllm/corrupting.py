"""A worker extension that writes zeros instead of what was copied, while a file says so: proof that copies are used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tests.vllm import CORRUPT_VARIABLE
from vllm_plugin import compat
from vllm_plugin.worker import WorkerExtension


class CorruptingStore(compat.TensorBlockStore):
    def scatter(self, block_ids: Sequence[int], data: memoryview) -> None:
        zeros = Path(os.environ[CORRUPT_VARIABLE]).exists()
        super().scatter(block_ids, memoryview(bytearray(len(data))) if zeros else data)


class CorruptingExtension(WorkerExtension):
    def kvferry_block_store(self) -> compat.TensorBlockStore:
        return CorruptingStore(compat.kv_caches(self), compat.worker_blocks_total(self))
