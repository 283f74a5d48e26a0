"""Compare two outputs of one merge: weight files byte by byte, tensors entry by entry, JSON files key by key."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.provenance import sha256

UNSTEADY = ("timing", "created", "totals.seconds", "totals.peak_bytes")
"""Keys whose values, and those below them, no two runs share: times, and the memory that was measured."""

COMPUTED = frozenset({".safetensors", ".html"})
"""Suffixes of weight files, and of pages that are made from JSON files."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Weights:
    """Differences between the weights of two outputs.

    Args:
        files: weight files of the old output.
        same_files: those whose bytes the new output has under the same name.
        tensors: tensors of the old output.
        same_tensors: those that the new one has, with this dtype, shape and bytes.
        entries: entries that differ, among tensors of one dtype and shape.
        difference: largest relative Frobenius distance of such a tensor.
        problems: files and tensors that only one output has, or with another dtype or shape.
    """

    files: int = 0
    same_files: int = 0
    tensors: int = 0
    same_tensors: int = 0
    entries: int = 0
    difference: float = 0.0
    problems: tuple[str, ...] = ()

    def verdict(self) -> str:
        """`same`, `same tensors` where only files' headers or names differ, `differs`, or `nothing` to compare."""
        if not self.files:
            return "nothing"
        if self.same_files == self.files and not self.problems:
            return "same"
        return "differs" if self.same_tensors < self.tensors or self.problems else "same tensors"


def compare_weights(old: Path, new: Path) -> Weights:
    """Compare all safetensors files below two folders; shards of one folder count as one set of tensors."""
    files = [{str(p.relative_to(out)): p for p in sorted(out.rglob("*.safetensors"))} for out in (old, new)]
    found = Weights(files=len(files[0]))
    found.same_files = sum(n in files[1] and sha256(p) == sha256(files[1][n]) for n, p in files[0].items())
    before, after = ({key: p for n, p in side.items() for key in _tensors(n, p)} for side in files)
    problems = [f"only in old: {_text(key)}" for key in before if key not in after]
    problems += [f"only in new: {_text(key)}" for key in after if key not in before]
    found.tensors = len(before)
    for key in before.keys() & after.keys():
        a, b = _read(before[key], key[1]), _read(after[key], key[1])
        if a.dtype != b.dtype or a.shape != b.shape:
            problems.append(f"{_text(key)}: {a.dtype} {list(a.shape)}, now {b.dtype} {list(b.shape)}")
            continue
        entries = differing_entries(a, b)
        found.same_tensors += not entries
        found.entries += entries
        if entries:
            found.difference = max(found.difference, relative_difference(a, b))
    if len(files[1]) != len(files[0]) and not problems:
        problems.append(f"{len(files[0])} weight files, now {len(files[1])}")
    found.problems = tuple(sorted(problems))
    return found


Key = tuple[str, str]
"""Folder of a weight file relative to the output, and a tensor's name."""


def _tensors(file: str, path: Path) -> list[Key]:
    with safe_open(path, framework="pt") as opened:
        return [(str(Path(file).parent), name) for name in opened.keys()]  # noqa: SIM118 - no mapping


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as opened:
        return opened.get_tensor(name)


def _text(key: Key) -> str:
    return key[1] if key[0] == "." else f"{key[0]}: {key[1]}"


def differing_entries(a: Tensor, b: Tensor) -> int:
    """Number of entries whose bits differ: NaN equals itself, 0 and -0 differ."""
    kind = _INTEGERS[a.itemsize]
    return int((a.reshape(-1).view(kind) != b.reshape(-1).view(kind)).sum())


def relative_difference(a: Tensor, b: Tensor) -> float:
    """`||b - a||_F / ||a||_F` in float64, without entries that are NaN in both; infinite where it has no value."""
    a, b = a.double(), b.double()
    compared = ~(a.isnan() & b.isnan())
    distance, norm = float((b - a)[compared].norm()), float(a[compared].norm())
    if distance == 0:
        return 0.0
    return distance / norm if norm and math.isfinite(distance / norm) else math.inf


# Everything else


def compare_files(old: Path, new: Path) -> list[str]:
    """Differences between the other files of two outputs, a line for each file that differs."""
    sides = [
        {str(p.relative_to(out)): p for p in sorted(out.rglob("*")) if p.is_file() and p.suffix not in COMPUTED}
        for out in (old, new)
    ]
    lines = [f"{name}: only in old" for name in sides[0] if name not in sides[1]]
    lines += [f"{name}: only in new" for name in sides[1] if name not in sides[0]]
    for name in sides[0].keys() & sides[1].keys():
        a, b = (side[name].read_text(errors="replace") for side in sides)
        if words := compare_texts(a, b, (str(old), str(new))):
            lines.append(f"{name}: {words}")
    return sorted(lines)


def compare_texts(a: str, b: str, folders: tuple[str, str] = ("", "")) -> str:
    """Differences of two texts in words, key by key where both are JSON; empty where there is none.

    Args:
        folders: names of the old and the new output, which count as the same.
    """
    if folders[1]:
        b = b.replace(folders[1], folders[0])
    if a == b:
        return ""
    try:
        before, after = json.loads(a), json.loads(b)
    except json.JSONDecodeError:
        return "another text"
    return ", ".join(compare_json(before, after))


def compare_json(before: Any, after: Any) -> list[str]:
    """Keys with other values, `tensors[].method (7 changed)`; keys of `UNSTEADY` are left out."""
    a, b = dict(_leaves(before)), dict(_leaves(after))
    kinds: Counter[tuple[str, str]] = Counter()
    for path in a.keys() | b.keys():
        kind = "new" if path not in a else "gone" if path not in b else "changed" if a[path] != b[path] else ""
        general = _general(path)
        if kind and not any(general == key or general.startswith(f"{key}.") for key in UNSTEADY):
            kinds[general, kind] += 1
    return [f"{path} ({count} {kind})" for (path, kind), count in sorted(kinds.items())]


KeyPath = tuple[str | int, ...]


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Path and JSON text of every value that holds no other; texts, so that 1, 1.0 and true differ."""
    children: Any = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    if not isinstance(value, dict | list) or not value:
        yield path, json.dumps(value)
    for key, child in children:
        yield from _leaves(child, (*path, key))


def _general(path: KeyPath) -> str:
    """`('tensors', 3, 'method')` -> `tensors[].method`."""
    return "".join("[]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")
