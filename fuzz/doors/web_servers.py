"""Door of web servers that lie: other lengths, ranges that are ignored or shifted, versions that change."""

from __future__ import annotations

import json
import random
import re
import socket
import threading
from functools import cache
from typing import Any

from actmat.checkpoints import retry
from actmat.checkpoints.resolve import open_checkpoint
from fuzz.doors.checkpoints import weights
from fuzz.draw import ODD_TEXTS, mutated_bytes
from fuzz.harness import Files, door

RANGE = re.compile(rb"\r\n[Rr]ange: bytes=(\d+)-(\d+)")
NAMES = {b"config.json": b'{"model_type": "llama"}'}
LIES = (
    "honest", "long length", "short length", "no length", "bad length", "cut", "more", "whole", "shifted", "wrong total", "no range",
    "huge total", "new etag", "no etag", "odd etag", "damaged", "500", "503", "416", "302", "garbage", "chunked", "close", "gzip",
)  # fmt: skip


def _plan(rng: random.Random) -> Files:
    _liar()
    honest = rng.choice((0, 0, 1, 2, 4))
    lies = ["honest"] * honest + [rng.choice(LIES) for _ in range(rng.randrange(1, 4))]
    plan = {"lies": lies, "text": rng.choice(ODD_TEXTS), "last": rng.choice(("honest", rng.choice(LIES)))}
    return {
        "plan": json.dumps(plan).encode(),
        "weights": mutated_bytes(rng, weights()) if rng.random() < 0.3 else weights(),
    }


class _Liar:
    """A server of one file and its config, which answers as the plan of the case says."""

    def __init__(self) -> None:
        self.files: dict[bytes, bytes] = {}
        self.plan: dict[str, Any] = {}
        self.count = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                try:
                    self._answer(connection)
                except OSError:  # the client went away
                    continue

    def _answer(self, connection: socket.socket) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            received = connection.recv(65536)
            if not received:
                return
            request += received
        name = request.split(b" ", 2)[1].rpartition(b"/")[2]
        if name not in self.files:
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        lies = self.plan["lies"]
        lie = lies[self.count] if self.count < len(lies) else self.plan["last"]
        self.count += 1
        connection.sendall(_lying(lie, self.files[name], RANGE.search(request), self.plan["text"], self.count))


def _lying(lie: str, content: bytes, wanted: re.Match[bytes] | None, text: str, count: int) -> bytes:
    """The bytes of an answer."""
    if lie in ("500", "503", "416", "302"):
        return f"HTTP/1.1 {lie} No\r\nRetry-After: {count}\r\nLocation: /x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
    if lie in ("garbage", "close"):
        return b"" if lie == "close" else text.encode("utf-8", "replace") + b"\r\n\r\n" + content
    first = int(wanted[1]) if wanted else 0
    last = min(int(wanted[2]), len(content) - 1) if wanted else len(content) - 1
    total, part = len(content), content[first : last + 1]
    if lie == "shifted":
        first += 1
    if lie == "wrong total":
        total += count
    if lie == "huge total":
        total = 2**70
    is_range = wanted is not None and lie not in ("whole", "no range")
    body = content if lie == "whole" else bytes(len(part)) if lie == "damaged" else part
    length: object = len(body) + {"long length": 7, "short length": -min(3, len(body))}.get(lie, 0)
    odd = re.sub(r"[\r\n\0]", "", text).encode("utf-8", "replace").decode("latin1")
    etag = {"new etag": f'"{count}"', "odd etag": odd}.get(lie, '"v"')
    head = [f"HTTP/1.1 {206 if is_range else 200} OK", "Connection: close"]
    head += [] if lie in ("no length", "chunked") else [f"Content-Length: {odd if lie == 'bad length' else length}"]
    head += [f"Content-Range: bytes {first}-{last}/{total}"] if is_range else []
    head += [] if lie == "no etag" else [f"ETag: {etag}"]
    head += ["Transfer-Encoding: chunked"] if lie == "chunked" else ["Content-Encoding: gzip"] if lie == "gzip" else []
    body = {"cut": body[: len(body) // 2], "more": body + b"x" * 100}.get(lie, body)
    return "\r\n".join([*head, "", ""]).encode("latin1", "replace") + body


@cache
def _liar() -> _Liar:
    """The server of this process, which is not waited for between attempts."""
    retry.FIRST_PAUSE = retry.LONGEST_PAUSE = 0.0
    made = _Liar()
    made.plan, made.files = {"lies": [], "text": "", "last": "honest"}, NAMES | {b"model.safetensors": weights()}
    with open_checkpoint(f"http://127.0.0.1:{made.port}/m"):  # its imports belong to no case
        return made


def _read(files: Files) -> None:
    liar = _liar()
    liar.files = NAMES | {b"model.safetensors": files["weights"]}
    liar.plan, liar.count = json.loads(files["plan"]), 0
    with open_checkpoint(f"http://127.0.0.1:{liar.port}/m") as checkpoint:
        for name in checkpoint.specs:
            checkpoint.read(name)


door("web servers", _plan, _read)
