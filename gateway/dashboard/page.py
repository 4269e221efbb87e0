"""``/dashboard``: a page without any data. It asks for those with the admin key, as every operator does."""

from __future__ import annotations

from pathlib import Path

from gateway.errors import GatewayError, MethodNotAllowed, NotFound, WholeReply
from gateway.routes import Receive, Scope
from gateway.serving.reply import Reply, Send

PATH = "/dashboard"
DIRECTORY = Path(__file__).parent / "static"
CONTENT_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Nothing from elsewhere, nothing inline, no text that becomes markup, and no other page around this one.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = (
    ("content-security-policy", CONTENT_SECURITY_POLICY),
    ("cache-control", "no-cache"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
)


class Page:
    """The files are read once. Their links are relative, so that a proxy may put a prefix before all paths."""

    def __init__(self) -> None:
        files = sorted(DIRECTORY.iterdir())
        self._replies = {f"{PATH}/{file.name}": _reply(file) for file in files if file.suffix in CONTENT_TYPES}
        self._replies[PATH] = self._replies.pop(f"{PATH}/page.html")
        self._replies[f"{PATH}/"] = WholeReply(308, (("location", "../dashboard"), *HEADERS), b"")

    def serves(self, path: str) -> bool:
        return path == PATH or path.startswith(f"{PATH}/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send)
        try:
            if scope["path"] not in self._replies:
                raise NotFound("There is no such route.")
            if scope["method"] not in ("GET", "HEAD"):
                raise MethodNotAllowed("This route takes GET only.", "GET, HEAD")
        except GatewayError as error:
            await reply.fail(error)
        else:
            await reply.whole(self._replies[scope["path"]])


def _reply(file: Path) -> WholeReply:
    content_type = f"{CONTENT_TYPES[file.suffix]}; charset=utf-8"
    return WholeReply(200, (("content-type", content_type), *HEADERS), file.read_bytes())
