"""``kvferry profile``: measures an instance for the simulator, beside which it stands."""

from __future__ import annotations

import argparse

from gateway.cli.simulate import add_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_from("loadtest.profile", parser)
