"""Files of a finished output that its manifest records, and those in its folder that it does not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actmat.bounds import MAX_WRITTEN_VALUES, read_object
from actmat.checkpoints.folder import is_plain_path, member
from actmat.checkpoints.hashing import hash_file
from actmat.errors import OutputError

MANIFEST_NAME = "actmat_manifest.json"
REPORTS = frozenset({"report.json", "report.html"})
"""Files of a report: a merge records them with its times, and `diagnose` adds them to a finished output."""


def listed_files(manifest: Mapping[str, Any]) -> list[str]:
    """Names of the files that a manifest records, itself not included; of a damaged one, those it still names.

    >>> listed_files({"output": {"files": {"model.safetensors": 8}, "side_files": {"config.json": {}}}})
    ['model.safetensors', 'config.json']
    """
    output, timing = ({**row} if isinstance(row := manifest.get(k), dict) else {} for k in ("output", "timing"))
    rows = (output.get("files"), output.get("side_files"), timing.get("reports"))
    return [name for row in rows if isinstance(row, dict) for name in row if is_plain_path(name)]


def unlisted_files(out: Path) -> list[str]:
    """Files and folders in `out` that its manifest does not record: a folder is named once, with a slash at its end.

    Raises:
        OutputError: the manifest cannot be read.
    """
    manifest = read_object(out / MANIFEST_NAME, values=MAX_WRITTEN_VALUES, error=OutputError)
    files = {MANIFEST_NAME, *REPORTS, *listed_files(manifest)}
    folders = {parent.as_posix() for name in files for parent in Path(name).parents}

    def strange(folder: Path) -> list[str]:
        others = []
        with os.scandir(folder) as entries:
            for entry in entries:
                name, is_folder = Path(entry.path).relative_to(out).as_posix(), entry.is_dir(follow_symlinks=False)
                if is_folder and name in folders:
                    others += strange(Path(entry.path))
                elif is_folder or name not in files:
                    others.append(f"{name}/" if is_folder else name)
        return others

    return sorted(strange(out))


class OutputFiles:
    """Files of a finished output in a folder, by name; names of files in subfolders have slashes.

    Attributes:
        manifest_folder: local folder with the manifest.
    """

    def __init__(self, folder: Path) -> None:
        self.manifest_folder = folder

    def names(self) -> list[str]:
        """Names of all stored files, sorted. Links to folders are not followed."""
        files = []
        for folder, folders, names in os.walk(self.manifest_folder):
            links = [n for n in folders if os.path.islink(os.path.join(folder, n))]
            below = Path(folder).relative_to(self.manifest_folder)
            files += [(below / n).as_posix() for n in (*names, *links)]
        return sorted(files)

    def size(self, name: str) -> int:
        """Bytes of a file.

        Raises:
            CheckpointError, OSError: it is missing, or not a file of the output.
        """
        return member(self.manifest_folder, name).stat().st_size

    def content(self, name: str) -> str:
        """Content hash of a file without weights."""
        return hash_file(member(self.manifest_folder, name))
