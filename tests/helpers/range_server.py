"""A web server on 127.0.0.1 for one folder: honors ranges, counts requests, and fails in the ways that servers do."""

import hashlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.helpers.serving import Handler, serve

RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass(frozen=True)
class Request:
    """One answered request: file below the root, first byte, bytes sent, status."""

    path: str
    start: int
    sent: int
    status: int


@dataclass
class RangeServer:
    """Serves `root`; the fields may be changed at any time.

    Args:
        fault: `fault(path, number, start)` names what goes wrong with the `number`-th request (from 0) of a file:
            "500", "503", "truncate", "hang", "close", "drip" (a byte at a time), "gzip" (what was not asked for); empty
            for nothing.
        etags: path -> ETag to send in place of the content's; None: neither ETag nor Last-Modified.
        together: answers about shards wait until so many have been asked for at once.
    """

    root: Path
    url: str = ""
    ranges: bool = True
    together: int = 0
    fault: Callable[[str, int, int], str] = lambda path, number, start: ""
    etags: dict[str, str | None] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    running: int = 0
    most_running: int = 0
    lock: threading.Condition = field(default_factory=threading.Condition)

    def reset(self) -> None:
        """Forget requests and faults."""
        self.requests, self.counts, self.most_running = [], Counter(), 0
        self.fault, self.etags, self.together, self.ranges = lambda path, number, start: "", {}, 0, True

    def of(self, ending: str) -> list[Request]:
        """Requests for files whose path ends so, other than those that were not found."""
        return [r for r in self.requests if r.path.endswith(ending) and r.status != 404]


@contextmanager
def range_server(root: Path) -> Iterator[RangeServer]:
    """Serve a folder until the block ends."""
    served = RangeServer(root)
    handler = type("Handler", (_Handler,), {"served": served})
    with serve(handler) as served.url:
        yield served


class _Handler(Handler):
    """Answers for one server."""

    served: RangeServer

    def do_GET(self) -> None:
        served = self.served
        with served.lock:
            served.running += 1
            served.most_running = max(served.most_running, served.running)
            served.lock.notify_all()
            if "-of-" in self.path:
                served.lock.wait_for(lambda: served.most_running >= served.together, timeout=60)
        try:
            self._answer(unquote(urlsplit(self.path).path).lstrip("/"))
        finally:
            with served.lock:
                served.running -= 1

    def _answer(self, path: str) -> None:
        served, file = self.served, self.served.root / path
        wanted = RANGE.fullmatch(self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted else 0
        with served.lock:
            number = served.counts[path]
            served.counts[path] += 1
        if not file.is_file():
            return self._send(404, b"", {}, path, start)
        fault = served.fault(path, number, start)
        if fault in ("500", "503"):
            return self._send(int(fault), b"try later", {"Retry-After": "0"}, path, start)
        if fault == "hang":
            time.sleep(0.5)
        content, status = file.read_bytes(), 200
        etag = served.etags.get(path, f'"{hashlib.md5(content).hexdigest()}"')
        headers = {} if etag is None else {"ETag": etag}
        if wanted and served.ranges:
            if start >= len(content):
                return self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"}, path, start)
            last = min(int(wanted[2]), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{last}/{len(content)}"
            content, status = content[start : last + 1], 206
        return self._send(status, content, headers, path, start, fault=fault)

    def _send(self, status: int, content: bytes, headers: dict[str, str], path: str, start: int, *,
              fault: str = "") -> None:  # fmt: skip
        self.send_head(status, len(content), headers | ({"Content-Encoding": "gzip"} if fault == "gzip" else {}))
        if fault in ("truncate", "close"):
            content = content[: len(content) // 2] if fault == "truncate" else b""
            self.close_connection = True
        with self.served.lock:
            self.served.requests.append(Request(path, start, len(content), status))
        try:
            for place in range(len(content) if fault == "drip" else 0):
                self.wfile.write(content[place : place + 1])
                time.sleep(0.005)
            self.wfile.write(b"" if fault == "drip" else content)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # a client may stop early
