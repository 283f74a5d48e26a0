"""`vision-small` with tiny models: scales, rows and tables; the command's tests run the suite."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console
from tests.helpers.vision import TINY, write_tasks
from tests.tolerances import F32_ELEMENTWISE, relative_error

from actmat.errors import RecipeError
from actmat_experiments.harness.merging import Candidate, best_scale, merge_candidates
from actmat_experiments.harness.models import in_place, read_tensors
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.report import show
from actmat_experiments.harness.rows import candidates
from actmat_experiments.suites import RunRequest, TableRequest
from actmat_experiments.vision import small

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


@pytest.mark.slow
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
    assert "gram" in left_out["regmean_packed"]
    for name in ("regmean", "regmean_packed"):
        with pytest.raises(RecipeError, match=f"'{name}' needs statistics"):
            candidates([name], "full", 4)


@pytest.mark.slow
def test_the_table_shows_all_rows(finished):
    console = Console(width=80)
    with console.capture() as capture:
        show(TableRequest("vision-small", finished.cache, console=console))
    text = capture.get()
    assert max(map(len, text.splitlines()[:40])) <= 80
    assert all(word in text for word in ("majority", "regmean", "knots_tsv", "full fine-tuning", "LoRA", "±"))


def test_without_data_or_with_a_model_it_says_what_to_give(request_of):
    with pytest.raises(RecipeError, match="--data"):
        small.run(request_of(data=None))
    with pytest.raises(RecipeError, match="--set"):
        small.run(request_of(models=["ViT-B/32"]))
