"""What every benchmark needs: facts of the machine, children measured from outside, medians, result files.

    python -m benchmarks.common            # prints the facts of this machine, writes results/machine.json

Units are in the names: `_s` seconds, `_b` bytes, `_gbps` 1e9 bytes per second, `_gflops` 1e9 operations per second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.provenance import EVIDENCE, REPOSITORY, processor, record

WORK = EVIDENCE / "work"
RESULTS = EVIDENCE / "results"
SAMPLE_S = 0.020
GIB = 1 << 30
SOURCE = {"PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{EVIDENCE}"}
"""Variables with which a child imports this tree, and these programs."""

# Children


@dataclass(frozen=True)
class Run:
    """One child process, measured from outside.

    Args:
        wall_s: from start to exit.
        peak_anonymous_b: largest sum of RssAnon over the process and its descendants, sampled every 20 ms. Pages
            of files (mapped checkpoints, page cache) are not counted: the kernel can drop them.
        cpu_s: user and system time of the process and of the descendants that it waited for.
        peak_resident_b: as `peak_anonymous_b`, of VmRSS: mapped files are counted.
        read_b: read from the disk, past the page cache, also through mapped files.
        marked_s: from start to the first line with a mark; 0: there was none.
    """

    wall_s: float
    peak_anonymous_b: int
    cpu_s: float = 0.0
    peak_resident_b: int = 0
    read_b: int = 0
    marked_s: float = 0.0


def measure(command: Sequence[str | Path], mark: str = "\0", **environment: str) -> Run:
    """Run a command to its end.

    A child may write bytecode of the modules that it imports, and reads it the next time, as an installed package does:
    compiling the sources in every process would be half of a second, more in the tree with more files.

    Raises:
        RuntimeError: it failed; the message ends with its last lines.
    """
    started = time.perf_counter()
    child = subprocess.Popen(
        [str(c) for c in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", **environment},
    )
    peaks = dict.fromkeys(("RssAnon", "VmRSS"), 0)
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            found = [memory_bytes(pid) for pid in family(child.pid)]
            for field in peaks:
                peaks[field] = max(peaks[field], sum(memory.get(field, 0) for memory in found))

    sampler = threading.Thread(target=sample)
    sampler.start()
    assert child.stdout is not None
    said, marked = b"", 0.0
    with child.stdout:
        for line in child.stdout:
            said += line
            marked = marked or (time.perf_counter() - started) * (mark.encode() in line)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - started
    done.set()
    sampler.join()
    if child.returncode:
        tail = said.decode(errors="replace")[-3000:]
        raise RuntimeError(f"exit status {child.returncode} of {' '.join(map(str, command))}\n{tail}")
    return Run(wall, peaks["RssAnon"], used.ru_utime + used.ru_stime, peaks["VmRSS"], 512 * used.ru_inblock, marked)


def family(pid: int) -> list[int]:
    """A process and its descendants, as far as they still live."""
    found = [pid]
    for parent in found:
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                found += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def memory_bytes(pid: int) -> dict[str, int]:
    """Sizes of one process's memory by their names in `/proc`, such as RssAnon; empty when it has gone."""
    found = {}
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.endswith(" kB"):
                field, size, _ = line.split()
                found[field.rstrip(":")] = int(size) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def alternate(runs: dict[str, Callable[[], Run]], repeats: int) -> dict[str, list[Run]]:
    """Run every entry `repeats` times, in turn, so that a drift of the machine meets all alike."""
    found: dict[str, list[Run]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name, run in runs.items():
            os.sync()
            found[name].append(run())
            last = found[name][-1]
            print(f"  {repeat + 1}/{repeats} {name:34} {last.wall_s:8.2f} s {last.peak_anonymous_b / GIB:7.2f} GiB")
    return found


def actmat_command(python: str | Path = sys.executable) -> list[str]:
    """The command line of the library under test, in the given interpreter."""
    return [str(python), "-c", "import sys; from actmat.cli.main import main; sys.exit(main())"]


def fresh(path: Path) -> Path:
    """The path, with nothing there."""
    if path.exists():
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# Times inside this process


def timed(work: Callable[[], object], repeats: int = 3) -> float:
    """Median seconds of `work()`, after one call that is not counted."""
    work()
    return statistics.median(once(work) for _ in range(repeats))


def once(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# The machine


def machine_facts(folder: Path = WORK, *, size: int = 2048, eigh_size: int = 1024) -> dict[str, Any]:
    """Rates against which a time can be judged: products, eigendecomposition, memory, disk, page cache."""
    facts: dict[str, Any] = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_b": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0],
    }
    for threads in (1, 2):
        for dtype, name in ((torch.float32, "f32"), (torch.float64, "f64")):
            facts[f"matmul_{name}_{threads}t_gflops"] = matmul_rate(size, dtype, threads) / 1e9
            facts[f"eigh_{eigh_size}_{name}_{threads}t_s"] = eigh_time(eigh_size, dtype, threads)
    return facts | memory_rates() | disk_rates(folder)


def matmul_rate(size: int, dtype: torch.dtype, threads: int) -> float:
    """Operations per second of a square product."""
    with torch_threads(threads):
        a, b = (torch.rand(size, size, dtype=dtype) for _ in range(2))
        return 2 * size**3 / timed(lambda: a @ b)


def eigh_time(size: int, dtype: torch.dtype, threads: int) -> float:
    """Seconds of one symmetric eigendecomposition with vectors."""
    with torch_threads(threads):
        a = torch.rand(size, size, dtype=dtype)
        s = a @ a.mT
        return timed(lambda: torch.linalg.eigh(s), repeats=1 if size > 2000 else 3)


def memory_rates(size: int = 1 << 30) -> dict[str, float]:
    """Bandwidths of one thread that fills memory fresh from the kernel, and the same memory again."""
    with torch_threads(1):
        fresh = once(lambda: torch.empty(size, dtype=torch.uint8).fill_(1))
        kept = torch.empty(size, dtype=torch.uint8).fill_(1)
        again = timed(lambda: kept.fill_(2))
    return {"memory_first_touch_gbps": size / fresh / 1e9, "memory_fill_gbps": size / again / 1e9}


def disk_rates(folder: Path, size: int = 1 << 30) -> dict[str, float]:
    """Bandwidths of the file system that holds `folder`: synced writes, reads past the cache, reads from it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "disk-rate"
    piece = bytearray(os.urandom(1 << 20)) * 16

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for _ in range(size // len(piece)):
                file.write(piece)
            os.fsync(file.fileno())

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass

    def read_from_disk() -> None:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
        read()

    rates = {
        "disk_write_synced_gbps": size / timed(write) / 1e9,
        "disk_read_gbps": size / timed(read_from_disk) / 1e9,
        "page_cache_read_gbps": size / timed(read) / 1e9,
    }
    path.unlink()
    return rates


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many threads of torch inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Results


def write_result(name: str, rows: Sequence[dict[str, Any]], path: Path | None = None, **more: Any) -> Path:
    """`results/NAME.json` (or `path`): rows of a table, the command that made them, the machine and its load.

    Its provenance goes to `provenance.json` beside it.
    """
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    result = {
        "benchmark": name,
        "command": own_command(),
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "load_after": round(os.getloadavg()[0], 2),
        **more,
        "rows": list(rows),
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    record(path, str(result["command"]), load_after=result["load_after"])
    return path


def read_result(name: str, folder: Path | None = None) -> dict[str, Any]:
    """The contents of `results/NAME.json`."""
    found: dict[str, Any] = json.loads(((folder or RESULTS) / f"{name}.json").read_text(encoding="utf-8"))
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines; none if it is missing."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def largest_difference(ours: Path, theirs: Path) -> float:
    """`max over tensors of ||a - b||_F / ||b||_F` of two checkpoints, in float64.

    Raises:
        RuntimeError: they do not hold the same tensors.
    """
    here, there = stored_tensors(ours), stored_tensors(theirs)
    if here.keys() != there.keys():
        raise RuntimeError(f"{ours} and {theirs} hold different tensors: {sorted(here.keys() ^ there.keys())[:5]}")
    return max((relative_error(tensor, there[name]) for name, tensor in here.items()), default=0.0)


def borrowing_python(place: Path, packages: Sequence[str]) -> str:
    """The interpreter of an environment with these packages, and all others of this one; made where it is not there."""
    python = place / "bin" / "python"
    borrowed = place / sysconfig.get_path("purelib", vars={"base": ""}).lstrip("/") / "zz_borrowed.pth"
    if not borrowed.exists():
        venv.create(place, symlinks=True, with_pip=False)
        install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
        subprocess.run([*install, *packages], check=True)
        seen = [p for p in sys.path if p.endswith("site-packages")]  # after its own packages, which go before them
        borrowed.write_text("\n".join(seen) + "\n")
    return str(python)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius distance in float64; infinite for other shapes."""
    if found.shape != expected.shape:
        return float("inf")
    a, b = found.double(), expected.double()
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b).clamp(min=1e-300))


def own_command() -> str:
    """The command of this process, without paths of this machine."""
    return shlex.join(["python", "-m", f"benchmarks.{_program(Path(sys.argv[0]))}", *without_places(sys.argv[1:])])


def _program(path: Path) -> str:
    """Module that was run, below `benchmarks`; of a package, its own name.

    >>> _program(Path("/x/benchmarks/evidence/folders.py")), _program(Path("/x/benchmarks/evidence/__main__.py"))
    ('evidence.folders', 'evidence')
    """
    parts = [*path.parent.parts, path.stem]
    below = parts[len(parts) - parts[::-1].index("benchmarks") :] if "benchmarks" in parts else [path.stem]
    return ".".join(p for p in below if p != "__main__")


def without_places(arguments: Sequence[str]) -> list[str]:
    """A command line without the paths of one machine: `--flag /some/where` becomes `--flag FLAG`.

    The interpreter of a peer, which is made where none is given, is left out.
    """
    said: list[str] = []
    for flag, value in zip(["", *arguments], arguments, strict=False):
        if flag == "--mergekit-python" or value == "--mergekit-python":
            continue
        said.append(flag.strip("-").upper().replace("-", "_") if value.startswith("/") else value)
    return said


def program(doc: str | None, name: str, repeats: int = 0) -> argparse.ArgumentParser:
    """The command line of a benchmark, with the name of its result and, unless 0, the number of its repeats."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default=name, help="name of the result file")
    if repeats:
        parser.add_argument("--repeats", type=int, default=repeats)
    return parser


def finish(name: str, rows: Sequence[dict[str, Any]], columns: Sequence[str], **more: Any) -> None:
    """Print a table and write its result file."""
    print(markdown(rows, columns))
    print(write_result(name, rows, columns=columns, **more))


def print_table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Rows as a Markdown table."""
    print("\n" + markdown(rows, columns))


def markdown(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """A Markdown table of some columns; seconds, GiB and ratios with three digits."""
    lines = ["| " + " | ".join(title(c) for c in columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(c, row.get(c)) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def aligned(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """The same table for a terminal, as narrow as it can be."""
    lines = [[title(c) for c in columns], *([cell(c, row.get(c)) for c in columns] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def title(column: str) -> str:
    for suffix, unit in (("_gflops", "GFLOP/s"), ("_gbps", "GB/s"), ("_s", "s"), ("_b", "GiB")):
        if column.endswith(suffix):
            return f"{column.removesuffix(suffix).replace('_', ' ')}, {unit}"
    return column.replace("_", " ")


def cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column.endswith("_b"):
        return f"{value / GIB:.3g}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=WORK, help="on the file system to be measured")
    facts = machine_facts(parser.parse_args().folder)
    rows = [{"fact": key, "value": value} for key, value in facts.items()]
    print(markdown(rows, ["fact", "value"]))
    print(write_result("machine", rows))


if __name__ == "__main__":
    main()
