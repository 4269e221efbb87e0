"""``kvferry COMMAND``. A command's module is imported when it is asked for: most need neither the server nor Redis."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from gateway.cli.arguments import Parser
from gateway.cli.exits import CommandFailed, Exit
from gateway.errors import ConfigError

COMMANDS = {
    "serve": "start the gateway",
    "status": "show gateways, leader and instances with their load",
    "instances": "list the instances, add or remove one, or take one back that drains",
    "requests": "list the requests, show or cancel one",
    "migrate": "move a running request to another instance",
    "drain": "empty an instance by moving its requests away",
    "keys": "make API keys for the keys file",
    "profile": "measure how long an instance's steps take, for the simulator",
    "simulate": "run a workload on simulated instances under a policy",
}
"""Each in the module of its name in this package."""
DEFAULT_ACTIONS = {"instances": "list", "requests": "list"}


class Command(Protocol):
    def add_arguments(self, parser: Parser) -> None: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status. Whatever goes wrong is one sentence on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # Some terminals cannot show every name.
    try:
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except ConfigError as error:
        return _fail(Exit.USAGE, error.message)
    except CommandFailed as error:
        return _fail(error.status, error.message)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has had enough. Python would complain once more when it closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.PIPE_CLOSED
    return status


def _run(arguments: list[str]) -> int:
    parser = parser_for(arguments)
    flags = parser.parse_args(with_default_action(arguments))
    if flags.version:
        from gateway.version import installed_version

        print(f"kvferry {installed_version()}")
        return Exit.OK
    if flags.command is None:
        parser.print_help()
        return Exit.USAGE
    flags.arguments = arguments
    status: int = flags.run(flags)
    return status


def parser_for(arguments: Sequence[str]) -> Parser:
    """With the flags of the one command that these arguments name."""
    parser = Parser(prog="kvferry", description="A gateway that moves running requests between vLLM servers.")
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    named = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, meaning in COMMANDS.items():
        command = commands.add_parser(name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}.")
        if name == named:
            cast(Command, importlib.import_module(f"gateway.cli.{name}")).add_arguments(command)
    parser.epilog = "kvferry COMMAND --help says more. Exit status: 0 done, 1 refused or failed, 2 wrong arguments or\n"
    parser.epilog += "settings, 3 gateway not reachable, 4 admin key missing or wrong, 130 Ctrl-C."
    return parser


def with_default_action(arguments: list[str]) -> list[str]:
    """``kvferry requests`` lists; so does ``kvferry requests --json``."""
    if not arguments or arguments[0] not in DEFAULT_ACTIONS or {"-h", "--help"} & set(arguments[1:2]):
        return arguments
    if len(arguments) > 1 and not arguments[1].startswith("-"):
        return arguments
    return [arguments[0], DEFAULT_ACTIONS[arguments[0]], *arguments[1:]]


def _fail(status: Exit, message: str) -> Exit:
    print(f"kvferry: {message}", file=sys.stderr)
    return status
