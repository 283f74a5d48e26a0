"""The study of forecasts from end to end, on models that are trained in a second."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.tolerances import F32_PRODUCT, relative_error

from actmat.errors import RecipeError
from actmat.extras.demo.model import EncoderConfig
from actmat.extras.demo.tasks import load_photographs
from actmat_experiments.forecast import suite
from actmat_experiments.forecast.features import FEATURES
from actmat_experiments.forecast.models import FAMILIES, Family, Trained, input_grams, matrices, train
from actmat_experiments.forecast.rows import Row, measure, rows_of, rules
from actmat_experiments.forecast.verdict import WITH_DATA, Candidate, best_single, held_out, judge, ridge, rule_mean
from actmat_experiments.harness.cache import Cache
from actmat_experiments.suites import RunRequest, TableRequest, get_suite

pytestmark = pytest.mark.slow  # the other small suites run the same driver in every run of the tests
TINY = EncoderConfig(patch_size=4, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
TINY_FAMILIES = (
    Family("full", "full", TINY, 2e-3, epochs=1, base_epochs=1),
    Family("lora", "lora", TINY, 5e-3, rank=2, epochs=1, base_epochs=1),
)
SUBSETS = ((0, 1, 2), (3, 4, 5))


def few(_n_experts: int) -> list[str]:
    return ["average", "task_arithmetic", "actmat"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("forecast"))


@pytest.fixture(scope="module")
def rows(cache: Cache) -> list[Row]:
    return rows_of(cache, TINY_FAMILIES, subsets=SUBSETS, methods=few)


@pytest.fixture(scope="module")
def lora() -> Trained:
    return train(TINY_FAMILIES[1], seed=3)


def test_every_merge_gives_a_row_per_expert(rows: list[Row]) -> None:
    assert len(rows) == 2 * 2 * 3 * 2 * 3  # families, subsets, rules, scales, experts
    assert set(rows[0].features) == {*FEATURES, *WITH_DATA}
    for row in rows:
        assert row.task in row.experts
        assert row.drop == row.accuracy - row.merged_accuracy


def test_a_finished_model_is_not_made_again(cache: Cache, rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actmat_experiments.forecast.rows.train", lambda *_: pytest.fail("trained again"))
    assert rows_of(cache, TINY_FAMILIES, subsets=SUBSETS, methods=few) == rows


def test_another_rate_is_another_model(cache: Cache, rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("actmat_experiments.forecast.rows.train", lambda family, seed: asked.append(family) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rows_of(cache, [replace(TINY_FAMILIES[0], learning_rate=1e-3)], subsets=SUBSETS, methods=few)
    assert [f.learning_rate for f in asked] == [1e-3]


def test_the_merge_of_one_expert_is_the_expert(lora: Trained) -> None:
    (row,) = measure(lora, "lora", 3, subsets=[(2,)], methods=lambda n: ["average"], scales=(1.0,))
    assert row.drop == 0.0
    assert row.features["disagreement"] == 0.0
    assert row.features["activation_residual"] == pytest.approx(0.0, abs=1e-3)


def test_experts_with_factors_change_matrices_alone_and_by_their_rank(lora: Trained) -> None:
    base = lora.base.state_dict()
    for expert in lora.experts.values():
        state = expert.state_dict()
        deltas = {key: block - matrices(base)[key] for key, block in matrices(state).items()}
        assert all(torch.linalg.matrix_rank(d, rtol=1e-4) == 2 for d in deltas.values())
        changed = {name for name in base if not torch.equal(base[name], state[name])}
        assert changed == {name for name, _ in deltas}


def test_inputs_of_a_layer_are_summed_over_tokens(lora: Trained) -> None:
    images = load_photographs().images_NHW[:5]
    grams = input_grams(lora.base, images)
    assert set(grams) == set(matrices(lora.base.state_dict()))
    patches = images.reshape(5, 2, 4, 2, 4).transpose(2, 3).reshape(-1, 16)
    assert relative_error(grams["patch_proj.weight", 0].float(), patches.T @ patches) < F32_PRODUCT


def row(family: str, method: str, drop: float, feature: float) -> Row:
    features = dict.fromkeys((*FEATURES, *WITH_DATA), 1.0) | {"distance": feature}
    return Row(family, 0, method, 1.0, ("a", "b"), "a", 1.0, 1.0 - drop, features)


def test_what_is_held_out_is_not_looked_at() -> None:
    """Forecasts of a family do not change when its own drops do."""
    rows = [row(f, m, 0.1 * k, 1.0 + k) for f in ("one", "two") for k, m in enumerate(("average", "actmat", "ties"))]
    turned = [replace(r, merged_accuracy=0.3) if r.family == "two" else r for r in rows]
    for forecaster in (ridge, best_single, rule_mean):
        before, after = (held_out(x, lambda r: r.family, forecaster) for x in (rows, turned))
        assert before[3:] == after[3:]
    assert held_out(turned, lambda r: r.family, rule_mean)[:3] == pytest.approx([0.7] * 3)


def test_a_regression_finds_what_makes_the_drop() -> None:
    known = [row("one", "average", 0.05 * k, 2.0**k) for k in range(8)]
    wanted = [row("two", "average", 0.0, 2.0**k) for k in (1, 5, 3)]
    found = ridge(known, wanted)
    assert found[0] < found[2] < found[1]
    assert best_single(known, wanted) == [2.0, 32.0, 8.0]


def test_only_what_is_above_the_bar_everywhere_holds() -> None:
    rows = []
    for family in ("full", "lora"):
        for seed in range(4):
            for task in ("a", "b", "c"):
                for k, method in enumerate(("average", "actmat", "ties", "tsv", "knots")):
                    one = row(family, method, 0.1 * k + 0.01 * seed, 1.0 + k)
                    misleading = float(k if family == "full" else -k)
                    rows.append(replace(one, seed=seed, task=task, features=one.features | {"angle": misleading}))
    found = {c.name: c for c in judge(rows, resamples=50)}
    assert found["distance"].holds
    assert not found["angle"].holds
    assert found["angle"].families["full"].low > 0.3
    assert found["angle"].worst < -0.9


def test_tables_say_what_was_measured(rows: list[Row]) -> None:
    found = judge(rows, resamples=20)
    lines = suite.verdict_lines(rows, found)
    assert lines[0] == "72 rows: 24 merges of 2 models; intervals over 12 clusters (expert x model)"
    text = suite.markdown(found)
    assert all(f"| `{c.name}` |" in text for c in found)
    assert {c.kind for c in found} == {"data-free", "unlabelled data", "fitted"}


def test_the_suite_shows_what_the_cache_holds(
    cache: Cache, rows: list[Row], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`table` finds the rows that `run` has left in the cache, prints 80 columns and draws."""
    monkeypatch.setattr(suite, "FAMILIES", TINY_FAMILIES)
    monkeypatch.setattr("actmat_experiments.forecast.rows.SUBSETS", SUBSETS)
    monkeypatch.setattr("actmat_experiments.forecast.rows.rules", few)
    monkeypatch.setattr(suite, "judge", lambda rows: few_candidates(rows))
    console = Console(width=80, record=True)
    get_suite("forecast").table(TableRequest("forecast", cache.root, figures=tmp_path, console=console))
    text = console.export_text()
    assert "activation_error" in text
    assert "72 rows" in text
    assert max(map(len, text.splitlines()[:20])) <= 80
    data = json.loads(json.dumps(get_suite("forecast").data(TableRequest("forecast", cache.root))))
    assert (data["rows"], {"name", "kind", "worst", "holds"} <= set(data["candidates"][0])) == (72, True)
    assert (tmp_path / "forecast.png").stat().st_size > 10_000


def test_the_suite_runs_the_families_that_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "actmat_experiments.forecast.rows._make",
        lambda family, seed, *more: asked.append((family.name, seed)) or (more[-1] / "rows.json").write_text("[]"),
    )
    console = Console(width=80, record=True)
    suite.run(RunRequest("forecast", tmp_path, models=["lora", "full"], seeds=(0, 2), console=console))
    assert asked == [("lora", 0), ("full", 0), ("lora", 2), ("full", 2)]
    assert "model 4 of 4: full/2" in console.export_text()


def few_candidates(rows: list[Row]) -> list[Candidate]:
    return judge(rows, resamples=20)


def test_the_suite_refuses_what_it_does_not_choose(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--methods means nothing here"):
        suite.run(RunRequest("forecast", tmp_path, methods=["ties"]))
    with pytest.raises(RecipeError, match="no family 'ful'"):
        suite.run(RunRequest("forecast", tmp_path, models=["ful"]))
    with pytest.raises(RecipeError, match="fewer than two families"):
        suite.table(TableRequest("forecast", tmp_path))


def test_rows_survive_the_file(cache: Cache, rows: list[Row]) -> None:
    files = sorted(cache.root.glob("forecast-rows/*/rows.json"))
    stored = [line for file in files for line in json.loads(file.read_text())]
    assert sorted(map(str, (json.loads(json.dumps(r.to_json())) for r in rows))) == sorted(map(str, stored))


def test_families_differ_and_rules_need_no_data() -> None:
    assert len({f.name for f in FAMILIES}) == len(FAMILIES)
    assert {f.regime for f in FAMILIES} == {"full", "lora"}
    assert "regmean" not in rules(6)
    assert "slerp" in rules(2)
    assert "slerp" not in rules(6)
