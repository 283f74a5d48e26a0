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
from actmat.report import read_manifest, verify
from actmat.report.verify import VERSIONING

if TYPE_CHECKING:
    from actmat.extras.remote.push import HubPlace, PushedFile

ADDED = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
"""Beginnings of names of files that are pushed although no merge wrote them."""
CARD = "README.md"


@dataclass(frozen=True, slots=True)
class PushReport:
    """Result of `push`.

    Args:
        repo_id: `org/name`.
        files: of the output, by name.
        removed: files of an earlier output that the commit removed.
        nbytes: of the files that the repository did not have.
        private: whether the repository is private.
        is_new: it was made for this output.
        left_out: files of the folder that no merge wrote, which stay here.
        notes: sentences for the user.
        url: of the commit; empty after a dry run.
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

    Only files that the manifest lists are sent, and license texts. Files that the repository has are left out; what an
    interrupted push sent is not sent again.

    Args:
        out: folder of the output.
        repo_id: `org/name`.
        public: make a new repository public.
        overwrite: replace another output in the repository; the files of that one are removed.
        dry_run: send nothing; a hub that is out of reach is a note.
        check: hash every tensor and file first, and compare with the manifest; an edited card is no difference.

    Raises:
        OutputError: the output is not as it was written, or the hub does not take it; nothing shows there then.
        CheckpointError: `out` is no output of actmat.
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
    """Names of the files to push, and of the others."""
    ours = {*listed_files(read_manifest(folder)), MANIFEST_NAME}
    found = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    there = [n for n in found if n.split("/")[0] not in VERSIONING]
    names = [n for n in there if n in ours or n.upper().startswith(ADDED)]
    if missing := sorted(ours - set(there)):
        raise OutputError(f"{folder} is not whole.", [f"file '{n}' of the manifest is missing" for n in missing])
    return names, tuple(n for n in there if n not in names)


def _check(folder: Path) -> None:
    """Compare the output with its manifest; the card may be edited, and files may be added."""
    allowed = (f"file '{CARD}' of the output ", "the output has an extra file ")
    problems = [p for p in verify(folder, inputs=False).problems if not p.startswith(allowed)]
    if problems:
        raise OutputError(f"{folder} is not as it was written, so it is not pushed. Fix: merge again.", problems)


def _unknown(place: HubPlace) -> tuple[str, ...]:
    """Note that the hub could not be asked, if so."""
    text = "the hub was not asked for its files, which may be there already, nor whether it takes these"
    return (f"{text} ({place.unknown})",) if place.unknown else ()


def _notes(folder: Path, *, public: bool) -> tuple[str, ...]:
    """Notes on the license that the card states, and on what everybody would learn of this machine."""
    from actmat.report.licenses import read_card

    card = read_card((folder / CARD).read_text(encoding="utf-8"))
    if not public:
        return card.notes
    license = "the card states no license, so others may not use the model: add 'license:' to README.md"
    told = [] if card.licenses else [license]
    manifest = read_manifest(folder)
    rows = [r for r in (manifest["base"], *manifest["experts"], *manifest.get("statistics", ())) if r is not None]
    if paths := dict.fromkeys(filter(None, map(_telling_path, rows))):
        told.append(f"the manifest tells everybody these paths of this machine: {', '.join(map(terminal, paths))}")
    return (*card.notes, *told)


def _telling_path(row: Mapping[str, Any]) -> str:
    """A path in the entry of an input that names folders above the place that was given; empty if none does.

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
