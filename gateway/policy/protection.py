"""Headroom: what an instance keeps free while a request of a class that has some runs there (Llumnix, section 4.4.2).

A class has a *target load*: so many tokens on an instance, with which its requests still run as fast as they are to.
What the instance has beyond that is the headroom, one for each class, however many of its requests run there. Any
number of classes may have one. Instances report their load as it is; those who decide add the headroom, so that one
setting at the gateways is all there is to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping

from gateway.policy.usage import freeness_steps
from gateway.policy.view import InstanceView

Targets = Mapping[int, int]
"""By execution priority, the target load in tokens."""


def headroom_blocks(targets: Targets, blocks_total: int, block_size: int) -> dict[int, int]:
    """By class, for an instance of that size; none of it is negative."""
    return {one: max(0, blocks_total - tokens // block_size) for one, tokens in targets.items()}


def with_headroom(view: InstanceView, running: Container[int], targets: Targets) -> InstanceView:
    """``view``: without any. ``running``: the execution priorities of the requests that run there."""
    blocks = headroom_blocks(targets, view.blocks_total, view.block_size)
    kept = [kept_blocks for one, kept_blocks in blocks.items() if one in running]
    if not kept:
        return view
    usage = view.virtual_usage_blocks + sum(kept)
    freeness = freeness_steps(view.blocks_total, usage, view.requests_running, view.block_size)
    return dataclasses.replace(view, virtual_usage_blocks=usage, freeness_steps=freeness, protects=True)
