"""Many instances in one process: a socket each, one HTTP server, one application."""

from __future__ import annotations

import asyncio
import functools
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import uvicorn

from loadtest.fake_vllm.application import Application, Site
from loadtest.fake_vllm.faults import Faults
from loadtest.fake_vllm.instance import Instance
from loadtest.fake_vllm.llumlet import Llumlet
from loadtest.sim.engine import Engine, EngineSettings
from loadtest.sim.profile import FAST, Profile
from loadtest.sim.reports import Identity
from vllm_plugin.settings import REPORT_INTERVAL_S

LISTEN_BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class Options:
    """What all instances of a process have in common."""

    models: tuple[str, ...] = ("fake",)
    secret: str = ""
    engine: EngineSettings = field(default_factory=EngineSettings)
    profile: Profile = FAST
    has_plugin: bool = True
    faults: dict[str, Any] = field(default_factory=dict)
    instance_ids: str = ""
    """Beginning of the instances' ids, before a number; empty: address and port, as vLLM's plugin does."""
    instance_id: str | None = None
    """Of the only one."""
    advertise_host: str | None = None
    """Under which the others reach these; ``None``: where they listen."""


class FakeServers:
    """``async with FakeServers(Options(), ports=[8101, 8102]) as fakes``; a port of 0 is any free one."""

    def __init__(
        self,
        options: Options,
        ports: Sequence[int],
        host: str = "127.0.0.1",
        die: Callable[[], None] | None = None,
    ) -> None:
        """``die``: what the fault of that name does; ``None``: the instance's port and connections close."""
        self._options = options
        self._ports = ports
        self._host = host
        self._die = die
        self.sites: list[Site] = []
        self.urls: list[str] = []
        self._sockets: list[socket.socket] = []
        self._tasks: dict[int, list[asyncio.Task[None]]] = {}

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(trust_env=False, connector=aiohttp.TCPConnector(limit=0))
        try:
            self._listen()
            by_port = dict(zip(self._bound_ports(), self.sites, strict=True))
            self._server = _server(Application(by_port))
            await self._server.startup(sockets=self._sockets)
        except BaseException:
            await self._http.close()
            for one in self._sockets:
                one.close()
            raise
        self._ticking = asyncio.create_task(self._server.main_loop())
        for index, (port, site) in enumerate(by_port.items()):
            delay_s = REPORT_INTERVAL_S * index / len(by_port)
            loops = (site.instance.run(), site.llumlet.run(delay_s) if site.has_plugin else _nothing())
            self._tasks[port] = [asyncio.create_task(loop) for loop in loops]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        for site in self.sites:
            await site.llumlet.close()
        for port in self._bound_ports():
            self._stop(port)
        self._ticking.cancel()
        for task in self._server.server_state.tasks:
            task.cancel()
        ending = [
            self._ticking,
            *self._server.server_state.tasks,
            *(task for some in self._tasks.values() for task in some),
        ]
        await asyncio.gather(*ending, return_exceptions=True)
        await self._http.close()
        for one in self._sockets:
            one.close()

    async def empty(self, timeout_s: float) -> None:
        """Take nothing new, and give gateways the time to move what is here."""
        await asyncio.gather(*(site.llumlet.empty(timeout_s) for site in self.sites))

    async def wait(self) -> None:
        """Until one of the instances' loops ends, which is a bug."""
        tasks = [task for some in self._tasks.values() for task in some]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if not task.cancelled():
                task.result()

    def _listen(self) -> None:
        options = self._options
        caching = options.engine.prefix_caching
        kv = f"fake-{options.models[0]}-{options.engine.block_size}-{options.profile.kv_bytes_per_token}"
        for number, wanted in enumerate(self._ports):
            bound = socket.create_server((self._host, wanted), backlog=LISTEN_BACKLOG)
            self._sockets.append(bound)
            port = bound.getsockname()[1]
            self.urls.append(f"http://{self._host}:{port}")
            identity = Identity(
                instance_id=self._instance_id(number, port),
                boot_id=secrets.token_hex(8),
                models=options.models,
                kv_format=kv if caching else None,
                kv_reason=None if caching else "prefix caching is off",
            )
            faults = Faults()
            faults.set(options.faults)
            die = self._die or functools.partial(self._stop, port)
            instance = Instance(Engine(options.engine, options.profile), faults, die)
            llumlet = Llumlet(
                instance, identity, options.secret, self._http, (options.advertise_host or self._host, port)
            )
            self.sites.append(Site(instance, llumlet, options.has_plugin))

    def _instance_id(self, number: int, port: int) -> str:
        if self._options.instance_id is not None and len(self._ports) == 1:
            return self._options.instance_id
        return f"{self._options.instance_ids}{number}" if self._options.instance_ids else f"{self._host}:{port}"

    def _bound_ports(self) -> list[int]:
        return [int(url.rpartition(":")[2]) for url in self.urls]

    def _stop(self, port: int) -> None:
        """From now on nobody is there: as when the process has been killed."""
        index = self._bound_ports().index(port)
        self._server.servers[index].close()
        for connection in list(self._server.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None and (transport.get_extra_info("sockname") or ("", 0))[1] == port:
                transport.abort()
        self.sites[index].llumlet.kill()
        for task in self._tasks.get(port, []):
            task.cancel()


def _server(application: Any) -> uvicorn.Server:
    config = uvicorn.Config(
        application, http="httptools", lifespan="off", log_level="critical", access_log=False, backlog=LISTEN_BACKLOG
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    return server


async def _nothing() -> None:
    return
