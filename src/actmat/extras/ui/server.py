"""The server of the page: on this machine only, for the one who has the token.

Every request needs the token of the address that was printed, and a `Host` of this server, so that a page of another
origin that resolves its own name to 127.0.0.1 gets nothing. No cookie is set.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from actmat.errors import OutputError
from actmat.extras.ui.jobs import Jobs
from actmat.extras.ui.questions import Questions

ADDRESS = "127.0.0.1"
TOKEN_HEADER = "X-Actmat-Token"
MAX_BODY = 2_000_000
"""Largest question in bytes."""


class Server:
    """A page to work in, at `url` until it is closed.

    >>> with Server([]) as server:
    ...     server.url.startswith("http://127.0.0.1:")
    True

    Args:
        methods: declarations of the methods, as `actmat methods --json` prints them.
        port: 0 for one that is free.

    Raises:
        OutputError: the port is taken.
    """

    def __init__(self, methods: Sequence[Mapping[str, Any]], port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        try:
            self._http = ThreadingHTTPServer((ADDRESS, port), type("Handler", (_Handler,), {"owner": self}))
        except OSError as error:
            raise OutputError(f"Port {port} cannot be used: {error.strerror}. Fix: another --port, or none.") from None
        self._folder = tempfile.TemporaryDirectory(prefix="actmat-ui-")
        self._http.daemon_threads = True
        self.port = int(self._http.server_address[1])
        self.questions = Questions(methods, Jobs(Path(self._folder.name)))
        self.page = _page()

    @property
    def url(self) -> str:
        """Address of the page, with its token."""
        return f"http://{ADDRESS}:{self.port}/?token={self.token}"

    def allows(self, host: str | None, origin: str | None, token: str) -> bool:
        """True for a request to this server, from its own page or from none, with the token."""
        names = {f"{name}:{self.port}" for name in (ADDRESS, "localhost")}
        own = origin is None or origin in {f"http://{name}" for name in names}
        return host in names and own and hmac.compare_digest(token.encode(), self.token.encode())

    def run(self) -> None:
        """Answer until `close` or an interruption."""
        self._http.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop the running job, which keeps what is done, and the server."""
        self.questions.jobs.close()
        self._http.server_close()
        self._folder.cleanup()

    def shutdown(self) -> None:
        """End `run`, called from another thread."""
        self._http.shutdown()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _page() -> tuple[bytes, str]:
    """The page, and its content security policy: one style and one script, by their hashes, and this origin."""
    own, reports = files("actmat.extras.ui"), files("actmat.extras.pages.html")
    page, script = (own.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "page.js"))
    style = "\n".join(f.read_text(encoding="utf-8") for f in (reports.joinpath("style.css"), own.joinpath("page.css")))
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    policy = (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.replace("/* style */", style).replace("/* script */", script).encode(), policy


class _Handler(BaseHTTPRequestHandler):
    """Answers requests to the server `owner`."""

    owner: Server
    timeout = 30  # seconds

    def handle(self) -> None:
        """Answer until the client is done, or gone."""
        with contextlib.suppress(ConnectionError):  # of a tab that was closed: no traceback on the terminal
            super().handle()

    def do_GET(self) -> None:
        """The page, or a page that a job made."""
        url = urlsplit(self.path)
        if not self._is_allowed(parse_qs(url.query).get("token", [""])[0]):
            return
        if url.path == "/":
            body, policy = self.owner.page
            self._send(200, "text/html; charset=utf-8", body, {"Content-Security-Policy": policy})
            return
        number = url.path.removeprefix("/pages/")
        made = self.owner.questions.jobs.page(int(number)) if number.isascii() and number.isdigit() else None
        if made is None or not made.is_file():
            self._refuse(404, "There is no such page.")
        else:
            self._send(200, "text/html; charset=utf-8", made.read_bytes())

    def do_POST(self) -> None:
        """A question of the page: JSON in, JSON out."""
        if not self._is_allowed(self.headers.get(TOKEN_HEADER, "")):
            return
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            length = -1
        if not 0 <= length <= MAX_BODY:
            self._refuse(413, "The question has no length, or is too long.")
            return
        try:
            data = json.loads(self.rfile.read(length) or b"{}")
            answer = self.owner.questions.answer(self.path.removeprefix("/api/"), dict(data))
        except (ValueError, TypeError, RecursionError):
            self._refuse(400, "The question is no JSON object.")
        except LookupError:
            self._refuse(404, "There is no such question.")
        else:
            self._send(200, "application/json", json.dumps(answer).encode())

    def _is_allowed(self, token: str) -> bool:
        if self.owner.allows(self.headers.get("Host"), self.headers.get("Origin"), token):
            return True
        self._refuse(403, "Open the address that 'actmat ui' printed: this one has no token, or an old one.")
        return False

    def _refuse(self, status: int, reason: str) -> None:
        self.close_connection = True
        self._send(status, "text/plain; charset=utf-8", f"{reason}\n".encode())

    def _send(self, status: int, kind: str, body: bytes, more: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        fixed = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        safe = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}
        for name, value in {**fixed, **safe, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal shows the address."""
