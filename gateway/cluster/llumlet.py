"""A client of the llumlet routes for everything off the request path. httpx's exceptions end here.

What is asked of every instance all the time (reports, pulse, probe, pairings) goes through the lean client that legs
have too: at 256 instances, httpx took more than a core for it. Orders, which are few, and metrics go through httpx.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import ssl
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from gateway import wire
from gateway.cluster.report_lines import ReportLines, read_status
from gateway.connection import ConnectFailed, ConnectionEnded, ConnectTimeout, Pool, Response
from gateway.errors import LlumletRefused, LlumletTimeout, LlumletUnreachable

MIGRATE_TIMEOUT_S = 60.0
WORDS_MAX = 500
"""Of what an instance says of an error."""
METRICS_BYTES_MAX = 8 * 1024 * 1024
KEEP_ALIVE_S = 3.0
"""Less than uvicorn's five seconds, so that no request meets a connection that the instance is just closing."""
REPORT_GAP_S = 15.0
"""Reports come ten times a second, save during a long engine step: after this time the connection is dead."""

CONNECTIONS_MAX = 16
"""To one instance: one stream of reports, a pulse, and the questions of a probe."""
CONNECT_SHARE = 0.5
"""Of the time for an answer: who is not reached at all is told from who is slow."""

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes

    def check(self) -> None:
        """Raises :class:`LlumletRefused`."""
        if not 200 <= self.status < 300:
            raise _refused(self.status, self.body)

    def value(self) -> Any:
        self.check()
        return json.loads(self.body)


class LlumletClient:
    def __init__(self, secret: str, upstream_api_key: str, timeout_s: float) -> None:
        """The secret goes on the llumlet's routes alone: an instance without the plugin is not told it."""
        headers = {"authorization": f"Bearer {upstream_api_key}"} if upstream_api_key else {}
        self._timeout_s = timeout_s
        self._stock_lines = tuple(headers.items())
        self._llumlet_lines = (*self._stock_lines, (wire.SECRET_HEADER, secret))
        self._pools: dict[str, Pool] = {}
        self._stock = _client(headers, timeout_s, keep_alive_s=KEEP_ALIVE_S)
        # Orders are rare, and that a server has closed an idle connection httpx sees at the next use: none is kept.
        self._http = _client(headers | {wire.SECRET_HEADER: secret}, timeout_s, keep_alive_s=0)

    async def close(self) -> None:
        self.keep(())
        await self._http.aclose()
        await self._stock.aclose()

    def keep(self, urls: Collection[str]) -> None:
        """Forgets the connections to all others."""
        for url in [one for one in self._pools if one not in urls]:
            self._pools.pop(url).close()

    async def has_plugin(self, url: str) -> bool:
        """Asked without the secret: a llumlet refuses that, and a server without one does not know the route."""
        with _mapped(url):
            return (await self._get(url, "/llumlet/status", self._stock_lines)).status != 404

    async def metrics(self, url: str, timeout_s: float) -> str:
        with _mapped(url):
            async with asyncio.timeout(timeout_s), self._stock.stream("GET", f"{url}/metrics") as response:
                if response.is_error:
                    await response.aread()
                _check(response)
                page = bytearray()
                async for part in response.aiter_bytes():
                    page += part
                    if len(page) > METRICS_BYTES_MAX:
                        raise ValueError(f"metrics of more than {METRICS_BYTES_MAX} bytes")
                return page.decode("utf-8", "replace")

    async def is_sleeping(self, url: str) -> bool | None:
        """``None``: vLLM has that route in its development mode alone."""
        with _mapped(url):
            answer = await self._get(url, "/is_sleeping", self._stock_lines)
            return None if answer.status == 404 else answer.value()["is_sleeping"] is True

    async def health(self, url: str, timeout_s: float | None = None) -> None:
        with _mapped(url):
            (await self._get(url, "/health", self._stock_lines, timeout_s)).check()

    async def drain(self, url: str, draining: bool) -> None:
        with _mapped(url):
            _check(await self._http.post(f"{url}/llumlet/drain", json=wire.Drain(draining).to_json()))

    async def status(self, url: str) -> wire.Status:
        with _mapped(url):
            answer = await self._get(url, "/llumlet/status", self._llumlet_lines)
            answer.check()
            return read_status(answer.body)

    async def model_cards(self, url: str) -> list[dict[str, Any]]:
        with _mapped(url):
            cards = (await self._get(url, "/v1/models", self._stock_lines)).value()["data"]
            return [card for card in cards if isinstance(card, dict) and _is_name(card.get("id")) and _is_json(card)]

    async def reports(self, url: str, take: Callable[[wire.Report], None]) -> None:
        """Calls ``take`` with each. Returns when the instance ends it; raises when the connection is cut."""
        with _mapped(url):
            async with asyncio.timeout(self._timeout_s):
                response = await self._pool(url).request("GET", "/llumlet/reports", self._llumlet_lines, b"")
            try:
                if not 200 <= response.status < 300:
                    async with asyncio.timeout(self._timeout_s):
                        Answer(response.status, await _whole(response)).check()
                await _follow(response, take)
            finally:
                response.close()

    async def _get(self, url: str, target: str, headers: Headers, timeout_s: float | None = None) -> Answer:
        return await self._ask(url, "GET", target, headers, timeout_s)

    async def _ask(
        self, url: str, method: str, target: str, headers: Headers, timeout_s: float | None = None, body: bytes = b""
    ) -> Answer:
        async with asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s):
            response = await self._pool(url).request(method, target, headers, body)
            try:
                return Answer(response.status, await _whole(response))
            finally:
                response.close()

    def _pool(self, url: str) -> Pool:
        if url not in self._pools:
            self._pools[url] = Pool(url, CONNECTIONS_MAX, self._timeout_s * CONNECT_SHARE, KEEP_ALIVE_S)
        return self._pools[url]

    async def pair(self, url: str, pairing: wire.Pairing) -> None:
        with _mapped(url):
            body = json.dumps(pairing.to_json()).encode()
            lines = (*self._llumlet_lines, ("content-type", "application/json"))
            (await self._ask(url, "PUT", "/llumlet/pairing", lines, body=body)).check()

    async def unpair(self, url: str, fence: int) -> None:
        with _mapped(url):
            target = f"/llumlet/pairing?{wire.FENCE_PARAMETER}={fence}"
            (await self._ask(url, "DELETE", target, self._llumlet_lines)).check()

    async def migrate(self, url: str, order: wire.MigrateOrder) -> wire.MigrationResult:
        """Waits for the end of the migration."""
        with _mapped(url):
            response = await self._http.post(
                f"{url}/llumlet/migrate", json=order.to_json(), timeout=httpx.Timeout(MIGRATE_TIMEOUT_S)
            )
            return wire.MigrationResult.from_json(_check(response).json())


def _client(headers: dict[str, str], timeout_s: float, *, keep_alive_s: float) -> httpx.AsyncClient:
    limits = httpx.Limits(max_keepalive_connections=None if keep_alive_s else 0, keepalive_expiry=keep_alive_s)
    timeout = httpx.Timeout(timeout_s)
    return httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, verify=_tls(), trust_env=False)


@functools.cache
def _tls() -> ssl.SSLContext:
    """One for all: reading the authorities' certificates takes tens of milliseconds."""
    return httpx.create_ssl_context(trust_env=False)


@contextlib.contextmanager
def _mapped(url: str) -> Iterator[None]:
    try:
        yield
    except (ConnectTimeout, ConnectFailed) as error:
        raise LlumletUnreachable(f"{url}: {error or type(error).__name__}") from error
    except ConnectionEnded as error:
        raise LlumletTimeout(f"{url}: no answer: {error}") from error
    except (TimeoutError, httpx.ReadTimeout, httpx.ReadError, httpx.RemoteProtocolError) as error:
        raise LlumletTimeout(f"{url}: no answer: {error or type(error).__name__}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise LlumletUnreachable(f"{url}: {error or type(error).__name__}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # Not JSON, or not of the agreed shape.
        raise LlumletUnreachable(f"{url}: unexpected answer: {str(error)[:WORDS_MAX]}") from error


def _check(response: httpx.Response) -> httpx.Response:
    if response.is_success:
        return response
    raise _refused(response.status_code, response.content)


def _refused(status: int, body: bytes) -> LlumletRefused:
    message, code = f"HTTP {status}", None
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        error = json.loads(body)["error"]
        message, code = str(error["message"])[:WORDS_MAX], error.get("code")
    return LlumletRefused(status, message, code if isinstance(code, int | str) else None)


async def _whole(response: Response) -> bytes:
    body = bytearray()
    while part := await response.readany():
        body += part
        if len(body) > METRICS_BYTES_MAX:
            raise ValueError(f"an answer of more than {METRICS_BYTES_MAX} bytes")
    return bytes(body)


async def _follow(response: Response, take: Callable[[wire.Report], None]) -> None:
    """No task wakes for a report that comes alone: it is taken where it is received."""
    now = asyncio.get_running_loop().time
    lines, heard_at = ReportLines(take), now()

    def sink(data: bytes) -> bool:
        nonlocal heard_at
        heard_at = now()
        return lines.feed_at_once(data)

    while True:
        try:
            async with asyncio.timeout_at(heard_at + REPORT_GAP_S):
                await response.wait(sink)
        except TimeoutError:
            if now() >= heard_at + REPORT_GAP_S:
                raise
            continue
        if not (data := response.take()):
            return
        lines.feed(data)
        heard_at = now()


def _is_json(card: dict[str, Any]) -> bool:
    """Python reads ``NaN`` and ``1e999``, which clients' parsers do not."""
    try:
        json.dumps(card, allow_nan=False)
    except ValueError:
        return False
    return True


def _is_name(value: Any) -> bool:
    """Half a surrogate pair can be written in JSON, but no client can ask for it, and no page can show it."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)
