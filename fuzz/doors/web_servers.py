"""Door of web servers that lie or are slow: other lengths and versions, ranges ignored or shifted, stalls, bombs.

The HTTP client is the real one; below it, the network and the clock are simulated, so that a case that would take
minutes takes milliseconds. A request that would take longer than `LONGEST` breaks the promise. Headers that never end
are left out: the client waits for them as long as a byte comes every 30 seconds, and 100 kB of them are too many.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from huggingface_hub import get_session

import actmat.extras.remote.http  # noqa: F401 - its imports belong to no case
from actmat.extras.remote import retry, source
from fuzz.doors.checkpoints import weights
from fuzz.doors.folder import read_all
from fuzz.draw import ODD_TEXTS, mutated_bytes
from fuzz.harness import BrokenPromise, Files, door

RANGE = re.compile(rb"\r\n[Rr]ange: bytes=(\d+)-(\d+)")
NAMES = {b"config.json": b'{"model_type": "llama"}'}
LONGEST = 600.0
"""Simulated seconds of one request: 256 kB at the slowest rate that is taken, the patience before, a time-out."""
PACES = ((65536, 0.0), (1000, 0.0), (1000, 0.5), (64, 0.05), (1, 0.1), (1, 1.0), (1, 29.0), (7, 31.0), (4000, 29.0))
"""Bytes of a piece, and seconds before it."""
LIES = (
    "honest", "long length", "short length", "no length", "bad length", "cut", "more", "whole", "shifted", "wrong total", "no range",
    "huge total", "new etag", "no etag", "odd etag", "damaged", "500", "503", "416", "302", "garbage", "chunked", "close", "gzip",
)  # fmt: skip
ENDINGS = (
    "whole", "whole", "stall", "reset", "close", "endless", "huge length", "bomb", "interim", "chunks", "garbage",
)  # fmt: skip
FILLED = 300_000
"""Zero bytes after the file in some cases, so that a request is of its full size."""
BOMB = gzip.compress(bytes(40_000_000), 1)
SECONDS_OF_A_STALL = 10_000.0
HONEST = {"lie": "honest", "ending": "whole", "pace": PACES[0], "at": 0, "sized": True, "text": ""}
Pieces = Iterator[tuple[float, bytes]]


class _Clock:
    """Simulated time, in place of the module `time` where requests are tried again."""

    now = 0.0

    def monotonic(self) -> float:
        """Seconds since the start."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class _Network:
    """A network with one server of a file and its config, whose streams have the methods that the client calls."""

    def __init__(self, clock: _Clock, core: Any) -> None:
        self.clock, self.core = clock, core
        self.files: dict[bytes, bytes] = {}
        self.plan: list[dict[str, Any]] = []
        self.count = 0

    def connect_tcp(self, *address: Any, **options: Any) -> _Stream:
        """A connection."""
        return _Stream(self)

    def answer(self, request: bytes) -> Pieces:
        """Pieces of the answer to a request, each after a pause; the last case of the plan is repeated."""
        name = request.split(b" ", 2)[1].rpartition(b"/")[2]
        if name not in self.files:
            return iter([(0.0, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")])
        chosen = self.plan[min(self.count, len(self.plan) - 1)]
        self.count += 1
        return _answer(chosen, self.files[name], RANGE.search(request), self.count)


class _Stream:
    def __init__(self, network: _Network) -> None:
        self.network, self.began = network, 0.0
        self.pieces: Pieces = iter(())
        self.request = b""

    def write(self, data: bytes, timeout: float | None = None) -> None:
        """Receive a part of a request."""
        self.request += data
        if self.request.endswith(b"\r\n\r\n"):
            self.pieces, self.began = self.network.answer(self.request), self.network.clock.now
            self.request = b""

    def read(self, most: int, timeout: float | None = None) -> bytes:
        """The next piece of the answer."""
        clock, core = self.network.clock, self.network.core
        pause, data = next(self.pieces, (0.0, b""))
        if timeout is not None and pause > timeout:
            clock.now += timeout
            raise core.ReadTimeout("no byte came")
        clock.now += pause
        if clock.now - self.began > LONGEST:
            raise BrokenPromise(f"a request took more than {LONGEST:.0f} s")
        if data == b"RESET":
            raise core.ReadError("the connection was reset")
        return data

    def close(self) -> None:
        """Nothing is held."""

    def get_extra_info(self, info: str) -> bool | None:
        """An idle connection is readable: the server has closed it, so that it is not used again."""
        return True if info == "is_readable" else None


def _answer(chosen: dict[str, Any], content: bytes, wanted: re.Match[bytes] | None, count: int) -> Pieces:
    """Head and body of the answer with this number, as the case says."""
    lie, ending, text = chosen["lie"], chosen["ending"], chosen["text"]
    if lie in ("500", "503", "416", "302"):
        head = [f"HTTP/1.1 {lie} No", f"Retry-After: {count}", "Location: /x", "Content-Length: 0", "Connection: close"]
        return iter([(0.0, "\r\n".join([*head, "", ""]).encode())])
    if lie in ("garbage", "close"):
        return iter([(0.0, b"" if lie == "close" else text.encode("utf-8", "replace") + b"\r\n\r\n" + content)])
    first = int(wanted[1]) if wanted else 0
    last = min(int(wanted[2]), len(content) - 1) if wanted else len(content) - 1
    part = content[first : last + 1]
    body = {
        "whole": content,
        "damaged": bytes(len(part)),
        "cut": part[: len(part) // 2],
        "more": part + b"x" * 100,
    }.get(lie, part)
    start = b"HTTP/1.1 100 Continue\r\n\r\n" * (chosen["at"] % 50) if ending == "interim" else b""
    head = _head(
        chosen, len(content), (first, last) if wanted else None, len(content if lie == "whole" else part), count
    )
    return _body(chosen, start + "\r\n".join([*head, "", ""]).encode("latin1", "replace"), body)


def _head(chosen: dict[str, Any], size: int, part: tuple[int, int] | None, sent: int, count: int) -> list[str]:
    """Status and headers for a part of a file of `size` bytes, or for all of it."""
    lie, ending = chosen["lie"], chosen["ending"]
    odd = re.sub(r"[\r\n\0]", "", chosen["text"]).encode("utf-8", "replace").decode("latin1")
    (first, last), total = part or (0, size - 1), {"wrong total": size + count, "huge total": 2**70}.get(lie, size)
    length: object = sent + {"long length": 7, "short length": -min(3, sent)}.get(lie, 0)
    if ending in ("endless", "huge length"):
        total, last = 2**62, 2**62 - 1
        length = total - first
    is_sized = ending == "huge length" or (
        chosen["sized"] and ending in ("whole", "stall", "reset", "close", "interim", "garbage")
    )
    is_range = part is not None and lie not in ("whole", "no range")
    head = [f"HTTP/1.1 {206 if is_range else 200} OK", "Connection: close"]
    if is_sized and lie not in ("no length", "chunked"):
        head += [f"Content-Length: {odd if lie == 'bad length' else length}"]
    head += [f"Content-Range: bytes {first + (lie == 'shifted')}-{last}/{total}"] if is_range else []
    head += [] if lie == "no etag" else ["ETag: " + {"new etag": f'"{count}"', "odd etag": odd}.get(lie, '"v"')]
    head += ["Transfer-Encoding: chunked"] if lie == "chunked" or ending == "chunks" else []
    return head + (["Content-Encoding: gzip"] if lie == "gzip" or ending == "bomb" else [])


def _body(chosen: dict[str, Any], head: bytes, body: bytes) -> Pieces:
    """The bytes of an answer at its pace, to its end."""
    ending, (size, pause) = chosen["ending"], chosen["pace"]
    yield 0.0, head
    body = BOMB if ending == "bomb" else bytes(255 - b for b in body) if ending == "garbage" else body
    pieces: Iterable[bytes] = (body[i : i + size] for i in range(0, len(body), size))
    if ending in ("endless", "huge length"):
        pieces = itertools.chain(pieces, itertools.repeat(bytes(size)))
    if ending == "chunks":
        pieces = (b"%x;%s\r\n%s\r\n" % (len(p), b"x" * (chosen["at"] % 90), p) for p in pieces)
    for number, piece in enumerate(pieces):
        if number == chosen["at"] and ending in ("stall", "reset", "close"):
            yield {"stall": (SECONDS_OF_A_STALL, b"x"), "reset": (0.0, b"RESET"), "close": (0.0, b"")}[ending]
            return
        yield pause, piece
    yield 0.0, b"0\r\n\r\n" if ending == "chunks" else b""


def _drawn(rng: random.Random) -> dict[str, Any]:
    """An answer that lies, or comes slowly; now and then both."""
    lies = rng.random() < 0.5
    return {
        "lie": rng.choice(LIES) if lies else "honest",
        "ending": rng.choice(ENDINGS) if not lies or rng.random() < 0.2 else "whole",
        "pace": rng.choice(PACES) if not lies or rng.random() < 0.2 else PACES[0],
        "at": rng.choice((0, 1, 2, rng.randrange(400))),
        "sized": rng.random() < (0.9 if lies else 0.1),
        "text": rng.choice(ODD_TEXTS),
    }


def _case(rng: random.Random) -> Files:
    plan = [HONEST] * rng.choice((0, 0, 1, 2, 4)) + [_drawn(rng) for _ in range(rng.choice((1, 1, 2, 3, 6)))]
    content = weights() + (bytes(FILLED) if rng.random() < 0.2 else b"")
    return {
        "plan": json.dumps([*plan, HONEST] if rng.random() < 0.3 else plan).encode(),
        "weights": mutated_bytes(rng, content) if rng.random() < 0.25 else content,
    }


@cache
def _network() -> _Network:
    """The network of this process, in place of the real one."""
    clock: Any = _Clock()
    vars(retry)["time"] = clock
    source.PARALLEL_REQUESTS = 1  # one clock, and the same requests in every run
    pool: Any = get_session()._transport._pool  # type: ignore[attr-defined]
    core = sys.modules[type(pool).__module__.partition(".")[0]]
    pool._network_backend = network = _Network(clock, core)
    return network


def _read(files: Files) -> None:
    network = _network()
    network.files = NAMES | {b"model.safetensors": files["weights"]}
    network.plan, network.count = json.loads(files["plan"]), 0
    read_all("http://127.0.0.1:9/m")


door("web servers", _case, _read)
