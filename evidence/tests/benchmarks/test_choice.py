"""The method of `method: auto` is the one that the committed scores choose by the criterion."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest
from benchmarks.common import RESULTS
from benchmarks.evidence.choice import (
    APARTS,
    CANDIDATES,
    IN_FORCE,
    TOLERATED,
    Cuts,
    HeldOut,
    border_rows,
    by_base,
    candidates,
    choices,
    chosen,
    cuts_of,
    fitted,
    form_of,
    held_out,
    held_rows,
    on_adapters,
    ranked_cuts,
)
from benchmarks.evidence.group import CONTROLS, FOLDER, FRESH, MORE, SUITES, Group
from benchmarks.evidence.intervals import paired
from benchmarks.evidence.sets import ELSEWHERE, FEATURES, ExpertSet, every_set, expert_sets, left_out_rows

from actmat.methods import all_methods, get_method
from actmat.run.automatic import APART, DIFFERENT_MODULES, HOT, ON_ADAPTERS, SHARED, SHARED_START, SOLVING, TABLE
from actmat_experiments.harness.results import Score, append_scores


def test_the_table_is_that_of_the_scores() -> None:
    assert choices() == (IN_FORCE, TABLE)
    assert on_adapters() == ON_ADAPTERS
    assert len(TABLE) <= 8, "a rule that can be read"


def test_every_set_that_was_merged_is_in_the_table_or_is_listed_with_the_reason() -> None:
    tabled, listed = {one.title for one in expert_sets()}, {row[0] for row in left_out_rows()}
    assert not tabled & listed
    suites = {one.group.suite for one in every_set()}
    for path in FOLDER.glob("*.jsonl"):
        name = path.stem
        if name.endswith(("-gram", "-sizes", "-subsets")) or name in CONTROLS:
            continue
        assert name in (*SUITES, *sum(MORE.values(), ())), f"{name} is no file of the evidence"
        assert json.loads(path.read_text().splitlines()[0])["suite"] in suites
    assert {"digits", "rxnfp", "vision-small", "text-minilm", "llm-qwen"} <= suites
    for words in ("5 x rate of two experts", "rxnfp", "actmat demo", "loss on whole texts, asked in other words"):
        assert any(words in title for title in tabled), words
    assert all(reason for _, reason in left_out_rows())
    assert any(words.startswith("MiniLM-L6, plain") for words in ELSEWHERE)
    assert (RESULTS / "few.jsonl").is_file()


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


def test_the_note_of_different_modules_is_of_the_set_that_has_them() -> None:
    (only,) = [one for one in expert_sets() if one.modules_differ]
    for row in ("ct_merging", "dc_merge"):
        assert f" {row} {mean(only.gains(row)):+.1f}" in DIFFERENT_MODULES


def test_what_sets_adapters_apart_gains_a_point_on_bases_that_were_held_out() -> None:
    """Each feature by itself: without it, the borders move, and bases that lack the feature lose."""
    every = [one for one in expert_sets() if one.group.regime == "lora"]
    for feature in FEATURES:
        gains = []
        for apart in (APARTS, tuple(some for some in APARTS if feature not in some)):
            held = []
            for base in dict.fromkeys(one.base for one in every):
                cuts = next(cuts for _, cuts in ranked_cuts(every, base) if cuts.apart in apart)
                rows = fitted(every, cuts, base)
                held += [
                    HeldOut(one, "other", rows.get((form_of(one, cuts), "any")) or "average")
                    for one in every
                    if one.base == base
                ]
            gains.append(mean(own.gain for own in by_base(held).values() if own.gain is not None))
        assert gains[0] > gains[1] + 1, feature


def test_the_borders_are_those_of_the_largest_gain_of_all_sets_of_adapters() -> None:
    """Recomputed from the table, for every lower border: sets that get the average count with 0."""
    some = [one for one in expert_sets() if one.group.regime == "lora"]
    best = cuts_of(expert_sets())

    def gain(low: float) -> float:
        cuts = best._replace(low=low)
        table = fitted(some, cuts)
        rows = [table.get((form_of(one, cuts), "any")) or "average" for one in some]
        held = [HeldOut(one, "other", row) for one, row in zip(some, rows, strict=True)]
        return mean(own.gain for own in by_base(held).values() if own.gain is not None)

    sizes = sorted({one.size for one in some if one.size is not None and one.size < best.high})
    assert gain(best.low) == pytest.approx(max(gain((a * b) ** 0.5) for a, b in pairwise(sizes)))


def test_the_printed_borders_are_ranges_and_say_what_a_set_changes() -> None:
    first, *others = border_rows()
    assert first[0] == "nothing"
    for cell, value in zip(first[1:3], IN_FORCE, strict=False):
        low, high = map(float, cell.split(" to "))
        assert low <= 100 * value <= high
    assert others
    assert all(row[1:-1] != first[1:-1] for row in others)


def test_a_border_gains_a_point_on_bases_that_were_held_out() -> None:
    gains = []
    for count in (0, 1, 2):
        adapters = [held for held in held_out(count=count) if held.one.group.regime == "lora"]
        gains.append(mean(own.gain for own in by_base(adapters).values() if own.gain is not None))
    assert gains[0] + 1 < gains[1] < gains[2]


def test_candidates_are_methods_without_data_and_of_adapters_without_a_base() -> None:
    known = {method.name for method in all_methods() if not method.needs_statistics} | {"task_arithmetic_1"}
    assert set(CANDIDATES) <= known
    for (form, _), choice in TABLE.items():
        assert choice.method in CANDIDATES
        assert form == "full" or get_method(choice.method).lowrank is not None


def test_what_falls_below_average_or_base_on_held_out_bases_is_named_on_the_page() -> None:
    page = (RESULTS.parents[1] / "docs" / "choosing.md").read_text(encoding="utf-8")
    far = []
    for held in held_out():
        gains = [*held.one.gains(held.row), *held.one.gains(held.row, "base")]
        if gains and min(gains) < TOLERATED:
            far.append(held.one.title)
    assert far, "else the page may say that no set is below"
    (said,) = [line for line in page.splitlines() if line.startswith("**Below the average or the base**")]
    assert f"{len(far)} of {len(held_rows())} sets" in said


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
    assert cuts_of(sets, count=0)[:2] == (0.0, 0.0)
    low, high, _ = cuts_of(sets)
    assert LOW < low == high < HIGH
    large = [one for one in sets if form_of(one, Cuts(low, HIGH + 1)) == "adapters"]
    assert {form_of(one, Cuts(low, high)) for one in large} == {"other"}
    assert candidates(sets) == ["average", "cart", "tsv"], "measured in every set"
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
    assert row[1:7] == ["2.00 %", "2", "`cart`", "20.0", "40.0", "1.0"]


def test_what_a_base_lacks_decides_nothing(folder: Path) -> None:
    """Without `cart` among the texts' large adapters, the images still choose it, and the table is not tested there."""
    path = folder / "text-minilm.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(x for x in lines if not ('"cart"' in x and f"m{HIGH}" in x)))
    held = {one.one.title: one.row for one in held_out(folder, folder)}
    title = f"MiniLM-L6, m{HIGH}, LoRA"
    assert held[title] == "cart"
    (row,) = [row for row in held_rows(folder, folder) if row[0] == title]
    assert row[3:8] == ["`cart`", "20.0", "40.0", "not tested", ""]
    assert by_base(held_out(folder, folder))["MiniLM-L6"].missing == ["cart"]


def test_a_method_below_the_base_is_not_safe(tmp_path: Path) -> None:
    """`tsv` gains more, and nowhere less than the average, but is two points below one of the bases."""
    rows = {"base": (60, 20), "experts": (90, 90), "average": (40, 40), "tsv": (58, 80), "cart": (60, 50)}
    for suite, index in (("text-minilm", 0), ("vision-vits14", 1)):
        lines = [Score(suite, "full", m, "default", t, 0, n[index], 100) for m, n in rows.items() for t in "ab"]
        append_scores(tmp_path / f"{suite}.jsonl", lines)
    assert chosen(expert_sets(tmp_path, tmp_path), ["average", "cart", "tsv"]) == "cart"


def test_the_split_by_starts_is_fitted_without_the_base_too() -> None:
    assert cuts_of(expert_sets()).apart == set(FEATURES)
    assert "start" not in cuts_of(expert_sets(), without="ViT-S/14").apart, "only images lose from one A"
    assert "modules" not in cuts_of(expert_sets(), without="SmolLM2-135M").apart, "one set has different modules"


def test_a_training_is_never_mixed_with_another_of_its_seed() -> None:
    def score(method: str, correct: int, weights: str) -> Score:
        detail = {"training": {"weights": weights}}
        return Score("llm-qwen", "lora", method, "default", "a", 0, correct, 100, model="m", detail=detail)

    group = Group([score("average", 40, "x"), score("average", 50, "y"), score("tsv", 60, "y")])
    assert group.points("average") == {0: {"a": 40.0}, 1: {"a": 50.0}}
    assert ExpertSet(group, "b", "decoder", None).gains("tsv") == [10.0]


def test_sets_without_head_room_choose_nothing(tmp_path: Path) -> None:
    rows = {"base": 50, "experts": 52, "average": 40, "tsv": 41}
    append_scores(
        tmp_path / "text-minilm.jsonl",
        [Score("text-minilm", "full", m, "default", t, 0, n, 100) for m, n in rows.items() for t in "ab"],
    )
    assert expert_sets(tmp_path, tmp_path) == ()
    assert not set(FRESH) & set(SUITES)
