"""The method of `method: auto` is the one that the committed scores choose by the criterion."""

from __future__ import annotations

from pathlib import Path

from benchmarks.evidence.choice import TOLERATED, best_table, choice_table, choices, gains, on_adapters
from benchmarks.evidence.claims import claim_rows
from benchmarks.evidence.group import FOLDER, FRESH, SUITES, groups
from benchmarks.evidence.tables import evidence_table

from actmat.methods import get_method
from actmat.run.automatic import ON_ADAPTERS, TABLE
from actmat_experiments.harness.results import Score, append_scores


def test_the_table_is_that_of_the_scores() -> None:
    assert choices() == TABLE
    assert on_adapters() == ON_ADAPTERS


def test_the_default_is_never_more_than_a_point_below_the_average() -> None:
    for (form, kind), choice in TABLE.items():
        assert min(gains(FOLDER, form, kind)[choice.name]) >= TOLERATED, (form, kind)


def test_the_default_works_without_data_and_of_adapters_without_a_base() -> None:
    for (form, _), choice in TABLE.items():
        method = get_method(choice.method)
        assert not method.needs_statistics
        assert form == "full" or method.lowrank is not None


def test_fresh_suites_are_judged_and_choose_nothing(tmp_path: Path) -> None:
    def line(suite: str, method: str, task: str, seed: int, correct: int) -> Score:
        return Score(suite, "full", method, "default", task, seed, correct, 100, model="m")

    auto, other = TABLE["full", "encoder"].name, "tsv"
    rows = {"base": 20, "experts": 80, "average": 40, auto: 30, other: 60}
    for suite, changed in (("text-minilm", {auto: 50}), ("fresh-text-minilm", {})):
        lines = [line("text-minilm", m, t, 0, n) for m, n in (rows | changed).items() for t in ("a", "b")]
        append_scores(tmp_path / f"{suite}.jsonl", lines)
    before = gains(tmp_path, "full", "encoder")
    assert before == {"average": [0.0], auto: [10.0], other: [20.0]}, "one set, that of the suite that chooses"
    ((group, method, gain, share, average),) = choice_table(tmp_path, FRESH)
    assert (group, method, gain) == ("m, full fine-tuning", f"`{auto}`", "-10.0")
    assert (share, average) == ("17 %", "33 %")
    append_scores(tmp_path / "fresh-text-minilm.jsonl", [line("text-minilm", "base", "a", 1, 20)])
    assert len(choice_table(tmp_path, FRESH)) == 1, "a seed that has only begun"


def test_a_fresh_suite_without_what_auto_takes_has_no_row(tmp_path: Path) -> None:
    append_scores(
        tmp_path / "fresh-text-minilm.jsonl", [Score("text-minilm", "lora", "base", "default", "a", 0, 2, 10)]
    )
    assert choice_table(tmp_path, FRESH) == []
    assert not set(FRESH) & set(SUITES)


def test_claims_are_judged_by_their_interval(tmp_path: Path) -> None:
    def lines(regime: str, method: str, gains: tuple[int, ...]) -> list[Score]:
        tasks = zip("abcdefgh", gains, strict=True)
        return [Score("llm-tasks", regime, method, "default", t, s, 40 + g + s, 100) for t, g in tasks for s in (0, 1)]  # type: ignore[arg-type]

    flat, up, mixed = (0,) * 8, (9, 10, 11, 10, 9, 11, 10, 10), (20, -9, 15, -8, 3, -12, 14, -6)
    for method, some in (
        ("average", flat),
        ("actmat", up),
        ("tsv", tuple(u - m for u, m in zip(up, mixed, strict=True))),
    ):
        append_scores(tmp_path / "llm-tasks.jsonl", lines("full", method, some))
    for method, some in (("average", up), ("actmat", flat), ("tsv", (0, 1, 0, 1, 0, 0, 1, 0))):
        append_scores(tmp_path / "llm-tasks.jsonl", lines("lora", method, some))
    some = groups(tmp_path, ("llm-tasks",))
    found = {(g.title.rpartition(", ")[2], row[0]): row[1:] for g in some for row in claim_rows(g)}
    assert found["full fine-tuning", "`actmat` above `average`"] == ["2 x 8", "+10.0 ±0.6", "holds"]
    gap, verdict = found["full fine-tuning", "`actmat` above `tsv`"][1:]
    assert (gap.split()[0], verdict) == ("+2.1", "holds here, by chance perhaps")
    assert found["LoRA", "`actmat` near `tsv`"][1:] == ["-0.4 ±0.4", "holds"]
    assert found["LoRA", "`actmat` above `average`"][1:] == ["-10.0 ±0.6", "does not hold"]
    text = evidence_table("claims_tasks_lora", tmp_path)
    assert text.count("| `actmat`") == 2
    assert "Not run" in evidence_table("claims_tasks_lora", tmp_path / "none")


def test_the_best_of_each_group_stands_beside_auto_with_its_worst_set_anywhere(tmp_path: Path) -> None:
    auto = TABLE["adapters", "encoder"].name
    correct = {
        ("text-minilm", 0): {"average": 40, auto: 41, "tsv": 50, "dc_merge": 41, "cart": 60},
        ("text-minilm", 1): {
            "average": 40,
            auto: 43,
            "tsv": 52,
            "dc_merge": 41,
        },  # `cart` lacks a seed, so that it is no candidate
        ("vision-vits14", 0): {"average": 39, auto: 40, "tsv": 32, "dc_merge": 38},
    }
    for (suite, seed), rows in correct.items():
        lines = [Score(suite, "lora", m, "default", t, seed, n, 100, model="m") for m, n in rows.items() for t in "ab"]
        append_scores(tmp_path / f"{suite}.jsonl", lines)
    assert [row[1:] for row in best_table(tmp_path)] == [
        [f"`{auto}`", "+1.0", "+1.0", "+1.0"],
        ["`tsv`", "+11.0", "-7.0", "+2.0"],
    ]


def test_shares_of_a_way_without_length_are_left_out(tmp_path: Path) -> None:
    auto = TABLE["full", "encoder"].name
    rows = {"base": 50, "experts": 50, "average": 40, auto: 41}
    lines = [Score("vision-small", "full", m, "default", t, 10, n, 100) for m, n in rows.items() for t in "ab"]
    append_scores(tmp_path / "fresh-vision-small.jsonl", lines)
    expected = ["vision-small, full fine-tuning", f"`{auto}`", "+1.0", "no head-room", "no head-room"]
    assert choice_table(tmp_path, FRESH) == [expected]
