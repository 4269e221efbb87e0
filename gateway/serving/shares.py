"""How much of a line the requests of one key may take: no more than is left for all others together.

So the line is never full of one key's requests. A key that is alone there gets half of it, two that press on get a
third each, and so on; nobody has to know how many keys there will be (a dynamic threshold, as switches share a buffer).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from gateway.errors import LimitReached

RETRY_AFTER_S = 2


class Shares:
    """Of this gateway: through several, a key may have as many waiting at each as are left at all of them together."""

    def __init__(self) -> None:
        self._waiting: Counter[str] = Counter()

    def check(self, key_id: str, places_left: int) -> None:
        """Raises :class:`LimitReached`. Without a ``key_id`` there is nobody to share with."""
        held = self._waiting[key_id]
        if key_id and held and held >= places_left:
            raise LimitReached("Too many requests of this key are waiting. Try again later.", RETRY_AFTER_S, {})

    @contextlib.contextmanager
    def taken(self, key_id: str) -> Iterator[None]:
        self._waiting[key_id] += 1
        try:
            yield
        finally:
            self._waiting[key_id] -= 1
            if not self._waiting[key_id]:
                del self._waiting[key_id]
