"""The ``kvferry`` command."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence

import uvicorn

from gateway.app import Gateway
from gateway.client_connection import client_connection
from gateway.config import Settings, add_flags, read_settings
from gateway.errors import ConfigError
from gateway.keys_file import add_keys_command, make_key
from gateway.shutdown import GracefulServer
from gateway.telemetry import configure_logging
from gateway.version import installed_version
from gateway.workers import Place, given_place, run_workers

GARBAGE_OBJECTS = 10_000
"""New ones between two looks of the garbage collector; Python's own 700 are a few requests."""
ENDING_S = 10
"""A worker is killed that takes so much longer to end than the last words to its clients may."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    flags = parser.parse_args(arguments)
    if flags.command is None:
        parser.print_help()
        return 2
    try:
        if flags.command == "keys":
            return make_key(flags)
        settings = read_settings(flags, os.environ)
        configure_logging(settings.log_level, settings.log_format)
        place = given_place()
        if settings.workers > 1 and place is None:
            given = sys.argv[1:] if arguments is None else arguments
            end_s = settings.shutdown.ends_s + ENDING_S
            return run_workers(settings.host, settings.port, settings.workers, given, end_s)
        gateway = Gateway(settings, seat=place.seat if place is not None else None)
    except ConfigError as error:
        print(f"kvferry: {error.message}", file=sys.stderr)
        return 2
    return _serve(gateway, settings, place)


def _serve(gateway: Gateway, settings: Settings, place: Place | None) -> int:
    """``place``: with a socket that is bound already."""
    server = GracefulServer(server_config(gateway, settings.host, settings.port), gateway, settings.shutdown)
    _spare_the_collector()
    server.run(sockets=None if place is None else [place.listening])
    return 0 if server.started else 1


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferry", description="A gateway that moves running requests between vLLM servers."
    )
    parser.add_argument("--version", action="version", version=f"kvferry {installed_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add_flags(commands.add_parser("serve", help="start the gateway"))
    add_keys_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
