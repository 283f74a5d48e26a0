"""Measure the wheel: its size, the time of an import, and what every extra installs.

    python -m benchmarks.wheel --python python3.11 python3.12 python3.13

Builds the wheel of a clean copy. For every interpreter it makes an environment with the wheel and the dependencies
but torch (`import actmat` and `actmat --help` load none), and times new processes there, by their time on a core. For
every extra pip resolves the wheel with the versions of constraints.txt, without installing anything; the sizes are
those of the packages' files as installed, of this environment where it has them. The outcome goes to
benchmarks/results/wheel.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "wheel.json"
RUNS = 5
"""Processes that are timed; the least time counts, since other work slows a run and nothing makes one faster."""
BUILD = "import sys; from setuptools import build_meta as b; print(b.build_wheel(sys.argv[1]))"
QUIET = ("--quiet", "--disable-pip-version-check", "--no-compile")
TOOLS = ("dev", "docs")
"""Extras for those who work on actmat."""


def build(place: Path) -> Path:
    """The wheel of a clean copy."""
    copy, out = place / "copy", place / "out"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, copy / name)
    out.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=copy, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def contents(wheel: Path) -> dict[str, Any]:
    """Bytes and files of the wheel, by the first folder below the package, the largest first."""
    with zipfile.ZipFile(wheel) as archive:
        files = archive.infolist()
    by: dict[str, int] = {}
    for file in files:
        parts = file.filename.split("/")
        folder = "/".join(parts[1:3] if parts[1:2] == ["extras"] else parts[1:2]) if len(parts) > 2 else "other files"
        by[folder] = by.get(folder, 0) + file.compress_size
    largest = dict(sorted(by.items(), key=lambda pair: -pair[1])[:5])
    return {"bytes": wheel.stat().st_size, "files": len(files), "largest": largest}


def least_ms(command: list[str], environment: dict[str, str]) -> float:
    """Least time on a core of a process in milliseconds; the first, which compiles, is left out.

    Waiting does not count, so that the load of the machine matters little.
    """
    times = []
    for _ in range(RUNS + 1):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(1000 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime))
    return round(min(times[1:]), 1)


def time_imports(python: str, wheel: Path, place: Path) -> dict[str, Any]:
    """Times in an environment with the wheel and its dependencies but torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [d for d in project["dependencies"] if not d.startswith("torch")]
    subprocess.run([python, "-m", "venv", str(place)], check=True)
    inside = str(place / "bin" / "python")
    subprocess.run([inside, "-m", "pip", "install", *QUIET, *needs], check=True)
    subprocess.run([inside, "-m", "pip", "install", *QUIET, "--no-deps", str(wheel)], check=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    version = subprocess.run([inside, "-c", "import platform; print(platform.python_version())"], check=True,
                             capture_output=True, text=True).stdout.strip()  # fmt: skip
    return {
        "python": version,
        "start_ms": least_ms([inside, "-c", ""], environment),
        "import_ms": least_ms([inside, "-c", "import actmat"], environment),
        "help_ms": least_ms([str(place / "bin" / "actmat"), "--help"], environment),
        "merge_help_ms": least_ms([str(place / "bin" / "actmat"), "merge", "--help"], environment),
    }


def resolved(wheel: Path, extra: str) -> dict[str, str]:
    """Name -> version of all that pip would install of the wheel with an extra, itself left out."""
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    options = ["--dry-run", "--ignore-installed", "--quiet", "--disable-pip-version-check", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *options, "-c", str(ROOT / "constraints.txt"), wanted]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = {i["metadata"]["name"]: i["metadata"]["version"] for i in json.loads(done.stdout)["install"]}
    return {plain(n): v for n, v in found.items() if plain(n) != "actmat"}


def plain(name: str) -> str:
    """Normal form of a distribution's name.

    >>> plain("Ruamel.YAML_clib")
    'ruamel-yaml-clib'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def sizes(packages: dict[str, str], place: Path) -> dict[str, int]:
    """Name -> bytes of the installed files; packages that this environment lacks are installed into a folder."""
    known = {plain(d.metadata["Name"]): d for d in metadata.distributions()}
    missing = [f"{n}=={v}" for n, v in packages.items() if n not in known]
    if missing:
        command = [sys.executable, "-m", "pip", "install", *QUIET, "--no-deps", "--target", str(place), *missing]
        subprocess.run(command, check=True)
        known |= {plain(d.metadata["Name"]): d for d in metadata.distributions(path=[str(place)])}
    return {n: _bytes(known[n]) for n in packages}


def _bytes(found: metadata.Distribution) -> int:
    files = (Path(str(found.locate_file(f))) for f in found.files or () if f.suffix != ".pyc")
    return sum(f.stat().st_size for f in files if f.is_file())


def extras_of(names: Iterable[str], wheel: Path, place: Path) -> dict[str, dict[str, Any]]:
    """Extra -> number of packages that it adds to those of actmat itself, their bytes, and the largest three."""
    base = resolved(wheel, "")
    found = {"": base} | {n: {p: v for p, v in resolved(wheel, n).items() if p not in base} for n in names}
    every = sizes({p: v for packages in found.values() for p, v in packages.items()}, place)
    return {
        extra: {
            "packages": len(packages),
            "bytes": sum(every[p] for p in packages),
            "largest": sorted(packages, key=lambda p: -every[p])[:3],
        }
        for extra, packages in found.items()
    }


def wheel_table(part: str, table: Callable[[list[str], list[list[str]]], str]) -> str:
    """Tables of the page: `extras`, `times`."""
    record = json.loads(RESULTS.read_text(encoding="utf-8"))
    if part == "times":
        rows = [[r["python"], *(f"{r[k]:.0f}" for k in ("start_ms", "import_ms", "help_ms", "merge_help_ms"))]
                for r in record["times"]]  # fmt: skip
        head = ["Python", "`python -c ''`, ms of a core", "`import actmat`", "`actmat --help`", "`actmat merge --help`"]
        size = f"The wheel has {record['wheel']['bytes'] / 1e6:.2f} MB in {record['wheel']['files']} files.\n\n"
        return size + table(head, rows)
    rows = []
    for extra, r in record["extras"].items():
        largest = ", ".join(f"`{n}`" for n in r["largest"])
        rows.append([f"`actmat[{extra}]`" if extra else "`actmat`", f"{'+' if extra else ''}{r['packages']}",
                     f"{'+' if extra else ''}{r['bytes'] / 1e6:.0f}", largest])  # fmt: skip
    return table(["installed", "packages", "MB", "largest"], rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters to time imports with")
    parser.add_argument("--only", choices=["extras", "times"], help="keep the other half of the record")
    given = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = sorted(set(project["optional-dependencies"]) - set(TOOLS), key=lambda n: (n == "all", n))
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        record: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if given.only else {}
        record["wheel"] = contents(wheel)
        if given.only != "times":
            record["extras"] = extras_of(names, wheel, Path(folder) / "more")
        if given.only != "extras":
            places = [(python, Path(folder) / str(n)) for n, python in enumerate(given.python)]
            record["times"] = [time_imports(python, wheel, place) for python, place in places]
    RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
