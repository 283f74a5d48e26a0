"""Where does the time of an elementwise merge go? The passes over one tensor of an average, one after the other.

    python -m benchmarks.passes
    python -m benchmarks.passes --experts 8 --chunks 64

The operations are those of the engine, on its chunks, on one thread: bfloat16 files, float32 deltas. Times are
processor time of the thread (nanoseconds per entry, all experts together); `floor` marks what no merge can leave out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.raw import raw_bytes
from actmat.planning.regions import CHUNK
from benchmarks.common import WORK, markdown, torch_threads, write_result

COLUMNS = ("pass", "ns_per_entry", "share", "floor")
FLOOR = {"read", "hash inputs", "hash output", "write"}


class Passes:
    """Processor seconds by the name of a pass."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count what is done inside."""
        began = time.thread_time()
        yield
        self.seconds[name] += time.thread_time() - began


def average(files: list[Path], out: Path, chunks: int, passes: Passes) -> None:
    """The average of all files but the first, which is the base."""
    raw, base, cast = (torch.empty(CHUNK, dtype=torch.bfloat16) for _ in range(3))
    wide, delta, total, merged = (torch.empty(CHUNK) for _ in range(4))
    hashes, written = [ContentHash() for _ in files], ContentHash()
    handles = [os.open(path, os.O_RDONLY) for path in files]
    target = os.open(out, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    for chunk in range(chunks):
        offset = chunk * CHUNK * raw.itemsize
        for k, handle in enumerate(handles):
            into = raw if k else base
            with passes("read"):
                os.preadv(handle, [raw_bytes(into)], offset)
            with passes("hash inputs"):
                hashes[k].update(raw_bytes(into))
            with passes("widen to float32"):
                (delta if k else wide).copy_(into)
            if k:
                with passes("subtract the base"):
                    torch.sub(delta, wide, out=delta)
                with passes("check that all is finite"):
                    float(delta.sum())
                with passes("add up"):
                    if k == 1:
                        torch.mul(delta, 1.0, out=total)
                    else:
                        total.add_(delta, alpha=1.0)
        with passes("divide"):
            total.div_(len(files) - 1)
        with passes("check that all is finite"):
            float(total.sum())
        with passes("add the base"):
            torch.add(wide, total, out=merged)
        with passes("round to bfloat16"):
            cast.copy_(merged)
        with passes("check that all is finite"):
            float(cast.sum())
        with passes("hash output"):
            written.update(raw_bytes(cast))
        with passes("write"):
            os.pwrite(target, raw_bytes(cast), offset)
    for handle in (*handles, target):
        os.close(handle)


def main() -> None:
    """Make the files, merge them three times, and write benchmarks/results/passes.json of the last two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=128, help="chunks of 524,288 entries")
    parser.add_argument("--name", default="passes", help="name of the result file")
    given = parser.parse_args()
    folder = WORK / "passes"
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{k}" for k in range(given.experts + 1)]
    for k, path in enumerate(files):
        torch.manual_seed(k)
        path.write_bytes(b"".join(bytes(raw_bytes(torch.randn(CHUNK).bfloat16())) for _ in range(given.chunks)))
    load, passes = os.getloadavg()[0], Passes()
    with torch_threads(1):
        average(files, folder / "out", given.chunks, Passes())
        for _ in range(2):
            average(files, folder / "out", given.chunks, passes)
    for path in (*files, folder / "out"):
        path.unlink()
    total, entries = sum(passes.seconds.values()), 2 * given.chunks * CHUNK
    rows: list[dict[str, Any]] = [
        {"pass": name, "ns_per_entry": 1e9 * seconds / entries, "share": seconds / total, "floor": name in FLOOR}
        for name, seconds in passes.seconds.items()
    ]
    least = sum(row["ns_per_entry"] for row in rows if row["floor"])
    rows.append({"pass": "all", "ns_per_entry": 1e9 * total / entries, "share": 1.0, "floor": False})
    rows.append({"pass": "floor", "ns_per_entry": least, "share": least * entries / total / 1e9, "floor": True})
    print(markdown(rows, COLUMNS))
    print(write_result(given.name, rows, experts=given.experts, load_before=load, columns=COLUMNS))


if __name__ == "__main__":
    main()
