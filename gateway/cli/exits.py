"""Exit statuses, which scripts rely on: docs/cli.md lists them."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    """Refused by the gateway, or tried in vain."""
    USAGE = 2
    """Wrong arguments or settings; argparse has the same."""
    UNREACHABLE = 3
    NOT_ALLOWED = 4
    """The admin key is missing or wrong."""
    INTERRUPTED = 130
    """Ctrl-C: 128 and the signal's number."""
    PIPE_CLOSED = 141


class CommandFailed(Exception):
    """Ends the command with one sentence on stderr."""

    def __init__(self, status: Exit, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
