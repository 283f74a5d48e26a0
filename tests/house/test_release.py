"""Wheel and sdist hold what is needed; citation and workflows fit; no file tells of a machine."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs.published import FILES
from tests.helpers.repository import PACKAGE, ROOT, tracked_files

from actmat.version import __version__

# Files of a release agree with each other: citation, extras, workflows, issue forms, changelog.


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"^[\w-]+/[\w-]+@(v\d+|release/v\d+|[0-9a-f]{40})$")


def test_the_citation_is_of_this_version_and_license() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (found["version"], found["license"]) == (__version__, PROJECT["license"])
    assert found["url"] == PROJECT["urls"]["Paper"] == found["preferred-citation"]["url"]
    names = [a["family-names"] for a in found["preferred-citation"]["authors"]]
    assert ", ".join(names[:-1]) in (ROOT / "README.md").read_text()


def test_the_extra_all_is_every_extra_for_users() -> None:
    extras = PROJECT["optional-dependencies"]

    def reached(name: str) -> set[str]:
        inner = [x for d in extras[name] if d.startswith("actmat[") for x in d[7:-1].split(",")]
        return {name, *(n for x in inner for n in reached(x))}

    assert reached("all") == extras.keys() - {"dev", "docs"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_a_workflow_pins_its_actions_and_says_that_it_was_not_run(path: Any) -> None:
    text = path.read_text()
    assert "Not run yet" in text.partition("\nname:")[0]
    used = re.findall(r"uses: (\S+)", text)
    assert used
    assert [u for u in used if not PINNED.match(u)] == []
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_only_the_job_that_publishes_has_an_identity() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    found = yaml.safe_load(text)["jobs"]
    assert {name for name, job in found.items() if "permissions" in job} == {"publish"}
    assert found["publish"]["permissions"] == {"id-token": "write"}
    assert found["publish"]["environment"] == "release"
    assert found["publish"]["needs"] == "try"
    assert "password" not in text


def test_the_page_on_stability_names_every_schema() -> None:
    text = (ROOT / "docs" / "limits.md").read_text().partition("## What is public")[2]
    assert all(f"(schemas/{kind}-{version}.json)" in text for kind, (version, *_) in FILES.items())


# An absolute path: nothing that belongs to a longer path, a host or a placeholder stands before the slash.
PRIVATE = re.compile(
    r"(?<![\w.~/}>-])/(?:root|work|home/(?!user|you)\w+|Users/\w+|opt|mnt)/\w"
    r"|pypi[.]org|pythonhosted[.]org|download[.]pytorch[.]org|(?:index-url|find-links)[= ]+\S*//"
)


def test_tracked_files_name_no_machine_and_no_registry() -> None:
    for line in ("see /mnt/disk/notes", "'/home/anna/models'", "https://pypi.org/simple", "--index-url http://h/"):
        assert PRIVATE.search(line)
    for line in ("benchmarks/opt/", "/path/to/base", "./mnt/x", "https://a.org/opt/x", "/home/user/models", "~/opt/x"):
        assert not PRIVATE.search(line)
    texts = {
        p: p.read_text(encoding="utf-8", errors="ignore") for p in tracked_files() if p != Path(__file__).resolve()
    }
    assert ROOT / "pyproject.toml" in texts
    assert {str(p.relative_to(ROOT)): m[0] for p, text in texts.items() if (m := PRIVATE.search(text))} == {}


# Wheel and sdist hold what is needed, and the installed wheel runs outside of the repository.


BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
LARGEST_WHEEL = 2_000_000
"""Bytes: a wheel above holds tests, figures or data that it should not."""


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
    assert wheel.stat().st_size < LARGEST_WHEEL
    assert not [n for n in names if re.search(r"(^|/)tests?/|\.png$|\.safetensors$", n)]
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
