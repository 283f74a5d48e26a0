"""Match the inputs of two merges by the hashes that their manifests hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from actmat.errors import AlignmentError
from actmat.extras.pages.comparison.outputs import items_of, makes_adapter
from actmat.report.manifest import expert_hashes

__all__ = ["matched_experts"]

Manifest = Mapping[str, Any]
MOST = 3
"""Names listed in one problem."""


def matched_experts(first: Manifest, second: Manifest, names: tuple[str, str]) -> list[tuple[str, str]]:
    """Names of the same experts in both merges, in the order of the first.

    Experts are the same where every tensor that both merges read has one hash, under whatever name.
    Where no tensor was read by both, name and location decide.

    Args:
        first, second: manifests.
        names: of the two merges, for errors.

    Raises:
        AlignmentError: another base, other experts, or another kind of output; lists all differences.
    """
    headline = f"{names[0]} and {names[1]} cannot be compared: they are no merges of the same base and experts."
    kinds = [m.get("kind", "model") for m in (first, second)]
    if kinds[0] != kinds[1]:
        raise AlignmentError(headline, [f"{n} is a merged {k}" for n, k in zip(names, kinds, strict=True)])
    if first["hash"] != second["hash"]:
        found = f"{names[0]} has {first['hash']}, {names[1]} has {second['hash']}"
        raise AlignmentError(headline, [f"the inputs were hashed in two ways: {found}; merge one of them again"])
    pairs, problems = _matched(first, second, names)
    problems = [*_base_problems(first, second, names), *problems, *_item_problems(first, second, names)]
    if problems:
        raise AlignmentError(headline, problems)
    return pairs


def _matched(first: Manifest, second: Manifest, names: tuple[str, str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Pairs of names, and a problem for every expert without a counterpart."""
    left = {e["name"]: e for e in second["experts"]}
    pairs: list[tuple[str, str]] = []
    problems = []
    for expert in first["experts"]:
        candidates = sorted(left.values(), key=lambda e: e["name"] != expert["name"])
        found = next((e["name"] for e in candidates if _same(expert, e, first, second)), None)
        if found is not None:
            pairs.append((expert["name"], found))
            del left[found]
        else:
            problems.append(f"expert '{expert['name']}' of {names[0]} {_reason(expert, first, second, names[1])}")
    problems += [f"expert '{n}' of {names[1]} is none of {names[0]}" for n in left if not _named(first, n)]
    return pairs, problems


def _named(manifest: Manifest, name: str) -> Mapping[str, Any] | None:
    return next((e for e in manifest["experts"] if e["name"] == name), None)


def _reason(expert: Mapping[str, Any], first: Manifest, second: Manifest, name: str) -> str:
    twin = _named(second, expert["name"])
    if twin is None:
        return f"is none of {name}, which has {', '.join(e['name'] for e in second['experts'])}"
    mine, other = expert_hashes(first, expert["name"]), expert_hashes(second, twin["name"])
    differing = _differing(mine, other)
    if not differing:
        return f"lies at {expert['location']}, that of {name} at {twin['location']}; no tensor was read by both"
    return f"differs from that of {name} in {len(differing)} of {len(mine)} tensors ({_some(differing)})"


def _same(a: Mapping[str, Any], b: Mapping[str, Any], first: Manifest, second: Manifest) -> bool:
    mine, other = expert_hashes(first, a["name"]), expert_hashes(second, b["name"])
    if mine.keys() & other.keys():
        return not _differing(mine, other)
    return bool(a["name"] == b["name"] and a["location"] == b["location"])


def _differing(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names that both have with another value."""
    return [n for n in mine if n in other and mine[n] != other[n]]


def _base_problems(first: Manifest, second: Manifest, names: tuple[str, str]) -> list[str]:
    if first["base"] is None or second["base"] is None:
        return []  # adapters, merged without one
    mine, other = ({r["name"]: r["input_hashes"]["base"] for r in m["tensors"]} for m in (first, second))
    differing = _differing(mine, other)
    if not differing:
        return []
    locations = f"{first['base']['location']} in {names[0]}, {second['base']['location']} in {names[1]}"
    return [f"the base differs in {len(differing)} of {len(mine)} tensors ({_some(differing)}): {locations}"]


def _item_problems(first: Manifest, second: Manifest, names: tuple[str, str]) -> list[str]:
    mine, other = ({n: tuple(r["shape"]) for n, r in items_of(m).items()} for m in (first, second))
    word = "module" if makes_adapter(first) else "tensor"

    def only(here: Collection[str], there: Collection[str], name: str) -> list[str]:
        found = [n for n in here if n not in there]
        return [f"{len(found)} {word}(s) are only in {name} ({_some(found)})"] if found else []

    shapes = _differing(mine, other)
    said = [f"{len(shapes)} {word}(s) have other shapes ({_some(shapes)})"] if shapes else []
    return [*only(mine, other, names[0]), *only(other, mine, names[1]), *said]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST]) + (", ..." if len(names) > MOST else "")
