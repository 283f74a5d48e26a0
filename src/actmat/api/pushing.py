"""Publish a finished output on the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from actmat.bounds import local_path
from actmat.checkpoints.writing.listed import MANIFEST_NAME, listed_files
from actmat.errors import OutputError
from actmat.foreign import terminal
from actmat.report.manifest import read_manifest
from actmat.report.verify import VERSIONING, verify

if TYPE_CHECKING:
    from actmat.extras.remote.push import HubPlace, PushedFile

ADDED = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
"""Prefixes of files that are pushed although they are not listed in the manifest."""
CARD = "README.md"


@dataclass(frozen=True, slots=True)
class PushReport:
    """Result of `push`.

    Args:
        repo_id: `org/name`.
        files: names of the output's files.
        removed: files of an earlier output that the commit removed.
        nbytes: size of the files that the repository did not have.
        private: whether the repository is private.
        is_new: whether the repository was created for this output.
        left_out: files of the folder that are not in the manifest, which are not sent.
        notes: sentences for the user.
        url: address of the commit; empty after a dry run.
    """

    repo_id: str
    files: tuple[PushedFile, ...]
    removed: tuple[str, ...]
    nbytes: int
    private: bool
    is_new: bool
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    url: str = ""


def push(
    out: str | Path,
    repo_id: str,
    *,
    public: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    check: bool = True,
) -> PushReport:
    """Send a finished output to a model repository of the hub, with its card and manifest, in one commit.

    Only license texts and files listed in the manifest are sent. Files that the repository already has, also from an
    interrupted push, are not sent again.

    Args:
        out: folder of the output.
        repo_id: `org/name`.
        public: create a new repository as public.
        overwrite: replace another output in the repository and remove its files.
        dry_run: send nothing; an unreachable hub is a note.
        check: hash every tensor and file first, and compare with the manifest; the card may be edited.

    Raises:
        OutputError: the output was modified, or the hub rejects it; the repository is then unchanged.
        CheckpointError: `out` is not an output of actmat.
    """
    from actmat.extras.remote.push import hub_name, look_up, plan_push, send

    folder, name = local_path(out), hub_name(repo_id)
    names, left_out = _files(folder)
    if check:
        _check(folder)
    place = look_up(name, needed=not dry_run)
    planned = plan_push(place, folder, names, private=not public, overwrite=overwrite)
    return PushReport(
        repo_id=name,
        files=planned.files,
        removed=planned.removed,
        nbytes=planned.nbytes,
        private=not public,
        is_new=not (place.exists or place.unknown),
        left_out=left_out,
        notes=(*_unknown(place), *_notes(folder, public=public)),
        url="" if dry_run else send(planned, f"Push {folder.name} with actmat"),
    )


def _files(folder: Path) -> tuple[list[str], tuple[str, ...]]:
    """Names of the files to push, and of the files to leave out."""
    ours = {*listed_files(read_manifest(folder)), MANIFEST_NAME}
    found = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    there = [n for n in found if n.split("/")[0] not in VERSIONING]
    names = [n for n in there if n in ours or n.upper().startswith(ADDED)]
    if missing := sorted(ours - set(there)):
        raise OutputError(f"{folder} is incomplete.", [f"file '{n}' of the manifest is missing" for n in missing])
    return names, tuple(n for n in there if n not in names)


def _check(folder: Path) -> None:
    """Compare the output with its manifest; the card may be edited, and files may be added."""
    found, ours = verify(folder, inputs=False), listed_files(read_manifest(folder))
    allowed = {problem for name, problem in found.of_files.items() if name == CARD or name not in ours}
    problems = [p for p in found.problems if p not in allowed]
    if problems:
        raise OutputError(f"{folder} was modified after the merge, so it is not pushed. Fix: merge again.", problems)


def _unknown(place: HubPlace) -> tuple[str, ...]:
    """Note that the hub was not reachable, if so."""
    text = "the hub was not asked, so its files and permissions are not known"
    return (f"{text} ({place.unknown})",) if place.unknown else ()


def _notes(folder: Path, *, public: bool) -> tuple[str, ...]:
    """Notes on the license stated in the card, and on local paths that the manifest would publish."""
    from actmat.report.licenses import read_card

    card = read_card((folder / CARD).read_text(encoding="utf-8"))
    if not public:
        return card.notes
    license = "the card states no license, so others may not use the model: add 'license:' to README.md"
    told = [] if card.licenses else [license]
    manifest = read_manifest(folder)
    rows = [r for r in (manifest["base"], *manifest["experts"], *manifest.get("statistics", ())) if r is not None]
    if paths := dict.fromkeys(filter(None, map(_telling_path, rows))):
        told.append(f"the manifest publishes these paths of this machine: {', '.join(map(terminal, paths))}")
    return (*card.notes, *told)


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
    named, given = ([n for n in PurePath(place).parts if n != ".."] for place in (near, location))
    return near if named and named != given[-len(named) :] else ""
