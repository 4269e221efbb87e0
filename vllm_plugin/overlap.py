"""The two halves of a transfer side by side: while one chunk is on the wire, the next is copied in memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

Blocks = Sequence[int]
Step = Callable[[Blocks, memoryview], None]
"""One half: does its part for those blocks, whose bytes are, or come to be, in that memory."""


def overlap(chunks: Sequence[Blocks], buffers: Sequence[memoryview], first: Step, second: Step) -> None:
    """``first``, then ``second``, for every chunk and in order; the second of a chunk beside the first of the next.

    ``second`` runs on a thread of its own, which has ended when this returns or raises; after one has failed, no other
    begins. Chunks take turns in the buffers: a ``first`` waits for the ``second`` that still needs its buffer.
    """
    if len(chunks) == 1:  # Nothing to overlap with, and a thread would cost more than the copy of a block.
        first(chunks[0], buffers[0])
        second(chunks[0], buffers[0])
        return
    thread = ThreadPoolExecutor(1, "kvferry-overlap")
    under_way: deque[Future[None]] = deque()
    last: Future[None] | None = None
    try:
        for index, blocks in enumerate(chunks):
            while under_way and (len(under_way) == len(buffers) or under_way[0].done()):
                under_way.popleft().result()
            buffer = buffers[index % len(buffers)]
            first(blocks, buffer)
            last = thread.submit(_after, last, second, blocks, buffer)
            under_way.append(last)
        for step in under_way:
            step.result()
    finally:
        thread.shutdown(cancel_futures=True)


def _after(last: Future[None] | None, second: Step, blocks: Blocks, buffer: memoryview) -> None:
    if last is not None:
        last.result()  # It is over, since there is one thread; if it failed, so does this.
    second(blocks, buffer)


class Buffers:
    """Chunk buffers, two a transfer. Some are kept for the next transfers: pinned memory is slow to come by."""

    def __init__(self, allocate: Callable[[int], memoryview], buffer_bytes: int, kept_max: int) -> None:
        self._allocate = allocate
        self._buffer_bytes = buffer_bytes
        self._kept_max = kept_max
        self._idle: list[memoryview] = []
        self._lock = threading.Lock()
        self.in_use = 0

    @contextmanager
    def two(self) -> Iterator[Sequence[memoryview]]:
        with self._lock:
            taken = [self._idle.pop() for _ in range(min(2, len(self._idle)))]
            self.in_use += 2
        try:
            while len(taken) < 2:
                taken.append(self._allocate(self._buffer_bytes))
            yield taken
        finally:
            with self._lock:
                self.in_use -= 2
                self._idle += taken[: self._kept_max - len(self._idle)]
