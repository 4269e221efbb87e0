"""The worker extension (``--worker-extension-cls``): starts this rank's KV agent next to its KV cache."""

from __future__ import annotations

from typing import Any

from vllm_plugin import compat
from vllm_plugin.affinity import run_beside_the_model
from vllm_plugin.transfer import KvAgent


class WorkerExtension:
    """Mixed into vLLM's worker class; every name begins with ``kvferry_`` so as not to meet one of the worker's."""

    kvferry_agent: KvAgent | None = None

    def kvferry_start_agent(self, control_token: str, host: str) -> dict[str, Any]:
        """Called once through ``collective_rpc`` when the API server starts.

        Returns this rank's agent port, and what the KV format key is made of; ``reason`` is set (and ``port`` is
        ``None``) when the layout of the KV cache is not one that can be copied block by block.
        """
        try:
            store = self.kvferry_block_store()
        except compat.UnknownLayout as error:
            return {"port": None, "reason": str(error)}
        if self.kvferry_agent is not None:
            self.kvferry_agent.close()
        self.kvferry_agent = KvAgent(store, control_token, host, run_beside_the_model)
        return {"port": self.kvferry_agent.port, "layout": store.layout, "reason": None}

    def kvferry_block_store(self) -> compat.TensorBlockStore:
        return compat.TensorBlockStore(compat.kv_caches(self), compat.worker_blocks_total(self))
