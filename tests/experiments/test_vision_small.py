"""`vision-small` from end to end with tiny models: every stage, from the cache, as tables and figures."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file
from tests.helpers.vision import TINY, write_tasks
from tests.tolerances import F32_ELEMENTWISE, relative_error

from actmat.errors import RecipeError
from actmat_experiments.harness import experiment as driver
from actmat_experiments.harness.merging import Candidate, best_scale, merge_candidates
from actmat_experiments.harness.models import in_place, read_tensors
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.results import read_scores
from actmat_experiments.harness.rows import candidates
from actmat_experiments.harness.suite import score_file
from actmat_experiments.suites import RunRequest, TableRequest
from actmat_experiments.vision import experiment, small

pytestmark = pytest.mark.slow  # the other small suites run the same driver in every run of the tests
TASKS = ("one", "two", "three", "four")
METHODS = ("average", "task_arithmetic", "actmat", "regmean", "fisher", "knots_tsv")


@pytest.fixture(scope="module")
def request_of(tmp_path_factory):
    data = write_tasks(tmp_path_factory.mktemp("data"), ("cifar100", *TASKS))
    cache = tmp_path_factory.mktemp("cache")

    def made(**changes):
        settings = TINY | changes.pop("settings", {})
        fields = {"data": data, "tasks": TASKS, "methods": METHODS, "regimes": ("full", "lora"), "threads": 2}
        return RunRequest("vision-small", cache, settings=settings, **fields | changes)

    return made


@pytest.fixture(scope="module")
def finished(request_of):
    request = request_of()
    small.run(request)
    return request


def prepared(request, regime="full"):
    return next(v for v in small.experiments(request, Watch()) if v.regime == regime)


def paths(made):
    return {name: path for name, (path, _) in made.items()}


def test_every_row_has_a_score_for_every_task(finished):
    scores = read_scores(score_file(finished.cache, "vision-small"))
    by_row = {}
    for s in scores:
        by_row.setdefault((s.regime, s.method, s.scale), []).append(s.task)
    references = {(r, m, "default") for r in ("full", "lora") for m in ("majority", "base", "experts")}
    common = {(r, m, k) for r in ("full", "lora") for m in METHODS[:5] for k in ("default", "tuned")}
    knots = {("lora", "knots_tsv", k) for k in ("default", "tuned")}
    assert set(by_row) == references | common | knots
    assert {tuple(tasks) for tasks in by_row.values()} == {TASKS}
    assert {(s.total, s.seed) for s in scores} == {(20, 0)}
    assert all(s.detail["scale"] > 0 for s in scores if s.scale == "tuned")


def test_experts_learn_their_tasks(finished):
    shares = {(s.regime, s.method, s.task): s.share for s in read_scores(score_file(finished.cache, "vision-small"))}
    for regime in ("full", "lora"):
        experts = [shares[regime, "experts", t] for t in TASKS]
        assert sum(experts) / 4 > 0.6 > 0.4 > sum(shares[regime, "majority", t] for t in TASKS) / 4 - 0.1


def test_a_second_run_computes_nothing(finished, monkeypatch):
    before = read_scores(score_file(finished.cache, "vision-small"))

    def forbidden(*args, **more):
        raise AssertionError("this was done already")

    for module, name in ((experiment, "finetune"), (experiment, "features"), (driver, "measure_expert")):
        monkeypatch.setattr(module, name, forbidden)
    monkeypatch.setattr(driver, "merge_candidates", forbidden)
    monkeypatch.setattr(small, "pretrain", forbidden)
    small.run(finished)
    assert read_scores(score_file(finished.cache, "vision-small")) == before


def test_a_changed_option_trains_anew(finished, request_of, monkeypatch):
    trained = []
    real = experiment.finetune
    monkeypatch.setattr(experiment, "finetune", lambda *a, **k: (trained.append(a[4].name), real(*a, **k)))
    small.run(request_of(settings={"rate": "1e-3"}, regimes=("full",), methods=("average",)))
    assert sorted(trained) == sorted(TASKS)
    settings = {s.settings for s in read_scores(score_file(finished.cache, "vision-small"))}
    assert len(settings) == 2


def test_an_adapter_sits_on_every_linear_layer(finished, request_of):
    vision = prepared(request_of(), "lora")
    tensors = load_file(vision.experts()["one"].path / "adapter_model.safetensors")
    modules = {n.split(".lora_")[0].removeprefix("base_model.model.layers.0.") for n in tensors}
    assert len(tensors) == 12
    assert len(modules) == 6, modules
    other = load_file(vision.experts()["two"].path / "adapter_model.safetensors")
    name = next(n for n in tensors if "lora_A" in n)
    assert not torch.equal(tensors[name], other[name])


def test_a_scale_is_chosen_on_what_the_engine_would_write(finished, request_of, tmp_path):
    row = Candidate("actmat", "actmat")
    for regime in ("full", "lora"):
        vision = prepared(request_of(), regime)
        base, experts = vision.base.path, paths(vision.experts())
        rows = [row, Candidate("half", "actmat", scale=0.5), Candidate("average", "average")]
        outs = {r.name: tmp_path / regime / r.name for r in rows}
        acted = merge_candidates(base, experts, rows, outs)
        found = in_place(vision.read, base, outs["actmat"], acted["actmat"])(0.5).state_dict()
        expected = vision.read(outs["half"]).state_dict()
        assert len(acted["actmat"]) >= 6
        assert all(relative_error(found[n], expected[n]) < F32_ELEMENTWISE for n in expected)
        alone = merge_candidates(base, experts, [row], {"actmat": tmp_path / regime / "alone"})
        assert alone["actmat"] == acted["actmat"]
        together = read_tensors(outs["actmat"])
        assert all(torch.equal(t, together[n]) for n, t in read_tensors(tmp_path / regime / "alone").items())


def test_the_tuned_scale_is_the_best_on_validation_not_on_test(finished, request_of):
    vision = prepared(request_of())
    found = vision.merges([Candidate("task_arithmetic", "task_arithmetic")])["task_arithmetic"]
    means = {
        float(s): sum(c["correct"] / c["total"] for c in by_task.values()) / 4
        for s, by_task in found["validation"].items()
    }
    best = max(means.values())
    assert found["tuned"] == min((s for s, m in means.items() if m == best), key=lambda s: abs(s - 1))
    assert all(counts["total"] == 6 for counts in found["validation"]["1.0"].values()), "a tenth of 60"
    with pytest.raises(ValueError, match="has one already"):
        vision.merges([Candidate("x", "average", scale=0.5)])


def test_ties_between_scales_go_to_the_nearest_to_one():
    assert best_scale(lambda s: 0.5, (0.1, 0.7, 2.0))[0] == 0.7
    assert best_scale(lambda s: s, (0.1, 0.7, 2.0)) == (2.0, {0.1: 0.1, 0.7: 0.7, 2.0: 2.0})


def test_rows_are_the_methods_and_variants_that_can_run():
    rows, left_out = candidates(None, "lora", 4)
    names = [r.name for r in rows]
    assert {"average", "actmat", "knots_tsv", "knots_iso_c", "iso_c_rank"} <= set(names)
    assert "gram" in left_out["regmean"]
    assert "adamerging" in left_out
    with_data, still_out = candidates(None, "full", 4, ("gram", "fisher"))
    assert {"regmean", "fisher", "lot", "cat"} <= {r.name for r in with_data}
    assert "regmean" not in still_out
    with pytest.raises(RecipeError, match="Did you mean 'knots_tsv'"):
        candidates(["knots_tvs"], "lora", 4)
    with pytest.raises(RecipeError, match="needs statistics"):
        candidates(["regmean"], "full", 4)


def test_the_table_shows_all_rows_and_the_figures_are_drawn(finished, tmp_path):
    console = Console(width=80)
    with console.capture() as capture:
        small.table(TableRequest("vision-small", finished.cache, figures=tmp_path, console=console))
    text = capture.get()
    assert max(map(len, text.splitlines()[:40])) <= 80
    assert all(word in text for word in ("majority", "regmean", "knots_tsv", "full fine-tuning", "LoRA", "±"))
    drawn = sorted(p.name for p in tmp_path.iterdir())
    assert drawn == ["vision-small-methods.png"]
    with Image.open(tmp_path / "vision-small-methods.png") as picture:
        assert 600 < picture.size[0] < 1500, "six methods, each once"


def test_without_data_or_with_a_model_it_says_what_to_give(request_of):
    with pytest.raises(RecipeError, match="--data"):
        small.run(request_of(data=None))
    with pytest.raises(RecipeError, match="--set"):
        small.run(request_of(models=["ViT-B/32"]))


def test_a_table_without_scores_says_what_to_run(tmp_path):
    with pytest.raises(RecipeError, match="experiment run vision-small"):
        small.table(TableRequest("vision-small", tmp_path))
