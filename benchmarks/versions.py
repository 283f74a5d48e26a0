"""Try an interpreter, and the oldest or the newest dependencies, in an environment of its own.

    python -m benchmarks.versions --python python3.13 --which latest
    python -m benchmarks.versions --python python3.11 --which minimum
    python -m benchmarks.versions --which minimum --borrow-torch

Makes a virtual environment, installs the dependencies (not the extras) at the lower bounds of pyproject.toml or at the
newest releases, and runs tests that need nothing else: commands, recipes, formats, bytes of merges, the hub's client.
With `--borrow-torch`, torch (some gigabytes) is that of the environment that runs this, whose other packages can be
seen as well but stand behind those that are installed; tests of numerics alone are left out. The outcome goes to
benchmarks/results/versions.json, one entry for each interpreter and kind.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "TESTS", "pinned", "summary"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
TOOLS = ("pytest", "hypothesis", "numpy")
TESTS = (
    "tests/cli/test_commands.py",
    "tests/cli/test_messages.py",
    "tests/recipe/test_recipe_files.py",
    "tests/checkpoints/test_safetensors_files.py",
    "tests/checkpoints/test_writing.py",
    "tests/recovery/test_resume_states.py",
    "tests/remote/test_hub_push.py",
    "tests/methods/test_conformance.py",
)


OF_TORCH = ("tests/methods/test_conformance.py",)
"""Tests that depend on torch and on no other dependency."""


def pinned(dependencies: list[str], which: str) -> list[str]:
    """Requirements of pip: each lower bound as the version (`minimum`), or as they are (`latest`).

    >>> pinned(["torch>=2.6", "rich>=13"], "minimum")
    ['torch==2.6', 'rich==13']
    """
    return [d.replace(">=", "==") for d in dependencies] if which == "minimum" else dependencies


def summary(text: str) -> dict[str, int]:
    """Counts of pytest's last line.

    >>> summary("... 3 failed, 120 passed, 2 skipped in 9.1s")
    {'failed': 3, 'passed': 120, 'skipped': 2}
    """
    return {kind: int(n) for n, kind in re.findall(r"(\d+) (failed|passed|skipped|error)", text)}


def try_versions(python: str, which: str, place: Path, *, borrow_torch: bool = False) -> dict[str, Any]:
    """One entry of the results: versions, and what the tests said; `borrow_torch`: torch of this environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    subprocess.run([python, "-m", "venv", str(place)], check=True)
    inside = str(place / "bin" / "python")
    tried = [d for d in project["dependencies"] if not (borrow_torch and d.startswith("torch>="))]
    wanted = [*pinned(tried, which), *(() if borrow_torch else TOOLS)]
    entry: dict[str, Any] = {
        "which": which,
        "python": _told(inside, "import platform; print(platform.python_version())"),
    }
    install = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        return entry | {"passed": False, "why": done.stderr.strip().splitlines()[-1][:300]}
    if borrow_torch:  # after the installation, so that pip neither counts nor touches what is borrowed
        (folder,) = place.glob("lib/python3*/site-packages")
        (folder / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
        entry["borrowed"] = "torch"
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    names = [re.split(r"[>=<\[]", d)[0] for d in project["dependencies"]]
    entry["versions"] = json.loads(_told(inside, code, *names))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings="]
    command += [test for test in TESTS if not (borrow_torch and test in OF_TORCH)]
    tested = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    counts = summary(tested.stdout[-2000:])
    entry |= {"passed": tested.returncode == 0, "tests": counts}
    if tested.returncode:
        sys.stderr.write(tested.stdout[-6000:] + tested.stderr[-2000:])
        entry["why"] = [line for line in tested.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))][:8]
    return entry


def _key(entry: dict[str, Any]) -> tuple[str, str, str]:
    """Kind, minor version and what was borrowed of an entry: a new run replaces the old one."""
    return entry["which"], entry["python"].rpartition(".")[0], entry.get("borrowed", "")


def _told(python: str, code: str, *arguments: str) -> str:
    return subprocess.run([python, "-c", code, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--which", choices=("minimum", "latest"), default="latest")
    parser.add_argument("--borrow-torch", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="actmat-versions-") as folder:
        entry = try_versions(given.python, given.which, Path(folder) / "venv", borrow_torch=given.borrow_torch)
    before = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"] if RESULTS.exists() else []
    key = _key(entry)
    runs = sorted([r for r in before if _key(r) != key] + [entry], key=lambda r: (r["which"], r["python"]))
    RESULTS.write_text(json.dumps({"tests": TESTS, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(entry, indent=1))


if __name__ == "__main__":
    main()
