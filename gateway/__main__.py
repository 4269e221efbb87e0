"""The ``kvferry`` command."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import os
import socket
import sys
from collections.abc import Sequence

import uvicorn

from gateway.app import Gateway
from gateway.config import Settings, add_flags, read_settings
from gateway.errors import ConfigError
from gateway.telemetry import configure_logging
from gateway.workers import given_socket, run_workers

GRACE_S = 30
"""Streams under way when the gateway is told to stop have this long to end."""
GARBAGE_OBJECTS = 10_000
"""New ones between two looks of the garbage collector; Python's own 700 are a few requests."""
ENDING_S = 10
"""And this long what comes after them."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    flags = parser.parse_args(arguments)
    if flags.command is None:
        parser.print_help()
        return 2
    try:
        settings = read_settings(flags, os.environ)
    except ConfigError as error:
        print(f"kvferry: {error.message}", file=sys.stderr)
        return 2
    configure_logging(settings.log_level)
    own = given_socket()
    if settings.workers > 1 and own is None:
        given = sys.argv[1:] if arguments is None else arguments
        return run_workers(settings.host, settings.port, settings.workers, given, GRACE_S + ENDING_S)
    return _serve(settings, own)


def _serve(settings: Settings, own: socket.socket | None) -> int:
    """``own``: a socket that is bound already."""
    server = uvicorn.Server(server_config(Gateway(settings), settings.host, settings.port))
    _spare_the_collector()
    server.run(sockets=None if own is None else [own])
    return 0 if server.started else 1


def _spare_the_collector() -> None:
    """What is there now stays for ever: to look at all of it again and again took a tenth of a busy gateway's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS)


def server_config(gateway: Gateway, host: str, port: int) -> uvicorn.Config:
    return uvicorn.Config(
        gateway,
        host=host,
        port=port,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferry", description="A gateway that moves running requests between vLLM servers."
    )
    parser.add_argument("--version", action="version", version=f"kvferry {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add_flags(commands.add_parser("serve", help="start the gateway"))
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("kvferry")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


if __name__ == "__main__":
    sys.exit(main())
