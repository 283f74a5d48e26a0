"""Provenance of result files: date, commit, machine, versions and command, in a `provenance.json` beside them.

    python -m benchmarks.provenance FILE --command "actmat demo"     # of a file that was just made by that command

Every program that writes a result calls `record`. A block names its file's SHA-256, so that a file that changes without
a new block is found (`tests/benchmarks/test_results.py`). `lacks` names what is not known. `commit_of` says what the
commit is of: of results that are older than these blocks, of what stored the file; of scores, of what collected them
from a cache, where each line names the commit of its run, or that one is not known.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

EVIDENCE = Path(__file__).resolve().parents[1]
"""Folder in which the programs run: `python -m benchmarks.NAME`."""
REPOSITORY = EVIDENCE.parent
LEDGER = "provenance.json"
FACTS = ("date", "commit", "machine", "versions", "command")
"""What every result is to say."""
COLLECTED = "the collection from the cache"
"""What a commit may be of: lines of such a file name the commits of their runs."""
LIBRARIES = ("actmat", "torch", "numpy", "safetensors", "transformers", "peft", "scikit-learn", "scipy", "diffusers")


def processor() -> str:
    """Name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def machine() -> dict[str, Any]:
    """Processor, cores, memory in bytes and system."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"processor": processor(), "cores": os.cpu_count(), "memory_b": memory, "system": platform.system()}


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that are installed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git(*words: str, root: Path = REPOSITORY) -> str:
    """What a command of git prints.

    Raises:
        CalledProcessError: it fails.
    """
    return subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=True).stdout.strip()


def commit(root: Path = REPOSITORY) -> str | None:
    """The checked-out commit, with `+changes` if source files differ from it; None outside of a repository."""
    try:
        changed = git("status", "--porcelain", "-uno", "--", "*.py", "*.toml", root=root)
        return git("rev-parse", "HEAD", root=root) + "+changes" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return None


def sha256(path: Path) -> str:
    """Of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def block(command: str, **more: Any) -> dict[str, Any]:
    """Provenance of a result of now.

    Args:
        command: without paths of this machine.
        more: further facts.
    """
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "commit_of": "the run",
        "machine": machine(),
        "versions": versions(),
        "command": command,
        **more,
    }
    lacks = [fact for fact in FACTS if not found[fact]]
    return found | {"lacks": lacks + ["commit: the tree had changes"] * str(found["commit"]).endswith("+changes")}


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Blocks of the result files of a folder, by name."""
    path = folder / LEDGER
    found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def write(path: Path, provenance: Mapping[str, Any]) -> None:
    """Put the block of one result file in place of an older one."""
    blocks = read(path.parent) | {path.name: {"sha256": sha256(path), **provenance}}
    text = json.dumps(dict(sorted(blocks.items())), indent=1)
    (path.parent / LEDGER).write_text(text + "\n", encoding="utf-8")


def record(path: Path, command: str, **more: Any) -> None:
    """Write the block of a result file that was just made."""
    write(path, block(command, **more))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--command", required=True, help="the one that made them, without paths of this machine")
    parser.add_argument("--note", help="anything else that a reader must know")
    given = parser.parse_args()
    for path in given.files:
        record(path, given.command, **({"note": given.note} if given.note else {}))


if __name__ == "__main__":
    main()
