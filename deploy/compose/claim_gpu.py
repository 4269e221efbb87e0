"""Take a GPU that no other container has, and become the command that is to run on it.

python3 claim_gpu.py COMMAND [ARGUMENT...]

Replicas of a service are all told the same, and each sees all GPUs. A GPU is taken by a lock on a file in a volume that
they share; the kernel gives it back when the process that has become the command ends, in whatever way.
Standard library only: it runs in vLLM's own image.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

LOCKS = Path("/run/kvferry")


def main(command: Sequence[str], locks: Path = LOCKS) -> int:
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    gpus = visible_gpus()
    taken = claim(gpus, locks)
    if taken is None:
        print(f"all {len(gpus)} GPUs of this host are taken: scale the service down to that", file=sys.stderr)
        return 1
    print(f"this server has GPU {taken}", flush=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = taken
    return become(command)


def become(command: Sequence[str]) -> NoReturn:
    os.execvp(command[0], list(command))  # noqa: S606


def visible_gpus() -> list[str]:
    """UUIDs, which mean the same in every container."""
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],  # noqa: S607
        check=True,
        capture_output=True,
        text=True,
    )
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()]


def claim(gpus: Sequence[str], locks: Path) -> str | None:
    """The first that is free; its lock stays open, across an exec too."""
    for gpu in gpus:
        file = os.open(locks / f"{gpu}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        os.set_inheritable(file, True)
        return gpu
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
