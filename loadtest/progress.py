"""Says what is going on while something takes long: one line rewritten on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

PLAIN_INTERVAL_S = 15.0


class Step:
    """One thing that takes a while."""

    def __init__(self, what: str, output: TextIO):
        self.what = what
        self._output = output
        self._on_terminal = output.isatty()
        self._started_s = time.monotonic()
        self._printed_s = self._started_s
        self._say(f"==> {what}")

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def update(self, detail: str) -> None:
        line = f"    {self.elapsed_s:4.0f} s  {detail}"
        if self._on_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._output.write(f"\r\x1b[K{line[:width]}")
            self._output.flush()
        elif time.monotonic() - self._printed_s >= PLAIN_INTERVAL_S:
            self._printed_s = time.monotonic()
            self._say(line)

    def finish(self, word: str) -> None:
        if self._on_terminal:
            self._output.write("\r\x1b[K")
        self._say(f"    {word} after {self.elapsed_s:.0f} s")

    def _say(self, line: str) -> None:
        self._output.write(f"{line}\n")
        self._output.flush()


class Progress:
    def __init__(self, output: TextIO | None = None):
        self._output = output

    @contextmanager
    def step(self, what: str) -> Iterator[Step]:
        # Looked up late: pytest replaces sys.stderr for each test.
        step = Step(what, self._output or sys.stderr)
        try:
            yield step
        except BaseException:
            step.finish("stopped")
            raise
        step.finish("done")
