"""The port that a gateway listens on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from gateway.server import listening
from tests.test_config import GOOD


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_port_that_is_taken_is_said_in_one_line_before_anything_is_begun(workers: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "gateway", "serve", "--port", port, "--workers", workers]
        ran = subprocess.run(command, env=os.environ | GOOD, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr == f"kvferry: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_name_that_cannot_be_listened_on_leaves_no_socket_open() -> None:
    with pytest.raises(socket.gaierror):
        listening("no.such.name.invalid", 0)
    with pytest.raises(OSError, match="assign"):
        listening("192.0.2.1", 0)  # Of nobody (RFC 5737).


def test_every_address_of_a_host_is_listened_on() -> None:
    sockets = listening("localhost", 0)
    try:
        assert {one.getsockname()[0] for one in sockets} <= {"127.0.0.1", "::1"}
        assert sockets
    finally:
        for one in sockets:
            one.close()
