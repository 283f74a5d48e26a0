"""The method of `method: auto` is the one that the committed scores choose by the criterion."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest
from benchmarks.evidence.choice import (
    TOLERATED,
    HeldOut,
    borders_of,
    by_base,
    candidates,
    choices,
    chosen,
    expert_sets,
    fitted,
    held_out,
    held_rows,
    on_adapters,
)
from benchmarks.evidence.group import FRESH, SUITES
from benchmarks.evidence.intervals import paired

from actmat.methods import all_methods, get_method
from actmat.run.automatic import APART, GENTLE, HOT, ON_ADAPTERS, SHARED, SHARED_START, SOLVING, TABLE
from actmat_experiments.harness.results import Score, append_scores


def test_the_table_is_that_of_the_scores() -> None:
    assert choices() == ((GENTLE, HOT), TABLE)
    assert on_adapters() == ON_ADAPTERS
    assert len(TABLE) <= 8, "a rule that can be read"


def test_the_note_of_a_shared_start_is_of_the_sets_that_have_it() -> None:
    assert {m.name for m in all_methods() if m.stages is not None and not m.needs_statistics} == set(SOLVING)
    some = [one for one in expert_sets() if one.size is not None and one.size < HOT and one.overlap is not None]
    assert not [one.title for one in some if APART <= one.overlap <= SHARED]
    shared = [one for one in some if one.overlap > SHARED]
    assert {one.kind for one in shared} == {"encoder"}
    for row in ("actmat", "tsv", "ct_merging", "dc_merge"):
        found = [paired(one.group.points(row), one.group.points("average")) for one in shared]
        gains = [gain.mean for gain in found if gain is not None]
        assert len(gains) == len(shared)
        assert f" {row} {min(gains):+.1f} to {max(gains):+.1f}" in SHARED_START, "as on docs/regimes.md"


def test_the_borders_are_those_of_the_largest_gain_of_all_sets_of_adapters() -> None:
    """Recomputed from the table, for every lower border: sets that get the average count with 0."""
    some = [one for one in expert_sets() if one.group.regime == "lora"]
    low, high = borders_of(expert_sets())

    def gain(low: float) -> float:
        table = fitted(some, (low, high))
        rows = [table.get((one.form((low, high)), "any")) or "average" for one in some]
        held = [HeldOut(one, "other", row) for one, row in zip(some, rows, strict=True)]
        return mean(found for found, *_ in by_base(held).values())

    sizes = sorted({one.size for one in some if one.size is not None and one.size < high})
    assert gain(low) == pytest.approx(max(gain((a * b) ** 0.5) for a, b in pairwise(sizes)))


def test_a_border_gains_a_point_on_bases_that_were_held_out() -> None:
    gains = []
    for count in (0, 1, 2):
        adapters = [held for held in held_out(count=count) if held.one.group.regime == "lora"]
        gains.append(mean(found for found, *_ in by_base(adapters).values()))
    assert gains[0] + 1 < gains[1] < gains[2] - 1


def test_the_default_works_without_data_and_of_adapters_without_a_base() -> None:
    for (form, _), choice in TABLE.items():
        method = get_method(choice.method)
        assert not method.needs_statistics
        assert form == "full" or method.lowrank is not None


def test_no_base_that_was_held_out_lies_far_below_the_average() -> None:
    found = by_base(held_out())
    assert len(found) == 7
    assert min(gain for gain, *_ in found.values()) >= TOLERATED


LOW, HIGH = 0.002, 0.02


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Adapters of two bases, each with small and with large deltas: `tsv` is best of the small, `cart` of the large."""
    small = {"base": 20, "experts": 80, "average": 40, "tsv": 60, "cart": 42, "ties": 90}
    large = small | {"tsv": 30, "cart": 45}
    for suite, base in (("text-minilm", 0), ("vision-vits14", 1)):
        for size, rows in ((LOW, small), (HIGH, large)):
            model = f"m{size}"
            lines = [
                Score(suite, "lora", m, "default", t, seed, n + base, 100, model=model)
                for m, n in rows.items()
                for t in "ab"
                for seed in (0, 1)
                if m != "ties" or size == LOW  # a gap: no candidate of all adapters
            ]
            append_scores(tmp_path / f"{suite}.jsonl", lines)
            with (tmp_path / f"{suite}-gram.jsonl").open("a") as file:
                file.write(json.dumps({"suite": suite, "model": model, "regime": "lora", "change": size}) + "\n")
    return tmp_path


def test_the_threshold_parts_what_wants_different_methods(folder: Path) -> None:
    sets = expert_sets(folder, folder)
    assert {one.size for one in sets} == {LOW, HIGH}
    assert borders_of(sets, count=0) == (0.0, 0.0)
    low, high = borders_of(sets)
    assert LOW < low == high < HIGH
    large = [one for one in sets if one.form((low, HIGH + 1)) == "adapters"]
    assert {one.form((low, high)) for one in large} == {"other"}
    assert candidates(sets, "mixed") == ["average", "cart", "tsv"], "measured in every set"
    assert chosen(large, ["average", "cart", "tsv"]) == "cart"
    assert chosen(large, ["average", "tsv"]) == "average", "no candidate may be far below it"
    assert chosen(large, ["average", "cart", "tsv"], in_force="average") == "cart", "more than half a point better"


def test_a_base_takes_no_part_in_its_own_choice(folder: Path) -> None:
    worse = [
        Score("text-minilm", "lora", "cart", "default", t, s, 1, 100, model=f"m{HIGH}") for t in "ab" for s in (0, 1)
    ]
    append_scores(folder / "text-minilm.jsonl", worse)
    found = {(held.one.base, held.form): held.row for held in held_out(folder, folder)}
    assert found["MiniLM-L6", "other"] == "cart", "as the images choose, though it is bad here"
    assert found["ViT-S/14", "other"] == "average"
    (row,) = [row for row in held_rows(folder, folder) if row[0] == f"MiniLM-L6, m{HIGH}, LoRA"]
    assert row[1:6] == ["2.00 %", "`cart`", "20.0", "40.0", "1.0"]


def test_sets_without_head_room_choose_nothing(tmp_path: Path) -> None:
    rows = {"base": 50, "experts": 52, "average": 40, "tsv": 41}
    append_scores(
        tmp_path / "text-minilm.jsonl",
        [Score("text-minilm", "full", m, "default", t, 0, n, 100) for m, n in rows.items() for t in "ab"],
    )
    assert expert_sets(tmp_path, tmp_path) == ()
    assert not set(FRESH) & set(SUITES)
