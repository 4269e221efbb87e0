"""Virtual usage and freeness (Llumnix, OSDI 2024, section 4.4 and Algorithm 1)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """One request on an instance, in KV cache blocks.

    ``blocks`` are held now; ``demand_blocks`` are needed before it can run, if it is queued. Execution priority: higher
    is more protected, 0 is normal.
    """

    blocks: int
    demand_blocks: int
    is_queued: bool
    is_head_of_line: bool
    execution_priority: int = 0


_NO_HEADROOM: Mapping[int, int] = {}


def virtual_usage_blocks(
    requests: Sequence[RequestUsage], headroom_blocks: Mapping[int, int] = _NO_HEADROOM, draining: bool = False
) -> float:
    """Sum of the requests' virtual usage; infinite when draining, as if a request that fits nowhere had come.

    A queued request counts its demand if it is the head of the line, else nothing. A running one counts its blocks,
    plus its class's headroom shared among the running requests of that class.
    """
    if draining:
        return math.inf
    running = Counter(request.execution_priority for request in requests if not request.is_queued)
    usage = 0.0
    for request in requests:
        if request.is_queued:
            usage += request.demand_blocks if request.is_head_of_line else 0
        else:
            headroom = headroom_blocks.get(request.execution_priority, 0)
            usage += request.blocks + headroom / running[request.execution_priority]
    return usage


def freeness_steps(blocks_total: int, virtual_usage_blocks: float, batch: int, block_size: int) -> float:
    """How many more decode steps the batch can run in the free memory; -inf when draining, negative when overcommitted.

    In steps rather than blocks, so that thresholds do not depend on the block size.
    """
    return (blocks_total - virtual_usage_blocks) / max(batch, 1) * block_size
