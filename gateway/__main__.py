"""The ``kvferry`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import uvicorn

from gateway.app import Gateway
from gateway.config import Settings, add_flags, read_settings
from gateway.connection import client_connection
from gateway.errors import ConfigError
from gateway.keys_file import add_keys_command, make_key
from gateway.shutdown import GracefulServer
from gateway.telemetry import configure_logging
from gateway.version import installed_version


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
        gateway = Gateway(settings)
    except ConfigError as error:
        print(f"kvferry: {error.message}", file=sys.stderr)
        return 2
    return _serve(gateway, settings)


def _serve(gateway: Gateway, settings: Settings) -> int:
    server = GracefulServer(server_config(gateway, settings.host, settings.port), gateway, settings.shutdown)
    server.run()
    return 0 if server.started else 1


def server_config(gateway: Gateway, host: str, port: int) -> uvicorn.Config:
    return uvicorn.Config(
        gateway,
        host=host,
        port=port,
        loop="uvloop",
        http=client_connection(gateway.settings.budgets.client_stuck_s, gateway.counters),
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
