"""A gateway on a port: uvicorn's server, as ``kvferry serve`` runs it."""

from __future__ import annotations

import contextlib
import gc
import socket

import uvicorn

from gateway.app import Gateway
from gateway.client_connection import client_connection
from gateway.shutdown import GracefulServer
from gateway.telemetry import log
from gateway.workers import Place, say_cannot_listen

GARBAGE_OBJECTS = 10_000
"""New ones between two looks of the garbage collector; Python's own 700 are a few requests."""


def run_server(gateway: Gateway, place: Place | None) -> bool:
    """Until a signal ends it: whether it came up. ``place``: with a socket that is bound already."""
    settings = gateway.settings
    try:
        sockets = listening(settings.host, settings.port) if place is None else [place.listening]
    except OSError as error:
        say_cannot_listen(settings.host, settings.port, error)
        return False
    server = GracefulServer(server_config(gateway, settings.host, settings.port), gateway, settings.shutdown)
    _spare_the_collector()
    log("listening", addresses=" ".join(_address(one) for one in sockets))
    server.run(sockets=sockets)
    return server.started


def listening(host: str, port: int) -> list[socket.socket]:
    """One socket for each address of ``host``, bound before anything else is begun, so that who cannot have the port
    has not been a gateway for a moment; nobody can connect yet. Raises :class:`OSError`."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as stack:
        sockets = []
        for family, _, _, _, address in dict.fromkeys(found):
            one = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
            sockets.append(one)
        stack.pop_all()
        return sockets


def _address(one: socket.socket) -> str:
    host, port = one.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _spare_the_collector() -> None:
    """What is there now stays for ever: to look at all of it again and again took a tenth of a busy gateway's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS)


def server_config(gateway: Gateway, host: str, port: int) -> uvicorn.Config:
    budgets = gateway.settings.budgets
    return uvicorn.Config(
        gateway,
        host=host,
        port=port,
        loop="uvloop",
        http=client_connection(budgets.client_stuck_s, budgets.head_s, gateway.counters),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
    )
