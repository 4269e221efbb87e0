"""The ``kvferry`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import uvicorn

from gateway.app import Gateway
from gateway.config import Settings, add_flags, read_settings
from gateway.errors import ConfigError
from gateway.telemetry import configure_logging
from gateway.version import installed_version

GRACE_S = 30
"""Streams under way when the gateway is told to stop have this long to end."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    flags = parser.parse_args(arguments)
    if flags.command is None:
        parser.print_help()
        return 2
    try:
        settings = read_settings(flags, os.environ)
        configure_logging(settings.log_level, settings.log_format)
        gateway = Gateway(settings)
    except ConfigError as error:
        print(f"kvferry: {error.message}", file=sys.stderr)
        return 2
    return _serve(gateway, settings)


def _serve(gateway: Gateway, settings: Settings) -> int:
    server = uvicorn.Server(server_config(gateway, settings.host, settings.port))
    server.run()
    return 0 if server.started else 1


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
    parser.add_argument("--version", action="version", version=f"kvferry {installed_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add_flags(commands.add_parser("serve", help="start the gateway"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
