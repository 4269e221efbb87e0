"""``kvferry simulate``: the simulator, which is no part of the gateway and comes with it."""

from __future__ import annotations

import argparse
import importlib

from gateway.cli.exits import CommandFailed, Exit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_from("loadtest.simulate", parser)


def add_from(module: str, parser: argparse.ArgumentParser) -> None:
    """Found by its name when it is asked for: the gateway imports nothing that stands beside it."""
    try:
        command = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in ("loadtest", module):
            raise
        raise CommandFailed(
            Exit.FAILED, "The simulator is not installed here: it comes with kvferry's source."
        ) from None
    command.add_arguments(parser)
