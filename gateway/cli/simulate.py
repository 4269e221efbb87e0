"""``kvferry simulate``: the simulator, which is no part of the gateway and comes with it."""

from __future__ import annotations

import argparse
import importlib

from gateway.cli.exits import CommandFailed, Exit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Found by its name when it is asked for: the gateway imports nothing that stands beside it."""
    try:
        simulator = importlib.import_module("loadtest.simulate")
    except ModuleNotFoundError as error:
        if error.name not in ("loadtest", "loadtest.simulate"):
            raise
        raise CommandFailed(
            Exit.FAILED, "The simulator is not installed here: it comes with kvferry's source."
        ) from None
    simulator.add_arguments(parser)
