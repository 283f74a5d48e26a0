"""Publish a finished output on the Hugging Face hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actmat.bounds import local_path

if TYPE_CHECKING:
    from actmat.extras.remote.push import PushedFile


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
    from actmat.extras.remote.publishing import check_unmodified, files_to_push, publishing_notes
    from actmat.extras.remote.push import hub_name, look_up, plan_push, send

    folder, name = local_path(out), hub_name(repo_id)
    names, left_out = files_to_push(folder)
    if check:
        check_unmodified(folder)
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
        notes=publishing_notes(place, folder, public=public),
        url="" if dry_run else send(planned, f"Push {folder.name} with actmat"),
    )
