"""The rows of all models, one JSON file per model: a study that was interrupted goes on with the next model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from actmat.engine.resources import one_thread
from actmat_experiments.forecast.models import FAMILIES, Family, train
from actmat_experiments.forecast.rows import SCALES, SUBSETS, UNLABELLED, Row, measure, rules
from actmat_experiments.harness.cache import Cache, library_versions

__all__ = ["VERSION", "measured", "read_rows", "rows_of"]

VERSION = 1
"""Of what a row holds and of how models are merged: rows of another version are measured again."""

_FILE = "rows.json"


def rows_of(
    cache: Cache,
    families: Sequence[Family] = FAMILIES,
    seeds: Sequence[int] = (0,),
    *,
    subsets: Sequence[Sequence[int]] = SUBSETS,
    methods: Callable[[int], Sequence[str]] = rules,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Row]:
    """Train and measure what is not measured yet, seed by seed; all rows.

    Args:
        progress: told the name of a model before it is made or read.
    """
    rows = []
    for seed in seeds:
        for family in families:
            progress(f"{family.name}/{seed}")
            place = cache.get(
                "forecast-rows",
                _key(family, seed, subsets, methods),
                lambda out, f=family, s=seed: _make(out, f, s, subsets, methods),  # type: ignore[misc]
            )
            rows += read_rows(place)
    return rows


def measured(cache: Cache, families: Sequence[Family] = FAMILIES, seeds: Sequence[int] = (0,)) -> dict[str, list[Row]]:
    """Rows of the models that are measured already, by model."""
    found = {}
    for seed in seeds:
        for family in families:
            key = _key(family, seed, SUBSETS, rules)
            if cache.holds("forecast-rows", key):
                found[f"{family.name}/{seed}"] = read_rows(cache.path("forecast-rows", key))
    return found


def read_rows(place: Path) -> list[Row]:
    """Rows as `rows_of` has written them."""
    raw = json.loads((place / _FILE).read_text(encoding="utf-8"))
    return [Row(**row | {"experts": tuple(row["experts"])}) for row in raw]


def _key(
    family: Family, seed: int, subsets: Sequence[Sequence[int]], methods: Callable[[int], Sequence[str]]
) -> Mapping[str, Any]:
    """All that determines the rows of one model; the name of a family does not."""
    return {
        "version": VERSION,
        "family": asdict(replace(family, name="")),
        "settings": asdict(family.settings),
        "seed": seed,
        "subsets": [list(s) for s in subsets],
        "methods": {str(n): list(methods(n)) for n in sorted({len(s) for s in subsets})},
        "scales": list(SCALES),
        "unlabelled": UNLABELLED,
        "libraries": library_versions("torch", "scikit-learn"),
    }


def _make(
    out: Path, family: Family, seed: int, subsets: Sequence[Sequence[int]], methods: Callable[[int], Sequence[str]]
) -> None:
    with one_thread():
        rows = list(measure(train(family, seed), family.name, seed, subsets=subsets, methods=methods))
    (out / _FILE).write_text(json.dumps([row.to_json() for row in rows], allow_nan=False), encoding="utf-8")
