"""One connection an instance, over which its reports stream in."""

from __future__ import annotations

import asyncio
import time

from gateway import wire
from gateway.cluster.llumlet import LlumletClient
from gateway.cluster.members import Members
from gateway.counters import Counters
from gateway.errors import GatewayError

RETRY_FIRST_S = 0.1
RETRY_MOST_S = 2.0


class ReportReader:
    """Follows one URL for ever. A restart there is a new stream; an old life's reports are ignored by the members."""

    def __init__(self, url: str, members: Members, llumlets: LlumletClient, counters: Counters) -> None:
        self._url = url
        self._members = members
        self._llumlets = llumlets
        self._counters = counters
        self._retry_s = RETRY_FIRST_S

    async def run(self) -> None:
        while True:
            try:
                if not self._members.has_plugin(self._url):  # The secret is not for others.
                    await asyncio.sleep(RETRY_FIRST_S)
                    continue
                await self._llumlets.reports(self._url, self._take)
            except GatewayError:  # Discovery says what is wrong with an instance; staleness follows by itself.
                self._counters.add("report_streams_lost")
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(self._retry_s * 2, RETRY_MOST_S)

    def _take(self, report: wire.Report) -> None:
        self._members.reported(report, time.monotonic())
        self._retry_s = RETRY_FIRST_S
