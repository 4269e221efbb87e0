"""The KV cache as numbered blocks: references, and the prefix cache (vLLM's BlockPool, without the KV)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Free blocks are given out in the order in which they came back, so what was cached last is lost last.

    Bounded by its blocks: a content is remembered only as long as its block holds it.
    """

    def __init__(self, blocks_total: int, *, caching: bool) -> None:
        self.blocks_total = blocks_total
        self.caching = caching
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks_total))
        self._references = [0] * blocks_total
        self._contents: dict[int, int] = {}
        """Block -> digest of all tokens up to its end."""
        self._by_content: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<BlockPool {self.free} of {self.blocks_total} free, {len(self._by_content)} cached>"

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Blocks with one reference each. The caller has seen that there are enough."""
        assert 0 <= count <= len(self._free), f"{count} blocks of {self}"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            if (content := self._contents.pop(block, None)) is not None and self._by_content.get(content) == block:
                del self._by_content[content]
        return blocks

    def give(self, blocks: Sequence[int]) -> None:
        """One reference less on each; the end of a sequence is lost before its beginning."""
        for block in reversed(blocks):
            left = self._references[block] = self._references[block] - 1
            assert left >= 0, f"block {block} was given back twice"
            if left == 0:
                self._free[block] = None

    def touch(self, blocks: Iterable[int]) -> None:
        """One reference more on each."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def fill(self, block: int, content: int) -> None:
        """The block is full: it can be found from now on, unless another one already holds the same."""
        if self.caching:
            self._contents[block] = content
            self._by_content.setdefault(content, block)

    def content(self, block: int) -> int | None:
        return self._contents.get(block)

    def find(self, contents: Iterable[int]) -> list[int]:
        """The leading blocks of a sequence that are here; no references are taken."""
        found: list[int] = []
        for content in contents:
            if (block := self._by_content.get(content)) is None:
                break
            found.append(block)
        return found

    def free_among(self, blocks: Iterable[int]) -> int:
        """How many of these would be taken from the free ones by a reference."""
        return sum(self._references[block] == 0 for block in blocks)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless the references are exactly those of ``holders``."""
        counted = [0] * self.blocks_total
        for blocks in holders:
            for block in blocks:
                counted[block] += 1
        assert counted == self._references, "references and holders differ"
        assert set(self._free) == {block for block, count in enumerate(counted) if count == 0}
        assert len(self._contents) <= self.blocks_total
        assert all(self._contents.get(block) == content for content, block in self._by_content.items())
