"""``kvferry serve``: the gateway itself."""

from __future__ import annotations

import argparse
import os

from gateway.cli.arguments import runs
from gateway.cli.exits import Exit
from gateway.config import add_flags, read_values, settings_from, warn_of_unknown
from gateway.telemetry import configure_logging
from gateway.workers import given_place, run_workers

ENDING_S = 10
"""A worker is killed that takes so much longer to end than the last words to its clients may."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="print the settings, secrets hidden, and start nothing")
    add_flags(parser)
    runs(parser, run, "kvferry serve --config kvferry.toml --port 8080", "kvferry serve --config kvferry.toml --check")


def run(flags: argparse.Namespace) -> int:
    values = read_values(flags, os.environ)
    settings = settings_from(values)
    if flags.check:
        print(values.to_toml(), end="")
        return Exit.OK
    configure_logging(settings.log_level, settings.log_format)
    place = given_place()
    if place is None:  # Else the parent has said it.
        warn_of_unknown(os.environ)
    if settings.workers > 1 and place is None:
        end_s = settings.shutdown.ends_s + ENDING_S
        return run_workers(settings.host, settings.port, settings.workers, flags.arguments, end_s)
    from gateway.app import Gateway
    from gateway.server import run_server

    gateway = Gateway(settings, seat=place.seat if place is not None else None)
    return Exit.OK if run_server(gateway, place) else Exit.FAILED
