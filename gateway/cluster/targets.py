"""Where instances may be: the addresses that are listed, those that names stand for, and what operators have ordered.

Each address is followed by loops of its own (reports, pulse, load) for as long as it is wanted; discovery probes all of
them. One that is wanted no more gets no new requests, is left by what can move, and is forgotten once nothing of this
gateway runs there.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from gateway.cluster.keys import TARGETS_MAX
from gateway.cluster.members import Members
from gateway.telemetry import Changes, cancel_all

DNS_SCHEME = "dns"
RESOLVE_S = 1.0
"""Between two looks at a name."""
URL_LENGTH_MAX = 512
ADDRESSES_MAX = 1_024
"""Of one name."""
ORDERS_MAX = 2 * TARGETS_MAX
"""Redis holds no more than half as many; what this gateway knew before it lost them may come to it."""
ADDED, REMOVED = "added", "removed"
"""An operator's order about an address; the latter with its time."""

_LIKE = "must be like http://host:port"
_NAME = re.compile(r"[a-z0-9_]([a-z0-9._-]*[a-z0-9_])?\.?")
_PATH = re.compile(r"(/(?!\.{1,2}(/|$))([A-Za-z0-9._~-]|%[0-9A-Fa-f]{2})+)*")

Loops = Callable[[str], Sequence[Coroutine[Any, Any, None]]]
Resolve = Callable[[str, int], Coroutine[Any, Any, Sequence[str]]]


def read_url(url: str) -> str:
    """An instance's base URL, always written in the same way. Raises ``ValueError`` with what is wrong."""
    parts = urlsplit(url.strip(" "))
    path = parts.path.rstrip("/")
    is_whole = parts.scheme in ("http", "https") and not set("?#@") & set(url) and len(url) <= URL_LENGTH_MAX
    if not is_whole or not url.isprintable() or not _PATH.fullmatch(path):
        raise ValueError(_LIKE)
    if parts.port == 0:  # One that is none raises by itself.
        raise ValueError("has port 0")
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{_host(parts.hostname or '', is_address='[' in parts.netloc)}{port}{path}"


def _host(name: str, *, is_address: bool) -> str:
    """As a URL has it. ``is_address``: of IPv6, since it stood in brackets."""
    try:
        if is_address:
            return f"[{ipaddress.IPv6Address(name)}]"
        ascii_name = name.encode("idna").decode().lower()
    except ValueError:  # No address of IPv6; or a label that is empty or too long.
        raise ValueError(_LIKE) from None
    if not _NAME.fullmatch(ascii_name):
        raise ValueError(_LIKE)
    return ascii_name


def read_name(url: str) -> str:
    """``dns://name:port``: every address that the name stands for. Raises ``ValueError``."""
    parts = urlsplit(url)
    if parts.scheme != DNS_SCHEME or not parts.hostname or not parts.port or parts.path or parts.query:
        raise ValueError("must be like dns://name:port")
    return url


def _is_order(url: str, order: str) -> bool:
    try:
        return read_url(url) == url and (order == ADDED or order.startswith(REMOVED))
    except ValueError:
        return False


class _Name:
    """One DNS name. At most one question about it is under way: it cannot be called off, and may take its time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.url, self.host, self.port = url, parts.hostname, parts.port
        self.addresses: tuple[str, ...] = ()
        """Those that it stands for, and those that it stood for and that still answer."""
        self.asked_at: float | None = None
        self.asking: asyncio.Task[Sequence[str]] | None = None


class Targets:
    def __init__(
        self,
        listed: Sequence[str],
        members: Members,
        loops: Loops,
        in_flight: Callable[[str], int],
        resolve: Resolve,
    ) -> None:
        """``listed``: URLs, some of which may be ``dns://name:port``. ``in_flight``: by instance id."""
        self._listed = tuple(url for url in listed if urlsplit(url).scheme != DNS_SCHEME)
        self._names = [_Name(url) for url in listed if urlsplit(url).scheme == DNS_SCHEME]
        self._members = members
        self._loops = loops
        self._in_flight = in_flight
        self._resolve = resolve
        self._orders: Mapping[str, str] = {}
        self._followed: dict[str, list[asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._changes = Changes()

    @property
    def orders(self) -> Mapping[str, str]:
        """Operators', by URL, as Redis had them last."""
        return self._orders

    def urls(self) -> tuple[str, ...]:
        """Those to be probed: wanted ones, and those that are being left."""
        return tuple(dict.fromkeys((*self._wanted(), *self._followed)))

    def awaits_some(self) -> bool:
        """Whether one of those that are wanted has never said what it serves, or a name has never had an address."""
        return any(not name.addresses for name in self._names) or any(
            not self._members.has_answered(url) for url in self._wanted()
        )

    def source(self, url: str) -> str:
        """Where it is known from: ``listed``, ``added``, ``removed`` or its DNS name."""
        order = self._orders.get(url)
        if order is not None:
            return ADDED if order == ADDED else "removed"
        named = [name.url for name in self._names if url in name.addresses]
        return named[0] if named and url not in self._listed else "listed"

    def follow(self, orders: Mapping[str, str]) -> None:
        """What operators have ordered, the whole of it. What no gateway would have taken as an order is none."""
        readable = [(url, order) for url, order in orders.items() if _is_order(url, order)][:ORDERS_MAX]
        if len(readable) < len(orders):
            others = str(len(orders) - len(readable))
            self._changes("orders", "some are none", reason=f"{others} in Redis", level=logging.WARNING)
        orders = dict(readable)
        if orders != self._orders:
            self._orders = dict(orders)
            self.look()

    def ordered(self, url: str, order: str) -> None:
        """One order that Redis has just taken."""
        self.follow({**self._orders, url: order})

    async def resolve_names(self) -> None:
        """A round of the loop: asks for the names whose time has come, and takes what has been answered meanwhile."""
        now = time.monotonic()
        for name in self._names:
            if name.asking is None and (name.asked_at is None or now - name.asked_at >= RESOLVE_S):
                name.asked_at = now
                name.asking = asyncio.create_task(self._resolve(name.host, name.port))
        asking = {name.asking for name in self._names if name.asking is not None}
        if asking:
            await asyncio.wait(asking, timeout=RESOLVE_S)
        for name in self._names:
            if name.asking is not None and name.asking.done():
                self._take(name, name.asking)
                name.asking = None
        self.look()

    def look(self) -> None:
        """Begins to follow what is new, and leaves what is wanted no more."""
        wanted = set(self._wanted())
        for url in wanted - self._followed.keys():
            self._followed[url] = [asyncio.create_task(loop) for loop in self._loops(url)]
        for url in self._followed:
            self._members.leave(url, leaving=url not in wanted)
        for url in [url for url in self._followed if url not in wanted and not self._is_in_use(url)]:
            for task in self._followed.pop(url):
                task.cancel()
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
            self._members.forget(url)

    async def stop(self) -> None:
        tasks = [task for tasks in self._followed.values() for task in tasks]
        asking = [name.asking for name in self._names if name.asking is not None]
        self._followed.clear()
        for question in asking:
            question.cancel()
        await cancel_all([*tasks, *self._ending])

    def _wanted(self) -> list[str]:
        added = [url for url, order in self._orders.items() if order == ADDED]
        named = [url for name in self._names for url in name.addresses]
        return [url for url in (*self._listed, *named, *added) if self._orders.get(url, ADDED) == ADDED]

    def _is_in_use(self, url: str) -> bool:
        return any(self._in_flight(instance_id) > 0 for instance_id in self._members.ids_at(url))

    def _take(self, name: _Name, answered: asyncio.Task[Sequence[str]]) -> None:
        """A name that nobody can tell anything of changes nothing."""
        try:
            fresh = answered.result()
        except (OSError, ValueError) as error:
            self._changes("dns", "unknown", target=name.url, reason=str(error), level=logging.WARNING)
            return
        fresh = fresh[:ADDRESSES_MAX]
        staying = [url for url in name.addresses if url not in fresh and self._answers(url)]
        name.addresses = (*fresh, *staying[: ADDRESSES_MAX - len(fresh)])
        self._changes("dns", " ".join(fresh) or "no address", target=name.url)

    def _answers(self, url: str) -> bool:
        """Resolvers tell some of the addresses at a time, or none for a moment: who answers is there."""
        return self._members.is_heard(url, time.monotonic())
