"""Doors of `actmat ui`: requests of other hosts and origins, without the token, with odd bodies, lengths and names.

"slow requests" are the same over connections that stall, break off, or take no answer, with bodies up to the largest.
"""

from __future__ import annotations

import io
import json
import random
import re
from functools import cache
from typing import Any

from huggingface_hub import constants

from actmat.cli.catalogue import read_catalogue
from actmat.errors import MergeError
from actmat.extras.ui.server import MAX_BODY, TOKEN_HEADER, Server
from fuzz.draw import json_text, mutated_bytes, text
from fuzz.harness import BrokenPromise, Files, door

MARKUP = "<script>alert(1)</script>"
TOKEN, PORT = "TOKEN", "PORT"
"""What a case says in place of the server's own, which no case can know."""
LENGTH = re.compile(rb"Content-Length: (\d{1,9})\b")
HOSTS = (f"127.0.0.1:{PORT}", f"localhost:{PORT}", f"evil.example:{PORT}", "127.0.0.1", f"127.0.0.1:{PORT}.evil.example",
         f"127.0.0.1:{PORT}@evil.example", "[::1]:80", "", MARKUP)  # fmt: skip
ORIGINS = (f"http://127.0.0.1:{PORT}", "http://evil.example", "null", f"https://127.0.0.1:{PORT}", "", MARKUP)
FORM: dict[str, Any] = {
    "recipe": {"base": "/none/base", "experts": [{"path": "/none/one", "name": MARKUP}, {"path": "/none/two"}],
               "method": "ties", "options": {"density": 0.2}, "scale": 0.5},
    "settings": {"threads": 1}, "out": "/none/out",
}  # fmt: skip
QUESTIONS: dict[str, Any] = {
    "start": {}, "folder": {"path": "/none"}, "plan": {"form": FORM}, "groups": {"form": FORM}, "load": {"path": "/none/x.yaml"},
    "run": {"do": "merge", "form": FORM}, "job": {}, "stop": {}, "nothing": {}, MARKUP: {},
}  # fmt: skip
"""Questions without those that search the hub, list its cache, or write a file where its owner says."""


class _Wire:
    """A connection that has received a request; keeps the answer."""

    def __init__(self, request: bytes) -> None:
        self.request, self.answer = request, bytearray()

    def settimeout(self, seconds: float) -> None:
        """Nothing waits here."""

    def makefile(self, mode: str, buffering: int = -1) -> io.BufferedIOBase:
        """The request."""
        return io.BytesIO(self.request)

    def sendall(self, data: bytes) -> None:
        """Keep a part of the answer."""
        self.answer += data


class _Broken(io.RawIOBase, _Wire):
    """A connection that gives a request in pieces, and then what the case says; takes a part of the answer.

    Args:
        request: the bytes that are sent.
        piece: most bytes at once.
        end: "close", "stall" or "reset" after the request.
        takes: bytes of the answer after which the client is gone.
    """

    def __init__(self, request: bytes, piece: int, end: str, takes: int) -> None:
        _Wire.__init__(self, request)
        self.place, self.piece, self.end, self.takes = 0, piece, end, takes

    def makefile(self, mode: str, buffering: int = -1) -> io.BufferedIOBase:
        """The request."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Give the next piece, or fail as the socket would."""
        data = self.request[self.place : self.place + min(self.piece, len(buffer))]
        if not data and self.end == "stall":
            raise TimeoutError("timed out")
        if not data and self.end == "reset":
            raise ConnectionResetError(104, "Connection reset by peer")
        buffer[: len(data)] = data
        self.place += len(data)
        return len(data)

    def sendall(self, data: bytes) -> None:
        """Keep a part of the answer, if the client is still there."""
        if len(self.answer) + len(data) > self.takes:
            raise BrokenPipeError(32, "Broken pipe")
        super().sendall(data)


def _request(rng: random.Random) -> Files:
    question = rng.choice(list(QUESTIONS))
    token = TOKEN if rng.random() < 0.7 else text(rng)
    body = json_text(rng, QUESTIONS[question]) if rng.random() < 0.8 else rng.choice((b"", b"[" * 5000, b"{}", b"7"))
    length = (
        len(body) if rng.random() < 0.85 else rng.choice((-1, 0, MAX_BODY + 1, 10**30, "x", "\u0661", len(body) + 9))
    )
    paths = (
        f"/?token={token}",
        f"/pages/{rng.choice((0, -1, 10**30, MARKUP, '../x'))}?token={token}",
        f"/{MARKUP}?token={token}",
    )
    path, method = (f"/api/{question}", "POST") if rng.random() < 0.8 else (rng.choice(paths), "GET")
    method = method if rng.random() < 0.97 else rng.choice(("PUT", "HEAD", "OPTIONS", MARKUP, ""))
    lines = [f"{method} {path} HTTP/1.1", f"{TOKEN_HEADER}: {token}", f"Content-Length: {length}"]
    lines += [f"Host: {HOSTS[0] if rng.random() < 0.7 else rng.choice(HOSTS)}"] if rng.random() < 0.95 else []
    lines += [f"Origin: {rng.choice(ORIGINS)}"] if rng.random() < 0.4 else []
    request = "\r\n".join([*lines, "", ""]).encode("utf-8", "replace") + body
    return {"request": mutated_bytes(rng, request) if rng.random() < 0.1 else request}


@cache
def _server() -> Server:
    """A server without a network, whose jobs are not started."""
    constants.HF_HUB_OFFLINE = True
    made = Server(list(read_catalogue().values()))
    made.questions.jobs.start = lambda job: {"started": True}  # type: ignore[method-assign]
    return made


def _slow_request(rng: random.Random) -> Files:
    request = bytes(_request(rng)["request"])
    filler = rng.choice((0, 0, 0, 1000, MAX_BODY - 100, MAX_BODY))
    if filler and (length := LENGTH.search(request)):  # spaces, which JSON does not mind
        request = LENGTH.sub(b"Content-Length: %d" % (int(length[1]) + filler), request, count=1) + b" " * filler
    cut = rng.choice((len(request), len(request), rng.randrange(len(request) + 1)))
    plan = {
        "piece": rng.choice((1, 7, 1000, 65536)) if cut < 10_000 else 65536,
        "end": rng.choice(("close", "stall", "reset")),
        "takes": rng.choice((10**9, 10**9, 0, rng.randrange(1000))),
    }
    return {"request": request[:cut], "plan": json.dumps(plan).encode()}


def _own(files: Files) -> bytes:
    """The request with the server's token and port."""
    own = files["request"].replace(TOKEN.encode(), _server().token.encode())
    return own.replace(PORT.encode(), str(_server().port).encode())


def _read(files: Files) -> str:
    return _answered(_Wire(_own(files)))


def _read_slowly(files: Files) -> str:
    return _answered(_Broken(_own(files), **json.loads(files["plan"])))


def _answered(wire: _Wire) -> str:
    """What the server answers."""
    server, own = _server(), wire.request
    handler: Any = server._http.RequestHandlerClass
    handler(wire, (server.url, 0), server._http)
    head, _, body = bytes(wire.answer).partition(b"\r\n\r\n")
    if head.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200")):
        if server.token.encode() not in own:
            raise BrokenPromise(f"answered without the token: {own[:300]!r}")
        headers = (line.partition(b":") for line in own.partition(b"\r\n\r\n")[0].split(b"\r\n"))
        if any(n.strip().lower() in (b"host", b"origin") and b"evil" in value.lower() for n, _, value in headers):
            raise BrokenPromise(f"answered another host or origin: {own[:300]!r}")
    if b"text/html" in head and MARKUP.encode() in body:
        raise BrokenPromise(f"markup of the request is in a page: {own[:300]!r}")
    if b"application/json" in head and body and not json.loads(body)["ok"]:
        told = json.loads(body)
        return str(MergeError(told["headline"], told["problems"]))
    return head.decode("utf-8", "replace").replace("\r", "")


door("pages", _request, _read)
door("slow requests", _slow_request, _read_slowly)
