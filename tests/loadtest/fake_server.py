"""Stands for a vLLM server in tests of the stack: takes its arguments, opens its routes, and ignores SIGTERM."""

import argparse
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        has_plugin = not known.without_plugin
        self.send_response(200 if has_plugin and self.path == "/llumlet/status" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--fail", action="store_true")
parser.add_argument("--hang", action="store_true")
parser.add_argument("--without-plugin", action="store_true")
known, _ = parser.parse_known_args()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if known.fail:
    print("RuntimeError: out of memory", flush=True)
    sys.exit(1)
with HTTPServer(("127.0.0.1", known.port), Handler) as server:
    if known.hang:
        print("hanging", flush=True)
        signal.pause()
    server.serve_forever()
