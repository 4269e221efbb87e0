"""Where and when a benchmark ran, for its result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any


def about_the_run(
    module: str, packages: tuple[str, ...] = ("kvferry", "uvicorn", "uvloop", "httptools")
) -> dict[str, Any]:
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["python", "-m", module, *sys.argv[1:]]),
        "machine": {
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "load_average_at_end": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
    }


def processor() -> str:
    if not Path("/proc/cpuinfo").exists():
        return platform.processor()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
