"""No tracked file names a directory of somebody's machine or the host of a package registry."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.helpers.repository import ROOT, tracked_files

# An absolute path: nothing that belongs to a longer path, a host or a placeholder stands before the slash.
MACHINE_PATH = re.compile(r"(?<![\w.~/}>-])/(root|work|home/(?!user|you)\w+|Users/\w+|opt|mnt)/\w")
REGISTRY = re.compile(r"pypi[.]org|pythonhosted[.]org|download[.]pytorch[.]org|(?:index-url|find-links)[= ]+\S*//")


def readable(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""  # binary: tensors, images


def offences(text: str) -> list[str]:
    return [
        f"line {number}: {line.strip()[:120]}"
        for number, line in enumerate(text.splitlines(), start=1)
        if MACHINE_PATH.search(line) or REGISTRY.search(line)
    ]


def test_tracked_files_name_no_machine_and_no_registry() -> None:
    here = Path(__file__).resolve()
    found = [
        f"{path.relative_to(ROOT)}: {offence}"
        for path in tracked_files()
        if path.resolve() != here
        for offence in offences(readable(path))
    ]
    assert not found, "\n".join(found)


def test_something_is_tracked() -> None:
    assert ROOT / "pyproject.toml" in tracked_files()


@pytest.mark.parametrize(
    "line",
    [
        "see /mnt/disk/notes",
        "path=/opt/models/src",
        "'/home/anna/models'",
        "at /Users/anna/models",
        "https://pypi.org/simple",
        "--index-url http://h/",
    ],
)
def test_an_offence_is_seen(line: str) -> None:
    assert offences(line)


@pytest.mark.parametrize(
    "line", ["benchmarks/opt/", "/path/to/base", "./mnt/x", "https://a.org/opt/x", "/home/user/models", "~/opt/x"]
)
def test_an_innocent_line_passes(line: str) -> None:
    assert not offences(line)
