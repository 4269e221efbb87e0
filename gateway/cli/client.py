"""The admin API, as a command asks it: every failure is a :class:`CommandFailed` with one sentence."""

from __future__ import annotations

import argparse
import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from gateway.cli.exits import CommandFailed, Exit
from gateway.cli.output import printable
from gateway.errors import ConfigError

URL_DEFAULT = "http://127.0.0.1:8000"
CONNECT_S = 5.0
ANSWER_S = 30.0


class AdminClient:
    """``urls``: replicas of the gateway. Any of them can do what is asked, so the first one that can be reached does.

    Neither redirects nor proxies are followed: the admin key goes to these addresses only.
    """

    def __init__(self, urls: Sequence[str], admin_key: str) -> None:
        self.urls = tuple(urls)
        self._headers = {"authorization": f"Bearer {admin_key}"}
        # The system's certificates, or those that SSL_CERT_FILE names. Reading them takes a while.
        secure = any(url.startswith("https:") for url in urls)
        self._verify: ssl.SSLContext | bool = ssl.create_default_context() if secure else False

    def get(self, path: str) -> dict[str, Any]:
        return self.ask("GET", path)

    def ask(self, method: str, path: str, body: Any = None, answer_s: float = ANSWER_S) -> dict[str, Any]:
        """A gateway that took the connection is the one: what it was told may have happened."""
        failed: list[str] = []
        for url in self.urls:
            try:
                return self._ask(url, method, path, body, answer_s)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failed.append(_unreachable(url, error))
        raise CommandFailed(Exit.UNREACHABLE, "; ".join(failed) + ".")

    def get_each(self, path: str) -> list[tuple[str, dict[str, Any] | CommandFailed]]:
        """What each gateway says, or why it does not. A key that one of them refuses is a failure of the whole."""
        answers: list[tuple[str, dict[str, Any] | CommandFailed]] = []
        for url in self.urls:
            try:
                answers.append((url, self._ask(url, "GET", path, None, ANSWER_S)))
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                answers.append((url, CommandFailed(Exit.UNREACHABLE, _unreachable(url, error) + ".")))
            except CommandFailed as error:
                if error.status == Exit.NOT_ALLOWED:
                    raise
                answers.append((url, error))
        return answers

    def _ask(self, url: str, method: str, path: str, body: Any, answer_s: float) -> dict[str, Any]:
        timeout = httpx.Timeout(answer_s, connect=CONNECT_S)
        try:
            with httpx.Client(headers=self._headers, verify=self._verify, trust_env=False) as http:
                response = http.request(method, url + path, json=body, timeout=timeout)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise
        except httpx.TransportError as error:
            raise CommandFailed(Exit.UNREACHABLE, _unreachable(url, error) + ".") from error
        return _read(url, response)


def admin_client(flags: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> AdminClient:
    """Raises :class:`ConfigError`. The key is never an argument: everyone on the machine sees those."""
    given = flags.url if flags.url is not None else environment.get("KVFERRY_URL") or URL_DEFAULT
    urls = [url.strip().rstrip("/") for url in given.split(",") if url.strip()]
    name = "--url" if flags.url is not None else "KVFERRY_URL"
    if not urls or not all(_is_url(url) for url in urls):
        raise ConfigError(f"{name} must be a URL like {URL_DEFAULT}, or several, comma-separated.")
    return AdminClient(list(dict.fromkeys(urls)), _admin_key(flags, environment))


def segment(value: str) -> str:
    """An id as a part of a path, which must not lead elsewhere."""
    if "/" in value or not value.strip("."):
        raise CommandFailed(Exit.FAILED, f"`{printable(value)}` cannot be an id.")
    return quote(value, safe="")


def _admin_key(flags: argparse.Namespace, environment: Mapping[str, str]) -> str:
    if flags.admin_key_file is not None:
        return _key_in(flags.admin_key_file, "--admin-key-file")
    if environment.get("KVFERRY_ADMIN_KEY"):
        return _checked(environment["KVFERRY_ADMIN_KEY"].strip(), "KVFERRY_ADMIN_KEY")
    if environment.get("KVFERRY_ADMIN_KEY_FILE"):
        return _key_in(environment["KVFERRY_ADMIN_KEY_FILE"], "KVFERRY_ADMIN_KEY_FILE")
    raise CommandFailed(
        Exit.NOT_ALLOWED, "The admin key is missing: set KVFERRY_ADMIN_KEY, or name a file with --admin-key-file."
    )


def _key_in(path: str, name: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: {path} is not text.") from error
    return _checked(text.strip(), f"{name}: {path}")


def _checked(key: str, name: str) -> str:
    """What an HTTP header can carry."""
    if not key or not all("!" <= character <= "~" for character in key):
        raise ConfigError(f"{name} must hold one key and nothing else, without spaces.")
    return key


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        return False
    whole = parts.scheme in ("http", "https") and parts.hostname and not parts.username
    return bool(whole and has_port and not parts.query and not parts.fragment)


def _unreachable(url: str, error: httpx.TransportError) -> str:
    if isinstance(error, httpx.TimeoutException):
        return f"{url} does not answer in time"
    return f"{url} cannot be reached (--url or KVFERRY_URL): {printable(str(error)) or type(error).__name__}"


def _read(url: str, response: httpx.Response) -> dict[str, Any]:
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if response.is_success and isinstance(answer, dict):
        return answer
    status = response.status_code
    match answer:
        case {"error": _} if status == 401:
            raise CommandFailed(Exit.NOT_ALLOWED, f"{url} has another admin key, or none.")
        case {"error": {"code": 404 | 405}}:
            path = response.request.url.path
            raise CommandFailed(Exit.FAILED, f"{url} has no route {response.request.method} {path}: is it older?")
        case {"error": {"message": str(message)}} if not response.is_success:
            raise CommandFailed(Exit.FAILED, printable(message))
        case _:
            raise CommandFailed(Exit.UNREACHABLE, f"{url} answers with {status}, and not as a kvferry gateway does.")
