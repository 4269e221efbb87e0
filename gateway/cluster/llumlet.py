"""A client of the llumlet routes for everything off the request path. httpx's exceptions end here."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

from gateway import wire
from gateway.errors import LlumletRefused, LlumletTimeout, LlumletUnreachable

MIGRATE_TIMEOUT_S = 60.0
METRICS_BYTES_MAX = 8 * 1024 * 1024
KEEP_ALIVE_S = 3.0
"""Less than uvicorn's five seconds, so that no request meets a connection that the instance is just closing."""
REPORT_GAP_S = 15.0
"""Reports come ten times a second, save during a long engine step: after this time the connection is dead."""


class LlumletClient:
    def __init__(self, secret: str, upstream_api_key: str, timeout_s: float) -> None:
        """The secret goes on the llumlet's routes alone: an instance without the plugin is not told it."""
        headers = {"authorization": f"Bearer {upstream_api_key}"} if upstream_api_key else {}
        self._stock = _client(headers, timeout_s)
        self._http = _client(headers | {wire.SECRET_HEADER: secret}, timeout_s)

    async def close(self) -> None:
        await self._http.aclose()
        await self._stock.aclose()

    async def has_plugin(self, url: str) -> bool:
        """Asked without the secret: a llumlet refuses that, and a server without one does not know the route."""
        with _mapped(url):
            return (await self._stock.get(f"{url}/llumlet/status")).status_code != 404

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
            response = await self._stock.get(f"{url}/is_sleeping")
            if response.status_code == 404:
                return None
            return _check(response).json()["is_sleeping"] is True

    async def health(self, url: str, timeout_s: float | None = None) -> None:
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else httpx.Timeout(timeout_s)
        with _mapped(url):
            _check(await self._stock.get(f"{url}/health", timeout=timeout))

    async def drain(self, url: str, draining: bool) -> None:
        with _mapped(url):
            _check(await self._http.post(f"{url}/llumlet/drain", json=wire.Drain(draining).to_json()))

    async def status(self, url: str) -> wire.Status:
        with _mapped(url):
            response = _check(await self._http.get(f"{url}/llumlet/status"))
            return wire.Status.from_json(response.json())

    async def model_cards(self, url: str) -> list[dict[str, Any]]:
        with _mapped(url):
            response = _check(await self._stock.get(f"{url}/v1/models"))
            cards = response.json()["data"]
            return [card for card in cards if isinstance(card, dict) and _is_name(card.get("id"))]

    async def reports(self, url: str) -> AsyncIterator[wire.Report]:
        """Ends when the instance ends it; raises when the connection is cut."""
        with _mapped(url):
            timeout = httpx.Timeout(REPORT_GAP_S)
            async with self._http.stream("GET", f"{url}/llumlet/reports", timeout=timeout) as response:
                if response.is_error:
                    await response.aread()
                _check(response)
                async for line in response.aiter_lines():
                    if line.strip():
                        yield wire.Report.from_json(json.loads(line))

    async def pair(self, url: str, pairing: wire.Pairing) -> None:
        with _mapped(url):
            _check(await self._http.put(f"{url}/llumlet/pairing", json=pairing.to_json()))

    async def unpair(self, url: str, fence: int) -> None:
        with _mapped(url):
            _check(await self._http.delete(f"{url}/llumlet/pairing", params={wire.FENCE_PARAMETER: fence}))

    async def migrate(self, url: str, order: wire.MigrateOrder) -> wire.MigrationResult:
        """Waits for the end of the migration."""
        with _mapped(url):
            response = await self._http.post(
                f"{url}/llumlet/migrate", json=order.to_json(), timeout=httpx.Timeout(MIGRATE_TIMEOUT_S)
            )
            return wire.MigrationResult.from_json(_check(response).json())


def _client(headers: dict[str, str], timeout_s: float) -> httpx.AsyncClient:
    limits = httpx.Limits(keepalive_expiry=KEEP_ALIVE_S)
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
    except (TimeoutError, httpx.ReadTimeout, httpx.ReadError, httpx.RemoteProtocolError) as error:
        raise LlumletTimeout(f"{url}: no answer: {error or type(error).__name__}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise LlumletUnreachable(f"{url}: {error or type(error).__name__}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # Not JSON, or not of the agreed shape.
        raise LlumletUnreachable(f"{url}: unexpected answer: {error}") from error


def _check(response: httpx.Response) -> httpx.Response:
    if response.is_success:
        return response
    message, code = f"HTTP {response.status_code}", None
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        error = response.json()["error"]
        message, code = str(error["message"]), error.get("code")
    raise LlumletRefused(response.status_code, message, code)


def _is_name(value: Any) -> bool:
    """Half a surrogate pair can be written in JSON, but no client can ask for it, and no page can show it."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)
