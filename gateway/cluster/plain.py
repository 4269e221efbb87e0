"""Instances without the plugin: their load as vLLM's own ``/metrics`` tells it, and which life of the server it is."""

from __future__ import annotations

import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from gateway.cluster.llumlet import LlumletClient
from gateway.cluster.members import Members, PlainLoad
from gateway.errors import LlumletRefused, LlumletUnreachable
from gateway.wire import NUMBER_MAX

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""The second is its name in older versions."""
_CACHE_INFO = "vllm:cache_config_info"
_TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
_STARTED = "process_start_time_seconds"
_NAMES = (_RUNNING, _WAITING, *_KV_USAGE, _CACHE_INFO, *_TOKENS, _STARTED)

_ASSUMED_BLOCKS = 1024
_ASSUMED_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at ``/metrics``. Each part is ``None`` where the page does not tell it, which is not the same as 0."""

    load: PlainLoad | None
    started: str | None
    """When the process was started: a server that restarts is another instance."""


def read_metrics(page: str) -> Reading:
    """Of several engines' samples, requests and tokens are summed and the highest KV usage counts."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    lines = [line for line in page.splitlines() if line.startswith(_NAMES)]
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, KeyError, IndexError):  # Not what it seemed to be.
        return Reading(None, None)
    started = _values(samples, _STARTED)
    return Reading(_load(samples), repr(started[0]) if len(started) == 1 else None)


def _load(samples: dict[str, list[tuple[dict[str, str], float]]]) -> PlainLoad | None:
    running, waiting = _values(samples, _RUNNING), _values(samples, _WAITING)
    usage = [value for name in _KV_USAGE for value in _values(samples, name)]
    if not running or not waiting or not usage:
        return None
    blocks = [_whole(labels.get("num_gpu_blocks")) for labels, _ in samples.get(_CACHE_INFO, [])]
    sizes = [_whole(labels.get("block_size")) for labels, _ in samples.get(_CACHE_INFO, [])]
    tokens = [value for name in _TOKENS for value in _values(samples, name)]
    known = bool(blocks) and all(blocks) and all(sizes)
    return PlainLoad(
        requests_running=round(sum(running)),
        requests_waiting=round(sum(waiting)),
        kv_usage=min(max(usage), 1.0),
        blocks_total=sum(blocks) if known else _ASSUMED_BLOCKS,
        block_size=max(sizes) if known else _ASSUMED_BLOCK_SIZE,
        tokens=sum(tokens) if tokens else None,
    )


def _values(samples: dict[str, list[tuple[dict[str, str], float]]], name: str) -> list[float]:
    return [value for _, value in samples.get(name, []) if 0 <= value <= NUMBER_MAX]


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) <= 12 else 0


def plain_id(url: str) -> str:
    """A server without the plugin has no id of its own: the one that the plugin would give it by default."""
    parts = urlsplit(url)
    name = f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}{parts.path}"
    return "".join(char if char.isascii() and (char.isalnum() or char in "._:-") else "-" for char in name)[:128]


class Lives:
    """The boot ids of servers without the plugin, by URL. A time of start that is not known tells nothing."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str | None, str]] = {}
        self._count = 0

    def boot_id(self, url: str, started: str | None) -> str:
        known, boot_id = self._known.get(url, (None, ""))
        if not boot_id or (known is not None and started is not None and started != known):
            self._count += 1
            boot_id = started or f"unknown-{self._count}"
        self._known[url] = (started or known, boot_id)
        return boot_id

    def forget(self, url: str) -> None:
        """Another kind of server answers there now."""
        self._known.pop(url, None)


class LoadReader:
    """Follows one URL's metrics, in a loop of its own, while a server without the plugin answers there."""

    def __init__(self, url: str, members: Members, llumlets: LlumletClient, timeout_s: float) -> None:
        self._url = url
        self._members = members
        self._llumlets = llumlets
        self._timeout_s = timeout_s

    async def read(self) -> None:
        """What does not come, or cannot be read, lets the last values age out."""
        if self._members.has_plugin(self._url) is not False:
            return
        asked_at = time.monotonic()
        try:
            page = await self._llumlets.metrics(self._url, self._timeout_s)
        except (LlumletRefused, LlumletUnreachable):
            return
        load = read_metrics(page).load
        if load is not None:
            self._members.loaded(self._url, load, asked_at)
