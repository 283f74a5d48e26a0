"""The validation of the search: one toy subject from end to end, and the tables from rows that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.evidence.group import Group
from benchmarks.tune.choices import evidence_goal, evidence_rows
from benchmarks.tune.measure import NUMBERS, measure
from benchmarks.tune.subjects import Subject
from benchmarks.tune.tables import TABLES, goal_lines
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from actmat.extras.models.loading import Loaded
from actmat_experiments.harness.results import Score

TASKS = {"a": 3, "b": 5}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up_proj(x))


def toy(root: Path) -> Subject:
    """Experts that know their tasks: labels are what each expert says."""
    torch.manual_seed(0)
    models = {name: Encoder() for name in ("base", *TASKS)}
    for name, model in models.items():
        (root / name).mkdir(parents=True)
        save_file(model.state_dict(), root / name / "model.safetensors")
    heads = {task: torch.randn(8, classes) for task, classes in TASKS.items()}
    inputs = {task: torch.randn(400, 6) for task in TASKS}

    def load(location: str) -> Loaded:
        model = Encoder()
        model.load_state_dict(load_file(Path(location) / "model.safetensors"))
        return Loaded(model, location, None, location)

    def answers(model: nn.Module, task: str, x: Tensor) -> Tensor:
        with torch.no_grad():
            return (model(x) @ heads[task]).argmax(-1)

    def share(model: nn.Module, task: str, part: str) -> float:
        x = inputs[task][300:] if part == "test" else inputs[task][:256]
        return float((answers(model, task, x) == answers(models[task], task, x)).double().mean())

    return Subject(
        suite="digits",
        regime="full",
        seed=0,
        base=root / "base",
        experts={task: root / task for task in TASKS},
        load=load,
        predict={task: (lambda model, batch, t=task: model(batch["x"]) @ heads[t]) for task in TASKS},
        inputs=lambda task, n: [{"x": inputs[task][:n]}],
        noise=lambda task, n: [{"x": torch.randn(n, 6)}],
        share=share,
    )


def test_a_subject_is_measured_from_end_to_end(tmp_path: Path) -> None:
    row = measure(toy(tmp_path / "models"), tmp_path / "work", adamerging=False)
    assert row["expert_test"] == 1.0
    assert row["base_test"] < 1.0
    methods = {c["method"] for c in row["candidates"]}
    assert {"average", "actmat", "regmean"} <= methods
    assert len(row["candidates"]) == 6 * len(methods)
    assert not (tmp_path / "work").exists()
    best = max(c["test"] for c in row["candidates"])
    assert best - 0.15 <= row["chosen"]["test"] <= 1.0
    for candidate in row["candidates"]:
        assert {f"own_{n}" for n in NUMBERS} | {"other_64", "noise_64"} <= candidate.keys()
        assert candidate["worst_test"] <= candidate["test"] <= 1.0
    assert TABLES["choice"][1]([row])[0][0] == "digits, six tasks, full"


def row(seed: int, chosen: float, *, suite: str = "digits") -> dict[str, Any]:
    """Average 0.70 and 0.72, actmat 0.60 and 0.80 at two scales; the divergence prefers the best, noise the worst."""
    accuracies = {("average", 1.0): 0.70, ("average", 0.5): 0.72, ("actmat", 1.0): 0.60, ("actmat", 0.5): 0.80}
    candidates = [
        {"method": m, "scale": s, "test": a, "validation": -a, "own_8": a, "own_64": 1 - a, "other_64": 1 - a}
        | {"noise_64": a}
        for (m, s), a in accuracies.items()
    ]
    return {
        "subject": f"{suite}/full/{seed}", "suite": suite, "regime": "full", "seed": seed, "expert_test": 0.9,
        "chosen": {"candidate": "tsv x 1.1", "test": chosen, "verdict_on_average": "worse"},
        "candidates": candidates, "machine": "m", "date": "d",
    }  # fmt: skip


def test_tables_hold_the_differences_that_their_heads_name() -> None:
    rows = [row(0, 0.80), row(1, 0.78), row(2, 0.76), row(0, 0.81, suite="vision-small")]
    first, image, every = TABLES["choice"][1](rows)
    assert first[1:] == ["3", "90.0 ±0.0", "78.0 ±5.0", "2.0 ±5.0", "8.0 ±5.0", "+6.0", "18.0 ±5.0"]
    assert image[1:] == ["1", "90.0", "81.0", "0.0", "11.0", "+11.0", "21.0"], "a refined scale may beat the grid"
    assert every[1] == "4"
    rival = TABLES["rivals"][1](rows)[0]
    assert rival[2] == "18.0 ±5.0", "the labels of this toy are upside down"
    assert rival[3:] == ["", "1.00 (1.00)", "3"]
    assert TABLES["wrong"][1](rows)[0][2:] == ["0.0 ±0.0", "+10.0", "0.0 ±0.0", "+10.0", "20.0 ±0.0", "-10.0"]


@pytest.mark.parametrize(
    ("chosen", "says"), [(0.80, "at most 0.5 points: met on these 1"), (0.69, "`digits/full/0` (-1.0")]
)
def test_the_goal_is_judged_in_words(chosen: float, says: str) -> None:
    assert says in goal_lines([row(0, chosen)])


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
    assert first[:3] == ["ViT, full", "0", "6"]
    assert first[4:] == ["`tsv` 70.0", "0.0", "+10.0", "+20.0", "+0.0", "`regmean` 65.0", "5.0", "+5.0"]
    assert second[4:9] == ["`actmat` 50.0", "20.0", "-10.0", "+0.0", "-20.0"]
    said = evidence_goal([group()])
    assert "* Without `regmean`, mean regret at most 0.5 points: **missed**, 10.0 (ViT, full 10.0)" in said
    assert "* With `regmean`, never more than 0.5 points below the average: met in all 2; +5.0 at worst." in said
    assert "**missed** in 1 of 2: ViT, full, seed 1 (-10.0); -10.0 at worst" in said
