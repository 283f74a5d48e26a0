"""The merges that were made below some folders, from the manifests that they left; nothing else is kept anywhere.

    found = find_merges(["merges"])
    [m.place for m in found.merges if m.contains("experts/math")]
    [m.place for m in made_by(found.merges, "model-00001-of-00002.safetensors")]

Contents are told by hashes, so that files may have been renamed and moved.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat.checkpoints.hashing import ContentHash, hash_file
from actmat.checkpoints.writing.listed import MANIFEST_NAME
from actmat.errors import CheckpointError, MergeError
from actmat.experts.resolve import open_stored
from actmat.report.manifest import input_location, read_manifest

CHUNK = 1 << 22
"""Bytes of a file that are hashed at a time."""
SHORTEST_HASH = 8
"""Digits from which a text counts as the beginning of a content hash."""


@dataclass(frozen=True, slots=True)
class PastMerge:
    """A finished merge, as its manifest tells it.

    Args:
        place: its folder.
        manifest: as `read_manifest` gives it.
    """

    place: Path
    manifest: Mapping[str, Any]

    @property
    def finished(self) -> str:
        """When it was finished (ISO 8601, UTC); empty where the manifest does not say."""
        return str(self.manifest.get("timing", {}).get("finished", ""))

    @property
    def experts(self) -> Sequence[Mapping[str, Any]]:
        """Entries of the experts: `name`, `location`, `content`."""
        return list(self.manifest["experts"])

    @property
    def hashes(self) -> dict[str, str]:
        """Content hash of every tensor that it wrote."""
        return {row["name"]: row["hash"] for row in self.manifest["tensors"]}

    def contains(self, expert: str) -> bool:
        """True if it was made from this expert: a name, a folder, a hub id, or the first digits of a content hash.

        A folder that is itself a merge is found under any name by the hash of its content.
        """
        content = _content_of(expert)
        return any(self._is(entry, expert, content) for entry in self.experts)

    def _is(self, entry: Mapping[str, Any], expert: str, content: str | None) -> bool:
        if expert in (entry["name"], entry["location"]) or content == entry["content"]:
            return True
        if len(expert) >= SHORTEST_HASH and str(entry["content"]).startswith(expert):
            return True
        return _same_place(input_location(entry, self.place), expert)

    def to_json(self) -> dict[str, Any]:
        """Plain data, without a row per tensor."""
        recipe, base = self.manifest["recipe"], self.manifest["base"]
        return {
            "place": str(self.place),
            "finished": self.finished,
            "kind": self.manifest.get("kind", "model"),
            "method": recipe.get("method", "actmat"),
            "options": recipe.get("options", {}),
            "base": recipe.get("base") if base is None else base["location"],
            "experts": [{k: e[k] for k in ("name", "location", "content")} for e in self.experts],
            "content": self.manifest["output"]["content"],
            "tensors": len(self.manifest["tensors"]),
            "actmat": self.manifest["versions"].get("actmat", ""),
        }


@dataclass(frozen=True, slots=True)
class Found:
    """Merges in the order in which they were finished, and manifests that cannot be read, with the reason."""

    merges: tuple[PastMerge, ...]
    unreadable: tuple[tuple[Path, str], ...]


def find_merges(folders: Iterable[str | Path]) -> Found:
    """All finished merges in these folders and below; hidden folders and links to folders are not searched.

    Raises:
        CheckpointError: a folder does not exist; lists all that do not.
    """
    places = [Path(f) for f in folders]
    if missing := [str(p) for p in places if not p.is_dir()]:
        raise CheckpointError("There is no such folder to search for merges.", missing)
    merges, unreadable = [], []
    for place in dict.fromkeys(p for folder in places for p in _below(folder)):
        try:
            merges.append(PastMerge(place, read_manifest(place)))
        except MergeError as error:
            unreadable.append((place, str(error).splitlines()[0]))
    return Found(tuple(sorted(merges, key=lambda m: (m.finished, str(m.place)))), tuple(unreadable))


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        if MANIFEST_NAME in files:
            yield Path(place)


def made_by(merges: Sequence[PastMerge], file: str | Path) -> list[PastMerge]:
    """Merges that wrote this file, or files with the same tensors; an output's folder is a file of all its tensors.

    Weights are compared tensor by tensor, any other file as a whole. The file is read once, as far as any merge has
    the same tensors.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
    """
    place = Path(file)
    if not place.exists():
        raise CheckpointError(f"{place} does not exist: expected a file, or a folder with weights, that a merge wrote.")
    recorded = [m for m in merges if place.is_file() and place.name in m.manifest["output"]["side_files"]]
    if recorded:
        digest = hash_file(place)
        return [m for m in recorded if m.manifest["output"]["side_files"][place.name]["hash"] == digest]
    left = list(merges)
    for name, digest in _hashes(str(place), left):
        left = [m for m in left if m.hashes.get(name) == digest]
        if not left:
            break
    return left


def _hashes(location: str, merges: Sequence[PastMerge]) -> Iterator[tuple[str, str]]:
    """Name and content hash of each tensor; nothing is read where no merge has all the names."""
    with open_stored(location) as stored:
        names = set(stored.specs)
        if not any(names <= m.hashes.keys() for m in merges):
            yield next(iter(names), ""), ""
            return
        buffer = memoryview(bytearray(CHUNK))
        for name, spec in stored.specs.items():
            seen = ContentHash()
            while seen.size < spec.nbytes:
                chunk = buffer[: min(CHUNK, spec.nbytes - seen.size)]
                stored.read_into(name, seen.size, chunk)
                seen.update(chunk)
            yield name, seen.hexdigest()


@dataclass(frozen=True, slots=True)
class Changes:
    """Differences of one merge from another.

    Args:
        recipe: field -> (before, after); None: at its default.
        added, removed: names of experts, by content.
        changed: names of experts that have other content under the same name.
        versions: package -> (before, after).
        tensors: how many differ, of how many that both have; and names that only one has.
    """

    recipe: Mapping[str, tuple[Any, Any]]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    versions: Mapping[str, tuple[str | None, str | None]]
    tensors: tuple[int, int, int]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        differing, common, single = self.tensors
        return {
            "recipe": {k: list(v) for k, v in self.recipe.items()},
            "experts": {"added": list(self.added), "removed": list(self.removed), "changed": list(self.changed)},
            "versions": {k: list(v) for k, v in self.versions.items()},
            "tensors": {"differing": differing, "common": common, "only_in_one": single},
        }


def changes_between(before: PastMerge, after: PastMerge) -> Changes:
    """Differences of the second merge from the first: what it was told otherwise, and what that changed."""
    old, new = ({e["name"]: e["content"] for e in m.experts} for m in (before, after))
    mine, other = before.hashes, after.hashes
    common = mine.keys() & other.keys()
    recipes = [{k: v for k, v in m.manifest["recipe"].items() if k != "experts"} for m in (before, after)]
    recipes = [r | {"weights": _weights(m)} for r, m in zip(recipes, (before, after), strict=True)]
    return Changes(
        recipe=_differences(*recipes),
        added=tuple(n for n, content in new.items() if n not in old and content not in old.values()),
        removed=tuple(n for n, content in old.items() if n not in new and content not in new.values()),
        changed=tuple(n for n in old if n in new and old[n] != new[n]),
        versions=_differences(before.manifest["versions"], after.manifest["versions"]),
        tensors=(sum(mine[n] != other[n] for n in common), len(common), len(mine.keys() ^ other.keys())),
    )


def _weights(merge: PastMerge) -> dict[str, Any] | None:
    """Weights of the experts that are not 1."""
    rows = zip(merge.experts, merge.manifest["recipe"].get("experts", ()), strict=True)
    return {e["name"]: r["weight"] for e, r in rows if r.get("weight", 1.0) != 1.0} or None


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = dict.fromkeys((*one, *other))
    return {k: (one.get(k), other.get(k)) for k in keys if one.get(k) != other.get(k)}


def _content_of(expert: str) -> str | None:
    """Content hash of a folder that is itself a merge."""
    try:
        return str(read_manifest(Path(expert))["output"]["content"]) if os.path.isdir(expert) else None
    except MergeError:
        return None


def _same_place(location: str, expert: str) -> bool:
    return os.path.exists(location) and os.path.exists(expert) and os.path.samefile(location, expert)
