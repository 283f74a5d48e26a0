"""Door of paths: texts that users give as places of inputs and outputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from actmat.api.reading import read_recipe
from actmat.checkpoints.writing.staging import check_output_path
from actmat.errors import MergeError
from actmat.experts.locate import locate
from actmat.extras.collect.outputs import recipe_of_output
from actmat.report.manifest import read_manifest
from actmat.statistics.store import open_statistics
from fuzz.draw import LETTERS, text
from fuzz.harness import Files, door

PARTS = (
    "..", ".", "", "~", "~nobody_x", "x", "\udcff", "\0", "\n", "a" * 256, "dev", "zero", "null", "tty", "proc", "self", "mem", "fd", "0",
    "sys", "kernel", "tmp", "hf:", "file:", "s3:", "model.safetensors", "config.json", "root", "\x1b[2J",
)  # fmt: skip


def _path(rng: random.Random) -> Files:
    parts = [rng.choice(PARTS) if rng.random() < 0.7 else text(rng) for _ in range(rng.randrange(7))]
    if rng.random() < 0.1:
        parts.append("".join(rng.choices(LETTERS, k=20)))
    place = "/".join(parts)[: rng.choice((10, 200, 5000))] * (30 if rng.random() < 0.02 else 1)
    if place[:1] not in ("~", "/", "."):  # a hub id has no dot in front: nothing here may ask a network
        place = f"./{place}"
    return {"path": place.encode("utf-8", "surrogatepass")}


def _read(files: Files) -> str:
    place = files["path"].decode("utf-8", "surrogatepass")
    readers: tuple[Callable[[], object], ...] = (
        lambda: locate(place),
        lambda: open_statistics(place),
        lambda: read_recipe(place),
        lambda: read_manifest(Path(place)),
        lambda: recipe_of_output(place),
    )
    said = []
    for read in readers:
        try:
            read()
        except MergeError as error:
            said.append(str(error))
    problems = check_output_path(Path(place), overwrite=False, inputs={})
    said.append(str(MergeError("The output cannot be written.", problems or ["none"])))
    return "\n".join(said)


door("paths", _path, _read)
