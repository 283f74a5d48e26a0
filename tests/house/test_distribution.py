"""Wheel and sdist hold what is needed, and the installed wheel runs outside of the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from benchmarks.containers import Step, steps, variables
from benchmarks.versions import TESTS, WITHOUT_TORCH, borrowed, pinned, run_commands, summary
from tests.helpers.repository import PACKAGE, ROOT, tracked_files

from actmat.version import __version__

BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def built(folder: Path, kind: str, out: Path) -> Path:
    """A wheel or sdist, by the build backend that pip would call; no other package is fetched."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(out)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of a clean copy, and the wheel that is built of it."""
    root = tmp_path_factory.mktemp("dist")
    for path in tracked_files():
        name = path.relative_to(ROOT)
        if name.parts[0] == "src" or str(name) in ("pyproject.toml", "README.md", "LICENSE"):
            (root / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, root / "copy" / name)
    (root / "out").mkdir()
    sdist = built(root / "copy", "sdist", root / "out")
    with tarfile.open(sdist) as archive:
        archive.extractall(root / "unpacked", filter="data")
    wheel = built(root / "unpacked" / f"actmat-{__version__}", "wheel", root / "out")
    return sdist, wheel


def test_the_wheel_of_the_sdist_holds_every_file_of_the_package(dist: tuple[Path, Path]) -> None:
    _, wheel = dist
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tracked = {str(p.relative_to(PACKAGE.parent)) for p in tracked_files() if p.is_relative_to(PACKAGE)}
    assert {n for n in names if n.startswith("actmat/")} == tracked
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert not {n.split("/")[0] for n in names} - {"actmat", f"actmat-{__version__}.dist-info"}


def test_the_installed_wheel_runs_by_itself(dist: tuple[Path, Path], tmp_path: Path) -> None:
    """The dependencies are those of this environment; the package is that of the wheel."""
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--quiet"]
    subprocess.run([*install, "--disable-pip-version-check", "--target", str(target), str(dist[1])], check=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(target)}

    def run(*arguments: str) -> str:
        return subprocess.run(
            arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert run(sys.executable, "-c", "import actmat; print(actmat.__file__)").strip().startswith(str(target))
    assert "task_arithmetic" in run(sys.executable, "-m", "actmat", "methods")
    assert run(sys.executable, str(target / "bin" / "actmat"), "--version") == f"actmat {__version__}\n"


def test_every_command_of_the_pages_on_installing_names_an_extra_that_there_is() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    named = {x for part in text.split("actmat[")[1:] for x in part.split("]")[0].split(",")}
    assert named <= set(PROJECT["optional-dependencies"])
    assert {"statistics", "remote", "ray"} <= named


@pytest.mark.parametrize("which", ["minimum", "latest"])
def test_requirements_of_a_try(which: str) -> None:
    found = pinned(PROJECT["dependencies"], which)
    assert len(found) == len(PROJECT["dependencies"])
    assert all(("==" in d) is (which == "minimum") for d in found)
    assert all((ROOT / test).is_file() for test in TESTS)
    assert summary("12 passed, 1 skipped in 3s") == {"passed": 12, "skipped": 1}


def test_the_files_for_containers_differ_by_where_torch_comes_from() -> None:
    cpu, cuda = (list(steps((ROOT / "docker" / f"Dockerfile.{n}").read_text())) for n in ("cpu", "cuda"))
    (of_cpu,), (of_cuda,) = ([s.rest for s in file if s.word == "RUN"] for file in (cpu, cuda))
    assert of_cpu == 'if [ -n "$TORCH_INDEX" ]; then pip install --index-url "$TORCH_INDEX" torch; fi && ' + of_cuda
    assert [s for s in cpu if s.word not in ("RUN", "ARG", "ENV")] == [s for s in cuda if s.word not in ("RUN", "ENV")]
    assert variables(cuda).items() > {k: v for k, v in variables(cpu).items() if k != "TORCH_INDEX"}.items()
    copied = {source for s in cpu if s.word == "COPY" for source in s.rest.split()[:-1]}
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "src"}  # what the sdist of this file's tests has


def test_an_unknown_instruction_is_refused() -> None:
    assert list(steps("RUN a \\\n  # b\n  c\n")) == [Step("RUN", "a c")]
    with pytest.raises(ValueError, match="VOLUME is not one of FROM"):
        list(steps("FROM x\nVOLUME /a\n"))


def test_a_borrowed_package_brings_what_it_needs_and_nothing_else() -> None:
    found = borrowed(["pytest"], without=["pluggy"])
    assert {"pytest", "iniconfig"} <= found.keys()
    assert not {"pluggy", "torch", "transformers"} & found.keys()
    assert all(place.exists() for place in found.values())
    assert "sympy" in borrowed(["torch"], without=[])


@pytest.mark.slow
def test_the_commands_without_torch_are_run(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "torch.py").write_text("raise ImportError('hidden')\n")
    done = run_commands(sys.executable, tmp_path, [hidden])
    assert done == {"passed": True, "tests": {"passed": 1 + len(WITHOUT_TORCH)}}


def test_python_versions_that_are_claimed_were_tried() -> None:
    results = ROOT / "benchmarks" / "results" / "versions.json"
    runs = json.loads(results.read_text())["runs"] if results.exists() else []
    whole = [r for r in runs if r["passed"] and r["torch"] != "none"]
    tried = {r["python"].rpartition(".")[0] for r in whole} | {"3.11"}  # the test-suite's own
    claimed = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c}
    assert claimed == tried
    assert PROJECT["requires-python"] == ">=3.11"
