"""Serve the page locally, protected by a token, or to others, within limits."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
from collections.abc import Iterator
from typing import Any

import gradio as gr
import uvicorn
from fastapi import FastAPI, Request
from fastapi.middleware import Middleware
from fastapi.responses import PlainTextResponse, RedirectResponse

from actmat.errors import OutputError
from actmat.methods import all_methods
from actmat_app.jobs import Jobs
from actmat_app.limits import Limits
from actmat_app.page import SHOWN, build

ADDRESS = "127.0.0.1"
COOKIE = "actmat-token"
REFUSED = "This address has no valid token. Fix: open the address printed by 'actmat ui'.\n"
POLICY = (
    (b"content-security-policy", b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self'; "
     b"frame-ancestors 'none'; base-uri 'self'; form-action 'self'"),
    (b"referrer-policy", b"no-referrer"),
)  # fmt: skip
"""Headers of every response; the page loads nothing from other hosts."""


FORMS = ("/queue/join", "/cancel", "/reset")
"""Ends of the addresses to which the page itself sends something."""
STORING = "/deep_link"
"""Address of Gradio that stores the fields of a page on request."""
LARGEST_FORM = 1_000_000
"""Bytes; a recipe has a few thousand."""
NO_FILES = "This page takes no files. Fix: name repositories of the hub.\n"


class OnlyForms:
    """ASGI middleware of a page for visitors, which has fields and no files: nothing that is sent is stored.

    Gradio's own address for uploads needs neither a session nor a token, and has no limit.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request, or refuse it before its body is read."""
        answer = self.app
        if scope["type"] == "http":
            path, length = scope["path"].rstrip("/"), Request(scope).headers.get("content-length", "")
            if scope["method"] in ("GET", "HEAD"):
                is_known = not path.endswith(STORING)
            else:
                is_known = path.endswith(FORMS) and length.isdecimal() and int(length) <= LARGEST_FORM
            answer = self.app if is_known else PlainTextResponse(NO_FILES, 413)
        await answer(scope, receive, send)


class Guard:
    """ASGI middleware that accepts only requests with the token, for this server's names, from its own page.

    The token is in the printed address, and then in a cookie. This excludes pages of other origins, also those whose
    name resolves to 127.0.0.1, and other users of this machine.
    """

    def __init__(self, app: Any, token: str, port: int) -> None:
        self.app, self.token = app, token
        self.hosts = {f"{name}:{port}" for name in (ADDRESS, "localhost")}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request, or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":  # websockets are not used
            await self._answer(Request(scope))(scope, receive, send)

    def _answer(self, request: Request) -> Any:
        given = request.query_params.get("token", "")
        known = hmac.compare_digest((given or request.cookies.get(COOKIE, "")).encode(), self.token.encode())
        own = request.headers.get("origin") in {None, *(f"http://{host}" for host in self.hosts)}
        if not known or not own or request.headers.get("host") not in self.hosts:
            return PlainTextResponse(REFUSED, 403)
        if not given:
            return self._pass
        answer = RedirectResponse("/", 303)  # remove the token from the address bar
        answer.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
        return answer

    async def _pass(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *POLICY]}
            await send(message)

        await self.app(scope, receive, with_policy)


@contextlib.contextmanager
def local_server(port: int = 0) -> Iterator[tuple[str, uvicorn.Server, socket.socket]]:
    """Yield address, server and socket of the local page; stops running jobs on exit.

    Args:
        port: port number; 0: any free port.

    Raises:
        OutputError: the port is taken.
    """
    listening = socket.socket()
    jobs, token = Jobs(), secrets.token_urlsafe(24)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((ADDRESS, port))
        except OSError as error:
            raise OutputError(f"Cannot use port {port}: {error.strerror}. Fix: another --port, or omit it.") from None
        listening.listen()  # a reader of the address may connect at once
        port = int(listening.getsockname()[1])
        app = gr.mount_gradio_app(FastAPI(), build(jobs, [m.name for m in all_methods()]), "/", **SHOWN)
        config = uvicorn.Config(Guard(app, token, port), log_level="warning", timeout_graceful_shutdown=1)
        yield f"http://{ADDRESS}:{port}/?token={token}", uvicorn.Server(config), listening
    finally:
        jobs.close()
        listening.close()


def launch(**options: Any) -> None:
    """Serve the page to others, with limits from the environment; `options` are passed to Gradio's `launch`.

    Raises:
        RecipeError: a limit is invalid.
    """
    jobs = Jobs(Limits.from_environment())
    app_kwargs = {"middleware": [Middleware(OnlyForms)]}
    build(jobs, [m.name for m in all_methods()]).launch(**SHOWN | {"app_kwargs": app_kwargs} | options)
