"""Hundreds of instances that do nothing but report, in one process: what the control plane sees of a large cluster.

    python -m loadtest.bench.reporters PORT COUNT

Lighter than ``loadtest/fake_vllm``, whose engines would want the cores that are measured. A report's ``sequence`` is
the time at which it was made (``CLOCK_MONOTONIC`` in ns), which means the same in every process of the machine.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import time
from typing import Any

import uvloop

from loadtest.bench.mock_vllm import MODEL, REPORT_INTERVAL_S, Connection

BLOCKS = 20_000
BLOCK_SIZE = 16
BATCH_MAX = 256
OVERLOADED_EVERY = 20
"""Every so many instances one is fuller than the policy likes, so that the leader has pairs to order."""


class ReportingInstance:
    """Its load goes up and down at random."""

    def __init__(self, number: int) -> None:
        self.instance_id = f"instance-{number:03}"
        self.listeners: set[ReportingConnection] = set()
        self._random = random.Random(number)
        self._is_overloaded = number % OVERLOADED_EVERY == 0
        self._running = 64

    def report(self) -> dict[str, Any]:
        self._running = min(max(8, self._running + self._random.randint(-4, 4)), BATCH_MAX - 1)
        share = 0.97 if self._is_overloaded else 0.1 + self._running / 400
        used = int(BLOCKS * share)
        free, batch = BLOCKS - used, BATCH_MAX - 1 if self._is_overloaded else self._running
        return {
            "instance_id": self.instance_id,
            "boot_id": self.instance_id,
            "sequence": time.monotonic_ns(),
            "models": [MODEL],
            "vllm_version": "0.32.0",
            "plugin_version": "0",
            "protocol_version": 1,
            "kv_format": "mock",
            "kv_reason": None,
            "block_size": BLOCK_SIZE,
            "blocks_total": BLOCKS,
            "blocks_free": free,
            "blocks_reserved": 0,
            "requests_running": batch,
            "requests_waiting": 0,
            "requests_running_max": BATCH_MAX,
            "running_by_priority": {"0": batch},
            "waiting_by_priority": {},
            "virtual_usage_blocks": float(used),
            "freeness_steps": free / batch * BLOCK_SIZE,
            "head_of_line_blocks": 0,
            "queued_blocks": 0,
            "step_ms": 20.0,
            "draining": False,
            "migrations_in": 0,
            "migrations_out": 0,
            "migrations_ended": {"committed": 0, "aborted": 0},
            "fence": 0,
            "room_blocks": free,
            "room_places": 10_000,
        }

    async def run(self, delay_s: float) -> None:
        """``delay_s``: they do not all report at once. What a process that stood still has missed is not sent later."""
        loop = asyncio.get_running_loop()
        due = loop.time() + delay_s
        while True:
            await asyncio.sleep(due - loop.time())
            due = max(due + REPORT_INTERVAL_S, loop.time())
            if self.listeners:
                line = json.dumps(self.report()).encode() + b"\n"
                for listener in self.listeners:
                    listener.send(line)


class ReportingConnection(Connection):
    def __init__(self, instance: ReportingInstance) -> None:
        super().__init__(instance.instance_id)
        self._instance = instance

    def send(self, line: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(line), line))

    def on_message_complete(self) -> None:
        if self._url.startswith(b"/llumlet/pairing"):
            self._answer(b"200 OK", b"{}")
        else:
            super().on_message_complete()

    def _report(self) -> dict[str, object]:
        return self._instance.report()

    def _stream_reports(self) -> None:
        self._instance.listeners.add(self)

    def _stop(self) -> None:
        self._instance.listeners.discard(self)
        super()._stop()


def allow_many_connections() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve(first_port: int, count: int) -> None:
    allow_many_connections()
    loop = asyncio.get_running_loop()
    instances = [ReportingInstance(number) for number in range(count)]
    for port, instance in enumerate(instances, first_port):
        await loop.create_server(lambda instance=instance: ReportingConnection(instance), "127.0.0.1", port)  # type: ignore[misc]
    print(f"{count} instances from port {first_port} on", flush=True)
    await asyncio.gather(
        *(one.run(REPORT_INTERVAL_S * index / count) for index, one in enumerate(instances)),
    )


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
