"""Whether a request can be started now. In the engine core, between two steps: the only place where that is known.

The decision is made in :meth:`Admission.judge`, when the request reaches the scheduler, on the very blocks and queue
that the next step will see. What is admitted enters the queue at once, and counts there for whoever comes next: two
requests of one moment never count the same blocks. What is refused enters nothing.

What a refusal costs: the API server has tokenized the prompt and sent it here, the block hashes were made (by vLLM's
input thread, beside the engine), and this look. To spare that where the prompt makes no difference, each report carries
:meth:`Admission.room`, and the API server refuses by the last one, before it reads a byte of the prompt, while there
was not room for the smallest (Llumlet.why_full).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from gateway.policy.waiting import GROWTH_TOKENS, Room, room
from vllm_plugin import compat

REFUSED_KEPT = 1024
"""Refusals that the API server has not asked for yet; it asks at once, or its request has gone."""


@dataclass
class Admission:
    port: compat.EnginePort
    growth_tokens: int = GROWTH_TOKENS
    refused: OrderedDict[str, dict[str, Any]] = field(default_factory=OrderedDict)
    """By the engine's request id."""

    def judge(self, request: compat.Request, places_reserved: int) -> bool:
        """Whether it may be queued. ``places_reserved``: for requests that are arriving from elsewhere."""
        found = self._room(request, places_reserved)
        needed = self.port.blocks_missing(request)
        if found.fits(needed):
            return True
        self.refused[request.request_id] = {"needed": needed, "blocks": found.blocks, "places": found.places}
        if len(self.refused) > REFUSED_KEPT:
            self.refused.popitem(last=False)
        return False

    def verdict(self, engine_id: str) -> dict[str, Any] | None:
        """The refusal of a request, once. ``None``: it was let in, or vLLM itself has refused it."""
        return self.refused.pop(engine_id, None)

    def room(self, places_reserved: int) -> Room:
        """For a request of the lowest class."""
        return self._room(None, places_reserved)

    def _room(self, request: compat.Request | None, places_reserved: int) -> Room:
        port = self.port
        if port.is_paused:
            return Room(0, 0)
        before = [one for one in port.waiting() if request is None or self._comes_before(one, request)]
        running = len(port.running())
        batch = running + len(before) + places_reserved
        if batch >= port.requests_running_max:
            return Room(0, 0)
        promised = port.blocks_unfinished() + (port.blocks_watermark if running else 0)
        for one in before:
            if promised >= port.blocks_free:
                return Room(0, port.requests_running_max - batch)  # Nor is a long queue looked at to its end.
            promised += port.blocks_missing(one)
        return room(
            port.blocks_free, promised, batch, port.requests_running_max, self.growth_tokens, port.block_size
        )  # fmt: skip

    def _comes_before(self, other: compat.Request, request: compat.Request) -> bool:
        """Whether ``other``, which is queued, is owed its blocks first: the stock scheduler looks at it first, or it
        was admitted (and perhaps preempted since)."""
        if not self.port.orders_by_priority or other.priority <= request.priority:
            return True
        extra = other.sampling_params.extra_args if other.sampling_params is not None else None
        return bool(extra and compat.ADMIT_KEY in extra)
