"""Image files `.npz` from their originals: equal arrays. The compression of the file may differ.

Shapes: `N` images. Where a draw could not be made again from its seed, `orders.json` lists the images.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.data.originals import Original

ORDERS = Path(__file__).with_name("orders.json")
SIDE, GRAY_SIDE = 32, 28
Arrays = dict[str, NDArray[Any]]
Indices = NDArray[np.int64]


@cache
def orders() -> dict[str, list[int]]:
    """`SET.PART` -> positions in the sorted list of the original's images."""
    found: dict[str, list[int]] = json.loads(ORDERS.read_text(encoding="utf-8"))
    return found


def per_class(labels_N: Indices, n: int, generator: np.random.Generator) -> Indices:
    """Positions of some `n` images, in proportion to their classes and at least one of each, class by class."""
    counts = np.bincount(labels_N)
    sizes = np.maximum(1, np.round(n * counts / len(labels_N)).astype(int))
    chosen = [generator.permutation(np.where(labels_N == c)[0])[: sizes[c]] for c in range(len(counts))]
    return np.concatenate(chosen)


def drawn(labels_N: Indices, n: int, generator: np.random.Generator) -> Indices:
    """Positions of `n` images at most, in proportion to their classes, in random order."""
    return generator.permutation(per_class(labels_N, n, generator))[:n]


def halves(labels_N: Indices, n_test: int) -> tuple[Indices, Indices]:
    """Positions for training and for testing, `n_test` of them in proportion to the classes; both ascend."""
    tested = np.sort(per_class(labels_N, n_test, np.random.default_rng(0)))
    return np.setdiff1d(np.arange(len(labels_N)), tested), tested


def pixels(content: bytes, *, gray: bool, center: bool) -> NDArray[np.uint8]:
    """One image: gray as it is, or RGB at 32 pixels a side, bicubic.

    Args:
        center: cut out the largest square first.
    """
    from PIL import Image

    image = Image.open(io.BytesIO(content)).convert("L" if gray else "RGB")
    if gray:
        return np.asarray(image)
    if center:
        side = min(image.size)
        left, top = ((length - side) // 2 for length in image.size)
        image = image.crop((left, top, left + side, top + side))
    if image.size != (SIDE, SIDE):
        image = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return np.asarray(image)


@dataclass(frozen=True)
class Folder:
    """Image files below a folder; the class is a part of the path.

    Args:
        level: which part of the path is the class.
        part: which part of the path is "train" or "test"; None where the original has no split.
        sizes: images for training and for testing.
        n_test: images that are set aside for testing before both are drawn, where there is no split.
        classes: name in the path -> name, in the order of labels; default: the sorted names.
    """

    name: str
    prefix: str
    suffix: str
    level: int
    sizes: tuple[int, int]
    part: int | None = None
    n_test: int = 0
    gray: bool = False
    center: bool = False
    classes: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, original: Original) -> Arrays:
        """The arrays of the file."""
        files = original.files(lambda p: p.startswith(self.prefix) and p.lower().endswith(self.suffix))
        paths = list(files)
        keys = list(self.classes) or sorted({path.split("/")[self.level] for path in paths})
        number = {key: n for n, key in enumerate(keys)}
        labels = np.array([number[path.split("/")[self.level]] for path in paths])
        found: Arrays = {}
        for part, chosen in zip(("train", "test"), self._positions(paths, labels), strict=True):
            read = [pixels(files[paths[i]], gray=self.gray, center=self.center) for i in chosen]
            found |= {f"x_{part}": np.stack(read), f"y_{part}": labels[chosen].astype(np.int64)}
        return found | {"class_names": np.array([self.classes.get(key, key) for key in keys])}

    def _positions(self, paths: Sequence[str], labels_N: Indices) -> tuple[Indices, Indices]:
        if self.part is not None:
            of = np.array([path.split("/")[self.part] for path in paths])
            train, test = (np.where(of == part)[0] for part in ("train", "test"))
        elif self.n_test:
            train, test = halves(labels_N, self.n_test)
        else:
            return np.array(orders()[f"{self.name}.train"]), np.array(orders()[f"{self.name}.test"])
        generator = np.random.default_rng(0)
        train = train[drawn(labels_N[train], self.sizes[0], generator)]
        return train, test[drawn(labels_N[test], self.sizes[1], generator)]


def usps(path: str) -> Callable[[Original], Arrays]:
    """Digits of 16 pixels a side in an HDF5 file, at 28 pixels, bicubic."""

    def make(original: Original) -> Arrays:
        import h5py
        from PIL import Image

        found: Arrays = {}
        with h5py.File(io.BytesIO(original.file(path))) as file:
            for part in ("train", "test"):
                values, labels = np.asarray(file[part]["data"]), np.asarray(file[part]["target"])
                order = orders().get(f"usps.{part}") or np.random.default_rng(0).permutation(len(labels))
                small = np.round(255 * values.reshape(-1, 16, 16)).astype(np.uint8)[order]
                size = (GRAY_SIDE, GRAY_SIDE)
                large = [np.asarray(Image.fromarray(x).resize(size, Image.Resampling.BICUBIC)) for x in small]
                found |= {f"x_{part}": np.stack(large), f"y_{part}": labels[order].astype(np.int64)}
        return found | {"class_names": np.array([str(digit) for digit in range(10)])}

    return make
