"""The folder of a demo: what is in it, and when it may be replaced."""

from __future__ import annotations

import shutil
from pathlib import Path

from actmat.errors import OutputError

__all__ = ["DemoFolder", "claim_folder"]

_MARK = ".actmat-demo"


class DemoFolder:
    """Paths below the output folder: checkpoints, heads (outside of them, because they are not merged), all numbers."""

    def __init__(self, root: Path) -> None:
        self.root, self.base = root, root / "base"
        self.heads, self.results = root / "heads.safetensors", root / "results.json"

    def expert(self, task: str) -> Path:
        """Checkpoint of a task's expert."""
        return self.root / "experts" / task

    def merged(self, method: str) -> Path:
        """Checkpoint that a method has made."""
        return self.root / "merged" / method


def claim_folder(root: Path, *, overwrite: bool) -> DemoFolder:
    """Make the folder and mark it as a demo's; an earlier demo there is removed only if `overwrite`.

    Only what a demo writes is removed, and only from a folder that carries its mark.

    Raises:
        OutputError: something is there already that may not be replaced, or the place cannot be written.
    """
    folder = DemoFolder(root)
    if root.exists() and not root.is_dir():
        raise OutputError(f"{root} is a file; the demo needs a folder. Choose another place with --out.")
    if root.exists() and any(root.iterdir()):
        if not (root / _MARK).is_file():
            raise OutputError(
                f"{root} is not empty and was not made by the demo, so it is left alone. "
                "Choose another place with --out."
            )
        if not overwrite:
            raise OutputError(
                f"{root} holds an earlier demo. Give --overwrite to replace it, or another place with --out."
            )
        for made in (folder.base, root / "experts", root / "merged"):
            if made.exists():
                shutil.rmtree(made)
        for made in (folder.heads, folder.results):
            made.unlink(missing_ok=True)
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / _MARK).touch()
    except OSError as error:
        raise OutputError(f"{root} cannot be written: {error.strerror}. Choose another place with --out.") from error
    return folder
