"""Tokens that nobody has to store: each follows from the prompt, the seed and its position alone.

So a request gives the same tokens wherever it runs, and a stream that was moved or resumed can be compared token for
token with one that was not. The same numbers come out of every process and every Python.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

VOCABULARY = 32_000
FIRST_TOKEN_ID = 100
"""Those below stand for special tokens."""
BYTES_PER_TOKEN = 4
_MASK = (1 << 64) - 1


def digest(parent: int, token_ids: Iterable[int]) -> int:
    """64 bits that stand for a sequence: ``parent`` for what comes before, then these tokens."""
    try:
        data = array("Q", [parent, *token_ids])
    except OverflowError:  # Not what a tokenizer gives.
        data = array("Q", [parent, *(token_id & _MASK for token_id in token_ids)])
    return int.from_bytes(hashlib.blake2b(data.tobytes(), digest_size=8).digest(), "little")


def output_key(prompt_digest: int, seed: int) -> int:
    return prompt_digest ^ _mixed(seed)


def output_token_id(key: int, position: int) -> int:
    """The output token of number ``position`` of all requests with that :func:`output_key`."""
    return FIRST_TOKEN_ID + _mixed(key + position) % (VOCABULARY - FIRST_TOKEN_ID)


def _mixed(value: int) -> int:
    """SplitMix64's finalizer."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def tokenize(text: str) -> list[int]:
    """One token for every four bytes, about what English takes. Equal beginnings give equal beginnings."""
    data = text.encode()
    return [
        FIRST_TOKEN_ID
        + _mixed(int.from_bytes(data[at : at + BYTES_PER_TOKEN], "little")) % (VOCABULARY - FIRST_TOKEN_ID)
        for at in range(0, len(data), BYTES_PER_TOKEN)
    ]


def text_of(token_id: int) -> str:
    return f" w{token_id}"


class SyntheticPrompt(Sequence[int]):
    """A prompt of a given length that takes no memory; equal keys begin equally, others share nothing.

    Its token ids are in no tokenizer's vocabulary: it is for simulations, which only compare them.
    """

    __slots__ = ("_tokens",)

    def __init__(self, key: int, length: int) -> None:
        begin = key << 24
        self._tokens = range(begin, begin + length)

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._tokens[index]
