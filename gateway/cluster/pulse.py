"""Whether an API server answers at all, asked of each one every second."""

from __future__ import annotations

import time

from gateway.cluster.llumlet import LlumletClient
from gateway.cluster.members import Members
from gateway.errors import LlumletRefused, LlumletUnreachable

ENGINE_DEAD_STATUS = 503
"""vLLM's ``/health`` while its engine is dead and its API server is not."""


class Pulse:
    """Of one URL, with a loop of its own, so that one that hangs delays none of the others.

    Discovery asks for more, and gets it only between two engine steps: its silence may be a long prefill.
    """

    def __init__(self, url: str, members: Members, llumlets: LlumletClient, timeout_s: float) -> None:
        self._url = url
        self._members = members
        self._llumlets = llumlets
        self._timeout_s = timeout_s

    async def feel(self) -> None:
        try:
            await self._llumlets.health(self._url, self._timeout_s)
        except LlumletRefused as error:
            self._members.heard(self._url, error.llumlet_status == ENGINE_DEAD_STATUS, time.monotonic())
        except LlumletUnreachable:
            return  # It shows by when the instance was last heard.
        else:
            self._members.heard(self._url, False, time.monotonic())
