"""A gateway on a port: uvicorn's server, as ``kvferry serve`` runs it."""

from __future__ import annotations

import gc

import uvicorn

from gateway.app import Gateway
from gateway.client_connection import client_connection
from gateway.shutdown import GracefulServer
from gateway.workers import Place

GARBAGE_OBJECTS = 10_000
"""New ones between two looks of the garbage collector; Python's own 700 are a few requests."""


def run_server(gateway: Gateway, place: Place | None) -> bool:
    """Until a signal ends it: whether it came up. ``place``: with a socket that is bound already."""
    settings = gateway.settings
    server = GracefulServer(server_config(gateway, settings.host, settings.port), gateway, settings.shutdown)
    _spare_the_collector()
    server.run(sockets=None if place is None else [place.listening])
    return server.started


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
        server_header=False,
    )
