"""The study on pretrained bases: a toy subject from end to end, and the tables from rows that are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.evidence.group import Group
from benchmarks.pretrained.__main__ import add
from benchmarks.pretrained.adamerging import trained
from benchmarks.pretrained.choices import HEADER, evidence_lines, evidence_rows
from benchmarks.pretrained.grams import StoredGrams
from benchmarks.pretrained.measure import BY_INPUTS, DRAWS, LENGTHENED, SCALES, TOO_LONG, measure
from benchmarks.pretrained.merges import CHOICES, CLOSED, half_of
from benchmarks.pretrained.subjects import Inputs, Subject
from benchmarks.pretrained.tables import (
    TABLES,
    adamerging_rows,
    by_labels,
    candidates,
    chosen,
    fair_regret,
    read_rows,
    regret,
)
from torch import Tensor, nn

from actmat_experiments.datafree.matrices import matrices
from actmat_experiments.harness.results import Score

TASKS = {"a": 3, "b": 5}
MAPS = {"first.weight": 1, "second.weight": 1}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


def given(x: Tensor, labels: Tensor, size: int = 5) -> Inputs:
    order = torch.arange(len(x)).flip(0).split(size)
    return Inputs([(i, {"x": x[i]}) for i in order], labels)


def toy(*, factors: bool = False) -> Subject:
    """Experts that know their tasks: labels are what each expert says."""
    torch.manual_seed(0)
    base, experts = Encoder(), {t: Encoder() for t in TASKS}
    start = {n: p.detach().clone() for n, p in base.named_parameters()}
    for expert in experts.values():
        with torch.no_grad():
            for n, p in expert.named_parameters():
                p.copy_(start[n] + 0.3 * p)
    weights = {t: {n: p.detach() for n, p in e.named_parameters()} for t, e in experts.items()}
    to_classes = {t: torch.randn(7, c) for t, c in TASKS.items()}
    heads = {t: (lambda f, w=w: f @ w) for t, w in to_classes.items()}
    parts: dict[str, dict[str, Inputs]] = {}
    for part, n in (("test", 40), ("measured", 12), ("held", 12)):
        drawn = {t: torch.randn(n, 6) for t in TASKS}
        with torch.no_grad():
            parts[part] = {t: given(x, heads[t](experts[t](x)).argmax(-1)) for t, x in drawn.items()}
    deltas = {
        t: {k: w - matrices(start, MAPS)[k] for k, w in matrices(some, MAPS).items()} for t, some in weights.items()
    }
    rank = {
        t: {k: (torch.zeros(len(d), 2), torch.ones(2, d.shape[1]), torch.zeros(2, d.shape[1])) for k, d in some.items()}
        for t, some in deltas.items()
    }
    return Subject(
        suite="text-minilm",
        regime="lora" if factors else "full",
        seed=0,
        model=base,
        base=start,
        rest={t: {n: w for n, w in some.items() if n not in MAPS} for t, some in weights.items()},
        maps=MAPS,
        deltas=deltas,
        pool=lambda model, arguments: model(arguments["x"]),
        heads=heads,
        test=parts["test"],
        measured=parts["measured"],
        held=parts["held"],
        noise=given(torch.randn(12, 6), torch.zeros(12)),
        factors=rank if factors else {},
    )


def test_a_subject_is_measured_from_end_to_end(tmp_path: Path) -> None:
    row = measure(toy(factors=True), tmp_path / "work")
    assert row["own"] == dict.fromkeys(TASKS, 1.0)
    assert max(row["base"].values()) < 1.0
    assert not (tmp_path / "work").exists()
    rules = {m["rule"] for m in row["rows"] if m["length"] == "one"}
    expected = {*BY_INPUTS, *CLOSED, "inputs, 0.9", "delta, 0.5", "noise, 0.5", "weights, 0.5", "movement of A, 0.5"}
    assert expected | {"movement of A by use, 0.5", "delta over base's inputs, 0.5"} == rules
    choices = [m for m in row["rows"] if m["length"] == "fixed" and m["rule"] in CHOICES]
    assert len(choices) == len(CHOICES) * (len(SCALES) - 1) - len(TOO_LONG)
    assert all(0 <= m["labels"] <= 1 and m["held"] >= 0 and m["second half measured"] >= 0 for m in candidates(row))
    assert list(row["draws"]) == ["8", "16"], "24 inputs per task are not 32"
    assert all(len(picks) == DRAWS for picks in row["draws"].values())
    assert all(row["rows"][k] in candidates(row, without=()) for picks in row["draws"].values() for k in picks)
    again = next(m for m in row["rows"] if (m["rule"], m["length"]) == ("average", "projection"))
    assert again["scale"] == 1.0
    assert again["test"] == next(m for m in row["rows"] if m["rule"] == "average")["test"]
    assert json.loads(json.dumps(row)) == row


def test_a_quick_subject_has_methods_without_data_only(tmp_path: Path) -> None:
    row = measure(toy(), tmp_path / "work", quick=True)
    assert {m["rule"] for m in row["rows"]} == {*CHOICES, *CLOSED, "delta over base's inputs, 0.5"}
    assert {m["rule"] for m in row["rows"] if m["length"] == "fixed"} == set(LENGTHENED)
    assert not row["draws"]
    assert all("held" not in m and m["noise"] >= 0 for m in row["rows"])
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert read_rows(tmp_path / "rows.jsonl") == [], "nothing was chosen by inputs"


def test_methods_are_added_to_subjects_that_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    row = measure(toy(), tmp_path / "work", quick=True)
    short = {**row, "rows": [m for m in row["rows"] if m["rule"] != "cart"]}
    file.write_text(json.dumps(short) + "\n" + json.dumps({**short, "subject": "another"}) + "\n")
    monkeypatch.setattr("benchmarks.pretrained.__main__.open_subject", lambda *where, most: toy())
    for _ in range(2):
        add(file, ["cart", "average"], [row["subject"]], tmp_path, None, 12)
    one, other = (json.loads(line) for line in file.read_text().splitlines())
    assert other == {**short, "subject": "another"}
    assert one["rows"][:-1] == short["rows"], "nothing is measured a second time"
    assert one["rows"][-1] == next(m for m in row["rows"] if m["rule"] == "cart")


def test_a_merge_is_written_and_the_base_again() -> None:
    subject = toy()
    x = torch.randn(4, 6)
    before = subject.model(x).detach()
    total = {key: sum(d[key] for d in subject.deltas.values()) for key in subject.keys}
    subject.write(total, 0.5)
    mean = {n: torch.stack([some[n] for some in subject.rest.values()]).mean(0) for n in subject.rest["a"]}
    first = torch.tanh(x @ (subject.base["first.weight"] + 0.5 * total["first.weight", 0]).T + mean["first.bias"])
    whole = torch.tanh(
        first @ (subject.base["second.weight"] + 0.5 * total["second.weight", 0]).T + mean["second.bias"]
    )
    torch.testing.assert_close(subject.model(x), whole)
    subject.write_base()
    assert subject.model(x).equal(before)


def test_halves_keep_their_inputs_in_order() -> None:
    inputs = given(torch.arange(7.0)[:, None], torch.arange(7), size=3)
    for half, expected in zip(half_of(inputs), (range(3), range(3, 7)), strict=True):
        order = torch.cat([i for i, _ in half.batches])
        x = torch.cat([b["x"] for _, b in half.batches])[order.argsort()]
        assert x.flatten().tolist() == half.labels_N.tolist() == list(expected)


def test_second_moments_are_means_over_tokens(tmp_path: Path) -> None:
    from benchmarks.pretrained.grams import store_grams

    subject = toy()
    x = torch.randn(12, 6)
    found = store_grams(subject, given(x, torch.zeros(12)), tmp_path / "grams.safetensors")
    assert isinstance(found, StoredGrams)
    assert list(found) == subject.keys
    torch.testing.assert_close(found["first.weight", 0], x.T @ x / 12)


def test_adamerging_becomes_surer_of_its_answers() -> None:
    row = trained(toy(), steps=12, batch=4)
    assert row["entropy"][1] < row["entropy"][0]
    assert set(row["test"]) == set(TASKS)


def merge(rule: str, scale: float, test: tuple[float, float], **seen: float) -> dict[str, Any]:
    """Accuracies on two tasks, and values by which merges are chosen; unless given all prefer what is best on test."""
    usual = 1 - sum(test) / 2
    keys = ("measured", "second half measured", "held", "other", "noise")
    values = {key: seen.get(key.replace(" ", "_"), usual) for key in keys}
    named = dict(zip("ab", test, strict=True))
    length = "one" if scale == 1 else "fixed"
    return {"rule": rule, "length": length, "scale": scale, "test": named, "even": named, "labels": 1 - usual} | values


def row(seed: int, *, suite: str = "text-minilm", regmean: float = 0.1) -> dict[str, Any]:
    """RegMean with the least divergence on the inputs that measured it."""
    rows = [
        merge("average", 1, (0.7, 0.6), noise=0.0),
        merge("average", 2, (0.72, 0.6)),
        merge("tsv", 1, (0.8, 0.7)),
        merge("aswudi", 1, (0.6, 0.6)),
        merge("actmat", 1, (0.6, 0.5), other=0.0),
        merge("inputs, regmean", 1, (0.7, 0.58), measured=regmean, held=0.5),
        merge("inputs, regmean by half", 1, (0.7, 0.58), second_half_measured=0.5),
    ]
    return {
        "subject": f"{suite}/full/{seed}", "suite": suite, "regime": "full", "seed": seed, "tasks": ["a", "b"],
        "own": {"a": 0.9, "b": 0.8}, "draws": {"8": [0, 2], "16": [2, 2]}, "rows": rows, "machine": "m", "date": "d",
    }  # fmt: skip


def test_who_chooses_by_what() -> None:
    one = row(0)
    assert chosen(one)["rule"] == "inputs, regmean"
    assert {chosen(one, kind)["rule"] for kind in ("halves", "held")} == {"tsv"}
    assert chosen(one, statistics=False)["rule"] == by_labels(one)["rule"] == "tsv"
    assert regret(one, chosen(one)) == pytest.approx(11)
    assert (chosen(one, "other")["rule"], chosen(one, "noise")["rule"]) == ("actmat", "average")


def test_the_fair_regret_is_of_the_half_that_did_not_name_the_best() -> None:
    """On even inputs the average is 20 points better than TSV, on odd ones 40 worse: each half's best loses there."""
    one = row(0)
    average, tsv = one["rows"][0], one["rows"][2]
    average |= {"test": {"a": 0.7}, "even": {"a": 0.9}}
    tsv |= {"test": {"a": 0.8}, "even": {"a": 0.7}}
    one["rows"] = [average, tsv]
    assert regret(one, tsv) == 0.0
    assert fair_regret(one, tsv) == pytest.approx((0.5 - 0.9 + 0.7 - 0.7) / 2 * 100)


def test_tables_hold_what_their_heads_name(tmp_path: Path) -> None:
    every = [row(0), row(1), row(0, suite="vision-vits14", regmean=0.9)]
    trained_row = {"subject": "text-minilm/full/0", "steps": 9, "entropy": [1.0, 0.5], "test": {"a": 0.5, "b": 0.5}}
    (tmp_path / "ada.jsonl").write_text(json.dumps(trained_row) + "\n")
    for name, (header, made) in TABLES.items():
        lines = made(every) if name != "adamerging" else adamerging_rows(every, tmp_path / "ada.jsonl")
        assert lines, name
        assert {len(line) for line in lines} == {len(header(every))}, name
    text, image, whole = TABLES["choice"][1](every)
    assert text[:1] + text[3:8] == ["MiniLM-L6, full", "64.0", "11.0", "11.0", "-1.0", "-1.0"], (
        "two tasks have no interval"
    )
    assert image[3:8] == ["75.0", "0.0", "0.0", "+10.0", "+10.0"]
    assert whole[:2] == ["all", "3"]
    ways = TABLES["statistics"][1](every)[0]
    assert ways[:2] == ["MiniLM-L6, full", "2"]
    assert ways[2:] == ["0.0", "+10.0", "11.0", "-1.0", "0.0", "+10.0", "0.0", "+10.0"]
    assert TABLES["numbers"][1](every)[0][2:] == ["5.0 (+0.0)", "0.0 (+10.0)"]
    assert TABLES["wrong"][1](every)[0][2:] == ["0.0", "+10.0", "20.0", "-10.0", "10.0", "+0.0"]


def group() -> Group:
    """Two seeds; with the first the divergence prefers TSV, with the second `actmat`, and `regmean` to both."""
    scores = []
    for seed, liked in ((0, "tsv"), (1, "actmat")):
        for method, right in (("average", 60), ("tsv", 70), ("actmat", 50), ("regmean", 65)):
            far = 0.05 if method == "regmean" else 0.1 if method == liked else 0.9
            scales = {s: {"divergence": far + extra, "validation": right - 50, "test": right - 10 * extra}
                      for s, extra in (("0.5", 0.2), ("1.0", 0.0))}  # fmt: skip
            detail = {"rule": method, "scales": scales, "validation": {"total": 24}}
            scores += [
                Score("vision-vits14", "full", method, "default", t, seed, right, 100, model="ViT", settings="s",
                      detail=detail)
                for t in "ab"
            ]  # fmt: skip
    return Group(scores)


def test_the_choice_among_the_merges_of_the_evidence() -> None:
    first, second = evidence_rows([group()])
    assert len(first) == len(HEADER)
    assert first[:3] == ["ViT, full", "0", "6"]
    assert first[4:] == ["`tsv` 70.0", "0.0", "+10.0", "+20.0", "+0.0", "`regmean` 65.0", "5.0", "+5.0"]
    assert second[4:9] == ["`actmat` 50.0", "20.0", "-10.0", "+0.0", "-20.0"]
    said = evidence_lines([group()])
    assert "* Without `regmean`, mean regret at most 0.5 points: **missed**, 10.0 (ViT, full 10.0)" in said
    assert "* With `regmean`, mean regret at most 0.5 points: **missed**, 5.0" in said
    assert "* With `regmean`, never more than 0.5 points below the average: met in all 2; +5.0 at worst." in said
    assert "**missed** in 1 of 2: ViT, full, seed 1 (-10.0); -10.0 at worst" in said
    assert "average +0.0 points to the average at scale 1, +10.0 to `actmat`" in said
    assert "Not measured" in evidence_lines([])


def test_nothing_is_told_before_it_is_measured(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "none") == []
    assert adamerging_rows([row(0)], tmp_path / "none") == []
