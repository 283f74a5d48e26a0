"""Image tasks: where they come from, and how they are split and resized, kept on disk and mapped into memory.

    <data>/<task>.npz              x_train, y_train, x_test, y_test, class_names; uint8, `N H W` or `N H W 3`
    <data>/<task>/train/<class>/*  and test/<class>/*: image files
    hub id                         a `datasets` repository with an image and a label column

The validation part is a tenth of the published training part, 5,000 at most, drawn once: it does not depend on the seed
of a run, so that all seeds are judged alike. `limits` make all parts smaller, for machines that are. Images that cannot
be read are left out and counted, one in a hundred at most.

Shapes: `N` images, `H`, `W` pixels, `S` pixels a side. Pixels are uint8 `N S S 3`; a batch for an encoder is float32
`N 3 S S`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from actmat.errors import CheckpointError, OutputError, format_size
from actmat.extras.demo.tasks import generator_for
from actmat_experiments.harness.cache import Cache, file_digest, library_versions
from actmat_experiments.harness.hub import check_malformed, load_splits
from actmat_experiments.harness.progress import Stage, Watch
from actmat_experiments.harness.results import majority_share

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image


_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".webp", ".tif", ".tiff")


@dataclass(frozen=True, slots=True)
class RawPart:
    """Images as they are: `image(i)` opens the i-th, `labels[i]` is its class."""

    image: Callable[[int], Image]
    labels: Sequence[int]


@dataclass(frozen=True, slots=True)
class RawTask:
    """A task before it is cut and resized.

    Args:
        train, test: its parts as published.
        identity: hash of the content.
    """

    name: str
    train: RawPart
    test: RawPart
    class_names: tuple[str, ...]
    identity: str


@dataclass(frozen=True, slots=True)
class HubSet:
    """A data set of the hub."""

    repo: str
    config: str | None = None
    revision: str | None = None
    train: str = "train"
    test: str = "test"
    image: str = "image"
    label: str = "label"


def local_task(data: Path, name: str) -> RawTask:
    """A task of a folder: `<name>.npz`, or a folder `<name>` of image files or of a saved `datasets` data set.

    Raises:
        CheckpointError: both are missing, or the content is wrong.
    """
    if (data / f"{name}.npz").is_file():
        return open_npz(data / f"{name}.npz")
    if (data / name / "train").is_dir() and (data / name / "test").is_dir():
        return open_folder(data / name)
    there = sorted({p.name.removesuffix(".npz") for p in data.iterdir()}) if data.is_dir() else []
    raise CheckpointError(
        f"{data} holds no data for the task '{name}': expected {name}.npz or a folder {name} with train and test. "
        f"It holds: {', '.join(there) or 'nothing'}."
    )


def open_npz(path: Path) -> RawTask:
    """The task of an `.npz` file. Nothing in it is executed: arrays of objects are refused.

    Raises:
        CheckpointError: arrays are missing or do not fit; names all problems.
    """
    import numpy as np
    from PIL import Image

    with np.load(path, allow_pickle=False) as file:
        wanted = ("x_train", "y_train", "x_test", "y_test", "class_names")
        if missing := [n for n in wanted if n not in file.files]:
            raise CheckpointError(f"{path} lacks the arrays {', '.join(missing)}; it holds {', '.join(file.files)}.")
        arrays = {n: file[n] for n in wanted}
    names = tuple(str(n) for n in arrays["class_names"])
    problems = []
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if x.dtype != np.uint8 or x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] != 3):
            problems.append(f"{path}: x_{part} must be uint8 of shape N H W or N H W 3, not {x.dtype} {x.shape}")
        if y.shape != x.shape[:1]:
            problems.append(f"{path}: y_{part} has shape {y.shape} for {len(x)} images")
        elif len(y) and not 0 <= int(y.min()) <= int(y.max()) < len(names):
            problems.append(f"{path}: y_{part} holds labels {y.min()} to {y.max()}, but there are {len(names)} classes")
    if problems:
        raise CheckpointError(f"{path} does not hold a task.", problems)

    def part_of(name: str) -> RawPart:
        x = arrays[f"x_{name}"]
        return RawPart(lambda i: Image.fromarray(x[i]), arrays[f"y_{name}"].tolist())

    return RawTask(path.stem, part_of("train"), part_of("test"), names, file_digest([path]))


def open_folder(folder: Path) -> RawTask:
    """The task of a folder `train/<class>/*`, `test/<class>/*`; classes in alphabetical order.

    Raises:
        CheckpointError: a class of one part is missing in the other, or no images.
    """
    from PIL import Image

    files = {
        part: sorted(p for p in (folder / part).glob("*/*") if p.suffix.lower() in _SUFFIXES)
        for part in ("train", "test")
    }
    classes = {part: sorted({p.parent.name for p in found}) for part, found in files.items()}
    if not classes["train"] or classes["train"] != classes["test"]:
        raise CheckpointError(
            f"{folder}: train and test must hold images of the same classes, as <class>/<image>; train has "
            f"{classes['train']}, test {classes['test']}."
        )
    content = hashlib.sha256()
    for part in ("train", "test"):
        for path in files[part]:
            content.update(f"{path.relative_to(folder)}\0{file_digest([path])}\0".encode())
    names = classes["train"]

    def part_of(part: str) -> RawPart:
        found = files[part]
        return RawPart(lambda i: Image.open(found[i]), [names.index(p.parent.name) for p in found])

    return RawTask(folder.name, part_of("train"), part_of("test"), tuple(names), content.hexdigest())


def open_hub(
    name: str, where: HubSet, class_names: Sequence[str] | None = None, published: Sequence[str] = ()
) -> RawTask:
    """A data set of the hub, downloaded or from the local store of `datasets`; only the splits that are used.

    Args:
        class_names: meaning of the labels, if not the data set's own names.
        published: names for a copy whose labels are bare numbers.

    Raises:
        CheckpointError: splits or columns are missing, or the classes do not fit.
    """
    splits = (where.train, where.test)
    found, identity = load_splits(where.repo, where.config, splits, where.revision)
    problems = [
        f"split '{split}' has no column '{column}'; it has {found[split].column_names}"
        for split in splits
        for column in (where.image, where.label)
        if column not in found[split].column_names
    ]
    if problems:
        raise CheckpointError(f"The data set {where.repo} does not look as expected.", problems)
    own = getattr(found[where.train].features[where.label], "names", None)
    numbered = own is None or all(str(n).isdigit() for n in own)
    names = tuple(class_names or (published if numbered else own) or own or ())
    labels = {split: list(found[split][where.label]) for split in splits}
    lowest, highest = min(map(min, labels.values())), max(map(max, labels.values()))
    if lowest < 0 or len(names) <= highest or (own and len(own) != len(names)):
        raise CheckpointError(
            f"The data set {where.repo} has labels {lowest} to {highest} and {len(own or ())} names of classes, but "
            f"{len(names)} names are known for '{name}'. Is it another version of the data?"
        )
    train, test = (RawPart(_opener(found[s], where.image), labels[s]) for s in splits)
    return RawTask(name, train, test, names, identity)


def _opener(split: Any, column: str) -> Callable[[int], Image]:
    return lambda i: split[i][column]


_VERSION = 2
_BATCH = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest number of examples per part; None for all."""

    train: int | None = None
    validation: int | None = None
    test: int | None = None


@dataclass(frozen=True, slots=True)
class PixelScale:
    """`(x / 255 - mean) / std`, per color."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __call__(self, pixels_NSSC: Tensor) -> Tensor:
        """uint8 `N S S 3` -> float32 `N 3 S S`, where the pixels are."""
        mean_C, std_C = (torch.tensor(x, device=pixels_NSSC.device) for x in (self.mean, self.std))
        return ((pixels_NSSC.float() / 255 - mean_C) / std_C).permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class Examples:
    """Pixels, uint8 and mapped from disk, and the right answers."""

    pixels_NSSC: NDArray[np.uint8]
    labels_N: Tensor

    def __len__(self) -> int:
        return len(self.labels_N)

    def head(self, n: int) -> Examples:
        """The first `n`; they were shuffled when the task was prepared."""
        return Examples(self.pixels_NSSC[:n], self.labels_N[:n])

    def batch(self, index_B: Tensor, scale: PixelScale, device: str) -> tuple[Tensor, Tensor]:
        """Images, float32 `B 3 S S`, and labels at some positions, in the order of the positions.

        They are read and sent to the device as bytes, and scaled there.
        """
        sorted_B = index_B.sort().values
        pixels_BSSC = self._bytes(sorted_B.numpy())
        return scale(pixels_BSSC.to(device)), self.labels_N[sorted_B].to(device)

    def batches(self, size: int) -> Iterator[Tensor]:
        """uint8 `B S S 3` in order."""
        for start in range(0, len(self), size):
            yield self._bytes(slice(start, start + size))

    def _bytes(self, index: Any) -> Tensor:
        import numpy as np

        return torch.from_numpy(np.array(self.pixels_NSSC[index]))


@dataclass(frozen=True, slots=True)
class ImageTask:
    """A task of image classification.

    Args:
        content: part -> hash of pixels and labels.
        malformed: images that were left out, a line each.
    """

    name: str
    class_names: tuple[str, ...]
    train: Examples
    validation: Examples
    test: Examples
    content: Mapping[str, str]
    malformed: Sequence[str] = ()

    @property
    def majority(self) -> tuple[int, int]:
        """Right and all answers on the test part of a model that always gives the most frequent training answer."""
        return majority_share(self.train.labels_N.tolist(), self.test.labels_N.tolist())


def split_indices(n: int, name: str) -> tuple[list[int], list[int]]:
    """Training and validation positions of `n` published training examples: a tenth, 5,000 at most, is held out."""
    order = torch.randperm(n, generator=generator_for(0, f"split {name}")).tolist()
    held = min(n // 10, 5000)
    return order[held:], order[:held]


def prepare_task(cache: Cache, raw: RawTask, size: int, watch: Watch, limits: Limits | None = None) -> ImageTask:
    """The task at `size` pixels: shorter side resized (bicubic), center cropped, by the image processor of CLIP."""
    limits = limits or Limits()
    key = {
        "version": _VERSION,
        "source": raw.identity,
        "name": raw.name,
        "classes": raw.class_names,
        "size": size,
        "limits": limits,
        "libraries": library_versions("pillow", "transformers"),
    }
    return load_task(cache.get("pixels", key, lambda out: _write(raw, size, limits, watch, out)))


def _parts(raw: RawTask, limits: Limits) -> dict[str, tuple[RawPart, list[int]]]:
    """Part -> its source and its positions there."""
    fit, held = split_indices(len(raw.train.labels), raw.name)
    tested = torch.randperm(len(raw.test.labels), generator=generator_for(0, f"test {raw.name}")).tolist()
    return {
        "train": (raw.train, fit[: limits.train]),
        "validation": (raw.train, held[: limits.validation]),
        "test": (raw.test, tested[: limits.test]),
    }


def _resizer(size: int) -> Callable[[Sequence[Image]], NDArray[np.uint8]]:
    """Images -> uint8 `N S S 3`."""
    import numpy as np
    from transformers import CLIPImageProcessorPil

    process = CLIPImageProcessorPil(
        size={"shortest_edge": size},
        crop_size={"height": size, "width": size},
        do_rescale=False,
        do_normalize=False,
        do_convert_rgb=True,
    )

    def resize(images: Sequence[Image]) -> NDArray[np.uint8]:
        chunk = [image.convert("RGB") for image in images]
        done = process(chunk, return_tensors="np", input_data_format="channels_last")["pixel_values"]
        return np.moveaxis(np.asarray(done), 1, -1).astype(np.uint8)

    return resize


def _write(raw: RawTask, size: int, limits: Limits, watch: Watch, out: Path) -> None:
    import numpy as np

    parts = _parts(raw, limits)
    needed, free = sum(len(index) for _, index in parts.values()) * 3 * size**2, shutil.disk_usage(out).free
    if needed > free:  # a page of a mapped file that finds no block on the disk would end the process without a word
        raise OutputError(
            f"The images of '{raw.name}' at {size} pixels take {format_size(needed)}; the disk of the cache {out} has "
            f"{format_size(free)}. Choose another --cache, or fewer images."
        )
    content, malformed = {}, list[str]()
    with watch.stage(f"images: {raw.name}", total=sum(len(index) for _, index in parts.values())) as stage:
        for part, (source, index) in parts.items():
            kept, bad = _write_pixels(source, index, size, out / f"{part}.npy", stage)
            check_malformed(bad, len(index), f"{raw.name}, {part}")
            malformed += [f"{part}, {line}" for line in bad]
            np.save(out / f"{part}_labels.npy", np.asarray([source.labels[i] for i in kept], dtype=np.int64))
            content[part] = file_digest([out / f"{part}.npy", out / f"{part}_labels.npy"])
        stage.log(f"{raw.name}: {', '.join(f'{len(i)} {p}' for p, (_, i) in parts.items())}; {len(malformed)} left out")
    meta: dict[str, Any] = {"name": raw.name, "classes": raw.class_names, "content": content, "malformed": malformed}
    (out / "task.json").write_text(json.dumps(meta), encoding="utf-8")


def _write_pixels(
    source: RawPart, index: Sequence[int], size: int, path: Path, stage: Stage
) -> tuple[list[int], list[str]]:
    """Write the images that can be read; their positions, and a line for each of the others."""
    import numpy as np
    from numpy.lib.format import open_memmap

    resize, kept, bad = _resizer(size), list[int](), list[str]()
    pixels = open_memmap(path, mode="w+", dtype=np.uint8, shape=(len(index), size, size, 3))
    for start in range(0, len(index), _BATCH):
        chunk = []
        for i in index[start : start + _BATCH]:
            try:
                chunk.append((i, source.image(i).convert("RGB")))
            except OSError as error:
                bad.append(f"image {i} cannot be read: {error}")
        if chunk:
            pixels[len(kept) : len(kept) + len(chunk)] = resize([image for _, image in chunk])
        kept += [i for i, _ in chunk]
        stage.advance(len(index[start : start + _BATCH]))
    pixels.flush()
    if bad:
        aside = path.with_suffix(".new.npy")
        np.save(aside, pixels[: len(kept)])
        aside.replace(path)
    return kept, bad


def load_task(folder: Path) -> ImageTask:
    """Read a folder of `prepare_task`."""
    import numpy as np

    meta = json.loads((folder / "task.json").read_text(encoding="utf-8"))

    def part(name: str) -> Examples:
        labels = np.load(folder / f"{name}_labels.npy", allow_pickle=False)
        pixels = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        return Examples(pixels, torch.from_numpy(labels))

    parts = {name: part(name) for name in ("train", "validation", "test")}
    return ImageTask(
        meta["name"], tuple(meta["classes"]), **parts, content=meta["content"], malformed=meta["malformed"]
    )
