"""Door of slow web servers: bodies of a byte a second, stalls, resets, bodies without an end, huge lengths, bombs.

The HTTP client is the real one; below it, the network and the clock are simulated, so that a case that would take
minutes takes milliseconds. A request that would take longer than `LONGEST` breaks the promise. Headers that never end
are left out: the client waits for them as long as a byte comes every 30 seconds, and 100 kB of them are too many.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from huggingface_hub import get_session

import actmat.extras.remote.http  # noqa: F401 - its imports belong to no case
from actmat.checkpoints import retry
from actmat.checkpoints.resolve import open_checkpoint
from actmat.extras.remote import source
from fuzz.doors.checkpoints import weights
from fuzz.doors.web_servers import NAMES, RANGE
from fuzz.draw import mutated_bytes
from fuzz.harness import BrokenPromise, Files, door

LONGEST = 600.0
"""Simulated seconds of one request: 256 kB at the slowest rate that is taken, the patience before, a time-out."""
PACES = ((65536, 0.0), (1000, 0.0), (1000, 0.5), (64, 0.05), (1, 0.1), (1, 1.0), (1, 29.0), (7, 31.0), (4000, 29.0))
"""Bytes of a piece, and seconds before it."""
ENDINGS = (
    "whole",
    "whole",
    "stall",
    "reset",
    "close",
    "endless",
    "huge length",
    "bomb",
    "interim",
    "chunks",
    "garbage",
)
FILLED = 300_000
"""Zero bytes after the file in some cases, so that a request is of its full size."""
BOMB = gzip.compress(bytes(40_000_000), 1)
SECONDS_OF_A_STALL = 10_000.0


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
    """A network with one slow server, whose streams have the methods that the client calls."""

    def __init__(self, clock: _Clock, core: Any) -> None:
        self.clock, self.core = clock, core
        self.files: dict[bytes, bytes] = {}
        self.plan: list[dict[str, Any]] = []

    def connect_tcp(self, *address: Any, **options: Any) -> _Stream:
        """A connection."""
        return _Stream(self)

    def answer(self, request: bytes) -> Iterator[tuple[float, bytes]]:
        """Pieces of the answer to a request, each after a pause; the last case of the plan is repeated."""
        name = request.split(b" ", 2)[1].rpartition(b"/")[2]
        if name not in self.files:
            return iter([(0.0, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")])
        chosen = self.plan.pop(0) if len(self.plan) > 1 else self.plan[0]
        return _answer(chosen, self.files[name], RANGE.search(request))


class _Stream:
    def __init__(self, network: _Network) -> None:
        self.network, self.began = network, 0.0
        self.pieces: Iterator[tuple[float, bytes]] = iter(())
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


def _answer(chosen: dict[str, Any], content: bytes, wanted: Any) -> Iterator[tuple[float, bytes]]:
    first, last = (int(wanted[1]), min(int(wanted[2]), len(content) - 1)) if wanted else (0, len(content) - 1)
    ending, body = chosen["ending"], content[first : last + 1]
    total = 2**62 if ending in ("endless", "huge length") else len(content)
    head = [f"HTTP/1.1 {206 if wanted else 200} OK", 'ETag: "v"', "Connection: close"]
    head += [f"Content-Range: bytes {first}-{total - 1 if total > len(content) else last}/{total}"] if wanted else []
    head += [f"Content-Length: {total - first}"] if ending == "huge length" else []
    head += ["Transfer-Encoding: chunked"] if ending == "chunks" else []
    head += ["Content-Encoding: gzip"] if ending == "bomb" else []
    start = b"HTTP/1.1 100 Continue\r\n\r\n" * (chosen["at"] % 50) if ending == "interim" else b""
    yield 0.0, start + "\r\n".join([*head, "", ""]).encode()
    if ending == "bomb":
        body = BOMB
    if ending == "garbage":
        body = bytes(255 - b for b in body)
    size, pause = chosen["pace"]
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


def _case(rng: random.Random) -> Files:
    plan = [
        {"pace": rng.choice(PACES), "ending": rng.choice(ENDINGS), "at": rng.choice((0, 1, 2, rng.randrange(400)))}
        for _ in range(rng.choice((1, 1, 2, 3, 6)))
    ]
    honest = {"pace": PACES[0], "ending": "whole", "at": 0}
    for place in range(rng.choice((0, 0, 1, 2, 4))):
        plan.insert(min(place, len(plan) - 1), honest)
    content = weights() + (bytes(FILLED) if rng.random() < 0.3 else b"")
    return {
        "plan": json.dumps(plan).encode(),
        "weights": mutated_bytes(rng, content) if rng.random() < 0.2 else content,
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
    network.plan = json.loads(files["plan"])
    with open_checkpoint("http://127.0.0.1:9/m") as checkpoint:
        for name in checkpoint.specs:
            checkpoint.read(name)


door("slow servers", _case, _read)
