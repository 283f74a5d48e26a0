"""Try an interpreter, and the oldest or the newest dependencies, in an environment of its own.

    python -m benchmarks.versions --python python3.13 --which latest
    python -m benchmarks.versions --python python3.11 --which minimum
    python -m benchmarks.versions --which minimum --borrow-torch
    python -m benchmarks.versions --python python3.13 --without-torch
    python3 -m benchmarks.versions --system-torch            # where the distribution has a torch, such as python3-torch

Makes a virtual environment, installs the dependencies (not the extras) at the lower bounds of pyproject.toml or at the
newest releases, and runs tests that need nothing else: commands, recipes, formats, bytes of merges, the hub's client.
With `--borrow-torch`, torch (some gigabytes) and what only it needs are links to the environment that runs this; no
other package of that is seen. With `--system-torch` the environment sees the packages of the interpreter's own
installation, and installs the others. With `--without-torch`, for an interpreter that has no build of torch at hand,
all files are compiled and the commands run that need none (`WITHOUT_TORCH`). The outcome goes to
benchmarks/results/versions.json, one entry for each interpreter and kind.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.provenance import record

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
MERGEKIT = """\
merge_method: ties
base_model: base
models:
  - {model: a, parameters: {weight: 0.5, density: [0.3, 0.7]}}
  - {model: b, parameters: {weight: 0.5, density: 0.5}}
"""
TOOLS = ("pytest", "hypothesis", "numpy")
TESTS = (
    "tests/cli/test_commands.py",
    "tests/cli/test_flags.py",
    "tests/cli/test_json.py",
    "tests/recipe/test_recipe_files.py",
    "tests/recipe/test_mergekit_outputs.py",
    "tests/checkpoints/test_safetensors_files.py",
    "tests/checkpoints/test_writing.py",
    "tests/recovery/test_resume_states.py",
    "tests/checkpoints/test_hub_checkpoints.py",
    "tests/methods/test_contract.py",
    "tests/methods/test_actmat.py",
    "tests/e2e/test_short_forms.py",
)
"""Tests that import no package of the extras."""

WITHOUT_TORCH = (
    ("--version",),
    ("--help",),
    ("methods",),
    ("methods", "ties", "--json"),
    ("plan", "mergekit.yml", "--as-recipe"),
    *((name, "--help") for name in ("merge", "plan", "tune", "push", "inspect", "verify")),
)
"""Commands that load no torch, in a folder with the models and a configuration of tests/data/mergekit."""


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


def borrowed(names: Iterable[str], without: Collection[str]) -> dict[str, Path]:
    """What to link for distributions of this environment and all that they need: name in site-packages -> its place.

    Args:
        names: distributions.
        without: distributions that come from elsewhere, and are not followed.
    """
    found: dict[str, Path] = {}
    seen = {_plain(n) for n in without}
    waiting = [_plain(n) for n in names]
    while waiting:
        if (name := waiting.pop()) in seen:
            continue
        seen.add(name)
        try:
            here = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # an optional requirement, or one for other systems
        tops = {file.parts[0] for file in here.files or () if file.parts[0] not in ("..", "__pycache__")}
        found |= {top: Path(str(here.locate_file(top))) for top in tops}
        waiting += [_plain(need) for need in here.requires or () if "extra ==" not in need]
    return found


def _plain(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def try_versions(python: str, which: str, place: Path, *, torch: str = "installed") -> dict[str, Any]:
    """One entry of the results: versions, and what the tests said.

    Args:
        python: the interpreter.
        which: `minimum` or `latest`.
        place: where the environment goes.
        torch: `installed`, `borrowed` (that of this environment), `system` (the interpreter's own) or `none`.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    seen = ["--system-site-packages"] if torch == "system" else []
    subprocess.run([python, "-m", "venv", *seen, str(place)], check=True)
    inside = str(place / "bin" / "python")
    tried = [d for d in project["dependencies"] if torch == "installed" or not d.startswith("torch>=")]
    wanted = [*pinned(tried, which), *(TOOLS if torch in ("installed", "system") else ())]
    entry: dict[str, Any] = {
        "which": which,
        "python": _told(inside, "import platform; print(platform.python_version())"),
        "torch": torch,
    }
    install = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        return entry | {"passed": False, "why": done.stderr.strip().splitlines()[-1:]}
    if torch == "borrowed":  # after the installation, so that pip neither counts nor touches what is borrowed
        (folder,) = place.glob("lib/python3*/site-packages")
        for name, source in borrowed(("torch", *TOOLS), tried).items():
            if not (folder / name).exists():
                (folder / name).symlink_to(source)
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    names = [re.split(r"[>=<\[]", d)[0] for d in project["dependencies"] if torch != "none" or d in tried]
    entry["versions"] = json.loads(_told(inside, code, *names))
    return entry | (run_commands(inside, place.parent) if torch == "none" else run_tests(inside))


def run_tests(python: str) -> dict[str, Any]:
    """What pytest says of `TESTS`."""
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-o", "filterwarnings=", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
    found: dict[str, Any] = {"passed": done.returncode == 0, "tests": summary(done.stdout[-2000:])}
    if done.returncode:
        sys.stderr.write(done.stdout[-6000:] + done.stderr[-2000:])
        found["why"] = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))][:8]
    return found


def run_commands(python: str, folder: Path, first: Sequence[Path] = ()) -> dict[str, Any]:
    """Which of `WITHOUT_TORCH` fail, and whether every file compiles; `first`: folders that come first on the path."""
    models = folder / "models"
    shutil.copytree(ROOT / "tests" / "data" / "mergekit", models)
    (models / "mergekit.yml").write_text(MERGEKIT, encoding="utf-8")
    compiled = ["-m", "compileall", "-q", "-j", "1", str(shutil.copytree(ROOT / "src", folder / "src"))]
    calls = [compiled, *(["-m", "actmat", *arguments] for arguments in WITHOUT_TORCH)]
    failed = []
    for call in calls:
        done = subprocess.run(
            [python, *call], cwd=models, env=_environment(first), capture_output=True, text=True, check=False
        )
        if done.returncode:
            failed.append(" ".join(call[:3]) + ": " + " ".join((done.stderr or done.stdout).split())[-300:])
    entry: dict[str, Any] = {"passed": not failed, "tests": {"passed": len(calls) - len(failed)}}
    return entry | ({"why": failed, "tests": entry["tests"] | {"failed": len(failed)}} if failed else {})


def _environment(first: Sequence[Path] = ()) -> dict[str, str]:
    path = os.pathsep.join(map(str, (*first, ROOT / "src", ROOT)))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _key(entry: dict[str, Any]) -> tuple[str, str, str]:
    """Kind, minor version and torch of an entry: a new run replaces the old one."""
    return entry["which"], entry["python"].rpartition(".")[0], entry["torch"]


def _told(python: str, code: str, *arguments: str) -> str:
    return subprocess.run([python, "-c", code, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--which", choices=("minimum", "latest"), default="latest")
    torch = parser.add_mutually_exclusive_group()
    torch.add_argument("--borrow-torch", dest="torch", action="store_const", const="borrowed", default="installed")
    torch.add_argument("--system-torch", dest="torch", action="store_const", const="system")
    torch.add_argument("--without-torch", dest="torch", action="store_const", const="none")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="actmat-versions-") as folder:
        entry = try_versions(given.python, given.which, Path(folder) / "venv", torch=given.torch)
    before = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"] if RESULTS.exists() else []
    key = _key(entry)
    runs = sorted([r for r in before if _key(r) != key] + [entry], key=lambda r: (r["which"], r["python"]))
    RESULTS.write_text(
        json.dumps({"tests": TESTS, "commands": WITHOUT_TORCH, "runs": runs}, indent=1) + "\n", encoding="utf-8"
    )
    record(RESULTS, "python -m benchmarks.versions, once per entry")
    print(json.dumps(entry, indent=1))


if __name__ == "__main__":
    main()
