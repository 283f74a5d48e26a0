"""Files of an output that are published, and what a publisher should know of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from actmat.checkpoints.writing.listed import MANIFEST_NAME, listed_files
from actmat.errors import OutputError
from actmat.extras.remote.push import HubPlace
from actmat.foreign import terminal
from actmat.report.licenses import read_licenses
from actmat.report.manifest import read_manifest
from actmat.report.verify import VERSIONING, verify

ADDED = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
"""Prefixes of files that are pushed although they are not listed in the manifest."""
CARD = "README.md"


def files_to_push(folder: Path) -> tuple[list[str], tuple[str, ...]]:
    """Names of the files to push, and of the files to leave out.

    Raises:
        OutputError: files of the manifest are missing.
    """
    ours = {*listed_files(read_manifest(folder)), MANIFEST_NAME}
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    tracked = [n for n in files if n.split("/")[0] not in VERSIONING]
    names = [n for n in tracked if n in ours or n.upper().startswith(ADDED)]
    if missing := sorted(ours - set(tracked)):
        raise OutputError(f"{folder} is incomplete.", [f"file '{n}' of the manifest is missing" for n in missing])
    return names, tuple(n for n in tracked if n not in names)


def check_unmodified(folder: Path) -> None:
    """Compare the output with its manifest; the card may be edited, and files may be added.

    Raises:
        OutputError: lists the differences.
    """
    verified, ours = verify(folder, inputs=False), listed_files(read_manifest(folder))
    allowed = {problem for name, problem in verified.of_files.items() if name == CARD or name not in ours}
    problems = [p for p in verified.problems if p not in allowed]
    if problems:
        raise OutputError(f"{folder} was modified after the merge, so it is not pushed. Fix: merge again.", problems)


def publishing_notes(place: HubPlace, folder: Path, *, public: bool) -> tuple[str, ...]:
    """Notes on a hub that was not reachable, the card's license, and local paths that the manifest would publish."""
    unknown = f"the hub was not asked, so its files and permissions are not known ({place.unknown})"
    notes = [unknown] if place.unknown else []
    if not public:
        return tuple(notes)
    if not read_licenses((folder / CARD).read_text(encoding="utf-8")):
        notes.append("the card states no license, so others may not use the model: add 'license:' to README.md")
    manifest = read_manifest(folder)
    rows = [r for r in (manifest["base"], *manifest["experts"], *manifest.get("statistics", ())) if r is not None]
    if paths := dict.fromkeys(filter(None, map(_telling_path, rows))):
        notes.append(f"the manifest publishes these paths of this machine: {', '.join(map(terminal, paths))}")
    return tuple(notes)


def _telling_path(row: Mapping[str, Any]) -> str:
    """A path in an input's manifest entry that reveals folders above the given location; may be empty.

    >>> _telling_path({"location": "models/a", "from_here": "../models/a"})
    ''
    >>> _telling_path({"location": "models/a", "from_here": "../../home/me/models/a"})
    '../../home/me/models/a'
    """
    location, near = str(row["location"]), str(row.get("from_here") or "")
    if any(os.path.isabs(part.strip()) for part in location.split("+")):
        return location
    named, parts = ([n for n in PurePath(place).parts if n != ".."] for place in (near, location))
    return near if named and named != parts[-len(named) :] else ""
