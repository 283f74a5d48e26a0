"""Merging tools side by side: cost, exactness, refusals, and what faults leave behind.

    python -m benchmarks.tools                      # about eight minutes; makes an environment per tool
    python -m benchmarks.tools --large              # also a Llama of 1.1 B parameters, by average and TIES
    python -m benchmarks.tools --tools actmat peft --faults-only

Every merge is a process of its own on two threads, imports included, computing in float32, with inputs out of the page
cache. *read*: from the disk. *error*: largest distance of a tensor's change from the same method in float64, relative
in the Frobenius norm, of the large Llama in its first layer; DARE draws random masks and has none. Parameters are those
of `inputs.py`; a tool's own words of a refusal are shortened to their last line.

Faults: the process is killed with SIGKILL when half of the output's bytes have been written, then every weight file at
the output's path is loaded. Damaged inputs: an expert without its last kilobyte; with one letter of a tensor's name in
the header changed; with one NaN.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from benchmarks.common import (
    SOURCE,
    WORK,
    borrowing_python,
    fresh,
    measure,
    program,
    read_result,
    write_result,
)
from benchmarks.tools import inputs

HERE = Path(__file__).parent
OUT = WORK / "out" / f"tools-{os.getpid()}"
TOOLS = ("actmat", "mergekit", "peft", "sd_mecha", "mermod")
KINDS = ("Llama", "ViT", "UNet", "three LoRA")
LARGE = "Llama 1.1 B"
METHODS = ("average", "task_arithmetic", "ties", "dare", "slerp")
FEW = ("average", "ties")
"""Methods on other inputs than the small Llama."""
COLUMNS = ("input", "method", "tool", "wall_s", "cpu_s", "peak_anonymous_b", "read_b", "error", "refused")
NO_METHOD = "no such method"
LIMIT_S = 120
"""After which a merge is ended; a large one after 300 s."""
FAULTS = ("tool", "killed while writing", "cut", "renamed", "NaN")
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", **SOURCE}


class Tool:
    """One tool: its adapter file, and the interpreter of its environment."""

    def __init__(self, name: str, environments: Path) -> None:
        self.name = name
        self.adapter: ModuleType = importlib.import_module(f"benchmarks.tools.with_{name}")
        packages = self.adapter.INSTALL
        self.python = borrowing_python(environments / name, packages) if packages else sys.executable
        ask = f"from importlib.metadata import version; print(version({self.adapter.DISTRIBUTION!r}))"
        self.version = subprocess.run(
            [self.python, "-c", ask], capture_output=True, text=True, check=True
        ).stdout.strip()

    def command(self, method: str, base: Path, experts: Sequence[Path], out: Path, dtype: str) -> list[str]:
        """The command of one merge."""
        request = {"method": method, "base": str(base), "experts": list(map(str, experts)), "out": str(out)}
        return [self.python, str(HERE / "worker.py"), self.name, json.dumps(request | {"dtype": dtype})]


def forget(folders: Sequence[Path]) -> None:
    """Drop the files from the page cache."""
    for path in (p for folder in folders for p in folder.glob("*.safetensors")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def last_words(error: Exception) -> str:
    """The last line of a failed process that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[-1].replace(str(WORK), "").split())[:160] if lines else type(error).__name__


def merge_row(tool: Tool, kind: str, method: str) -> dict[str, Any]:
    """Cost and error of one merge, or why the tool refuses it; PEFT states that it takes adapters only."""
    base, experts = inputs.make(kind, WORK / "tools" / kind)
    experts = experts[:2] if method == "slerp" else experts
    out, row = fresh(OUT), {"input": kind, "method": method, "tool": tool.name}
    if method not in tool.adapter.METHODS or (kind != "three LoRA" and tool.name == "peft"):
        return row | {"refused": NO_METHOD}
    forget([base, *experts])
    limit = 300 if kind == LARGE else LIMIT_S
    try:
        command = tool.command(method, base, experts, out, "bfloat16" if kind == LARGE else "float32")
        run = measure(["timeout", str(limit), *command], **OFFLINE)
        part = ".layers.0." if kind == LARGE else ""
        found = inputs.error(method, out, base, experts, part) if method in inputs.REFERENCES else None
    except KeyError as error:
        return row | {"refused": f"merged, but without {error}"}
    except (RuntimeError, SafetensorError) as error:
        ended = "exit status 124" in str(error)  # of `timeout`
        return row | {"refused": f"not done after {limit} s" if ended else last_words(error)}
    costs = {"wall_s": run.wall_s, "cpu_s": run.cpu_s, "peak_anonymous_b": run.peak_anonymous_b, "read_b": run.read_b}
    return row | costs | ({} if found is None else {"error": found})


# Faults


def written_bytes(pid: int) -> int:
    """Bytes that a process has written so far; 0 when it has gone."""
    try:
        return int(Path(f"/proc/{pid}/io").read_text().partition("wchar: ")[2].split()[0])
    except (OSError, IndexError):
        return 0


def left_behind(out: Path, complete: int) -> str:
    """The state of an output's folder after a kill."""
    files = sorted(out.rglob("*.safetensors")) if out.exists() else []
    if not files:
        return "nothing at the output's path"
    loaded = 0
    for file in files:
        try:
            loaded += len(load_file(file))
        except (SafetensorError, OSError):
            return "a file that does not load"
    return "complete" if loaded == complete else f"files that load, with {loaded} of {complete} tensors"


def killed(tool: Tool, kind: str) -> str:
    """What is left after SIGKILL, once half of the output is written."""
    base, experts = inputs.make(kind, WORK / "tools" / kind)
    out, half = fresh(OUT), sum(f.stat().st_size for f in experts[0].glob("*.safetensors")) // 2
    command = tool.command("average", base, experts, out, "float32")
    child = subprocess.Popen(
        command, env={**os.environ, **OFFLINE}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while child.poll() is None and written_bytes(child.pid) < half:
        time.sleep(0.0005)
    if child.poll() is not None:
        return "not caught"
    child.send_signal(signal.SIGKILL)
    child.wait()
    return left_behind(out, len(inputs.stored_tensors(experts[0])))


def cut(file: Path) -> None:
    """Remove the last kilobyte."""
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1024)


def renamed(file: Path) -> None:
    """Change one letter of the first name in the header."""
    data = bytearray(file.read_bytes())
    place = data.index(b"layer")
    data[place] ^= 1
    file.write_bytes(data)


def with_nan(file: Path) -> None:
    """Replace one entry of the last tensor by NaN."""
    tensors = load_file(file)
    tensors[sorted(tensors)[-1]].flatten()[0] = torch.nan
    save_file(tensors, file, {"format": "pt"})


DAMAGES: dict[str, Callable[[Path], None]] = {"cut": cut, "renamed": renamed, "NaN": with_nan}


def damaged(tool: Tool, kind: str, damage: str) -> str:
    """Outcome of a merge whose first expert is damaged."""
    base, experts = inputs.make(kind, WORK / "tools" / kind)
    out, copy = fresh(OUT), fresh(OUT.with_name(f"{OUT.name}-damaged"))
    shutil.copytree(experts[0], copy)
    DAMAGES[damage](next(copy.glob("*.safetensors")))
    try:
        measure(tool.command("average", base, [copy, *experts[1:]], out, "float32"), **OFFLINE)
    except RuntimeError:
        return "refused" if left_behind(out, 0).startswith("nothing") else "refused, files left"
    merged = inputs.stored_tensors(out)
    if any(not bool(torch.isfinite(t).all()) for t in merged.values()):
        return "merged, with NaN"
    return "merged" if damage != "renamed" else f"merged, {len(merged)} tensors"


def fault_row(tool: Tool) -> dict[str, Any]:
    """What faults leave behind."""
    kind = "three LoRA" if tool.name == "peft" else "Llama"
    found = {"tool": tool.name, "killed while writing": killed(tool, kind)}
    return found | {damage: damaged(tool, kind, damage) for damage in DAMAGES}


def main() -> None:
    """Command line."""
    parser = program(__doc__, "tools")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--inputs", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--large", action="store_true", help="a Llama of 1.1 B parameters, and nothing else")
    parser.add_argument("--faults-only", action="store_true")
    parser.add_argument("--merges-only", action="store_true")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the result file")
    parser.add_argument("--environments", type=Path, default=WORK / "environments", help="where they are made")
    given = parser.parse_args()
    tools = {name: Tool(name, given.environments) for name in given.tools}
    versions = {t.adapter.DISTRIBUTION: t.version for t in tools.values()} | {"torch": version("torch")}
    kinds = (LARGE,) if given.large else () if given.faults_only else given.inputs
    name = f"{given.name}-large" if given.large else given.name
    rows = read_result(name)["rows"] if given.resume else []
    there = {(row["input"], row["method"], row["tool"]) for row in rows}
    for method, kind, tool in itertools.product(METHODS, kinds, given.tools):
        if (kind, method, tool) not in there and method in (METHODS if kind == "Llama" else FEW):
            rows.append(merge_row(tools[tool], kind, method))
            print(*rows[-1].values(), flush=True)
            write_result(name, rows, columns=COLUMNS, versions=versions)
    faults: list[dict[str, Any]] = []
    for tool in () if given.large or given.merges_only else given.tools:
        faults.append(fault_row(tools[tool]))
        print(*faults[-1].values(), flush=True)
        write_result(f"{name}-faults", faults, columns=FAULTS, versions=versions)


if __name__ == "__main__":
    main()
