"""The price of inputs on a web server: the same merge over local files and over HTTP on 127.0.0.1.

    python -m benchmarks.remote
    python -m benchmarks.remote --latency 0.02      # seconds before every answer

Both kinds of run alternate, and must write the same bytes. The server counts: requests for each shard, and the bytes
sent against the bytes of all shards. Its time is part of the price: it shares the cores.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.common import WORK, Run, alternate, finish, merge_words, merged, program, summary, weights_digest
from benchmarks.make_llama import add_size_arguments, home, make_family, size_from

COLUMNS = ("inputs", "method", "wall_s", "ratio", "peak_anonymous_b", "shards", "requests_per_shard", "sent_over_size")
Sent = dict[str, list[int]]
"""Path -> bytes sent, request by request."""
RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@contextmanager
def served(root: Path, latency: float) -> Iterator[tuple[str, Sent]]:
    """URL of a server of a folder by ranges, and the bytes that it sends."""
    sent: Sent = defaultdict(list)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = 1 << 16

        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            time.sleep(latency)
            path = root / self.path.lstrip("/")
            if not path.is_file():
                return self.answer(404, b"", {})
            status = path.stat()
            wanted = RANGE.fullmatch(self.headers.get("Range", ""))
            first, last = (int(wanted[1]), int(wanted[2])) if wanted else (0, status.st_size)
            last = min(last, status.st_size - 1)
            with path.open("rb") as file:
                body = os.pread(file.fileno(), last - first + 1, first)
            sent[self.path].append(len(body))
            span = {"Content-Range": f"bytes {first}-{last}/{status.st_size}", "ETag": f'"{status.st_mtime_ns}"'}
            return self.answer(206, body, span)

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", sent
        finally:
            server.shutdown()


def main() -> None:
    parser = program(__doc__, "remote", 3)
    parser.add_argument("--methods", nargs="+", default=["average", "actmat"])
    parser.add_argument("--experts", type=int, default=2)
    parser.add_argument("--latency", type=float, default=0.0)
    add_size_arguments(parser)
    parser.set_defaults(hidden=1024, intermediate=2816, layers=4)
    given = parser.parse_args()
    size = size_from(given)
    base, experts = make_family(home(WORK, size, "bfloat16"), size, given.experts, dtype="bfloat16")
    folders = [Path(base), *map(Path, experts)]
    shards = {f"/{f.name}/{p.name}": p.stat().st_size for f in folders for p in f.glob("*.safetensors")}
    rows: list[dict[str, Any]] = []
    with served(folders[0].parent, given.latency) as (url, sent):
        for method in given.methods:
            rows += compare(method, folders, url, sent, shards, given.repeats)
    finish(given.name, rows, COLUMNS, parameters=size.parameters(), latency_s=given.latency)


def compare(
    method: str, folders: list[Path], url: str, sent: Sent, shards: dict[str, int], repeats: int
) -> list[dict[str, Any]]:
    """Rows of one method: over local files, and over HTTP."""
    places = {"local": [str(f) for f in folders], "http": [f"{url}/{f.name}" for f in folders]}
    outputs = {kind: WORK / "out" / f"remote-{kind}" for kind in places}
    traffic: dict[str, float] = {}

    def merge(kind: str) -> Run:
        base, *experts = places[kind]
        sent.clear()
        run = merged(merge_words(base, experts, method), outputs[kind])
        if kind == "http":
            sizes = [size for shard in shards for size in sent[shard]]
            traffic.update(
                requests_per_shard=len(sizes) / len(shards), sent_over_size=sum(sizes) / sum(shards.values())
            )
        return run

    runs = alternate({kind: lambda kind=kind: merge(kind) for kind in places}, repeats)
    if weights_digest(outputs["local"]) != weights_digest(outputs["http"]):
        raise SystemExit("the bytes depend on where the inputs are")
    found = {kind: summary(runs[kind]) for kind in places}
    rows = []
    for kind in places:
        row = {"inputs": kind, "method": method, "shards": len(shards), **found[kind]}
        row["ratio"] = row["wall_s"] / found["local"]["wall_s"]
        rows.append(row | (traffic if kind == "http" else {"requests_per_shard": 0, "sent_over_size": 0}))
    return rows


if __name__ == "__main__":
    main()
