"""`vision` and `vision-small` rehearsed with tiny models: tasks, training, merges, tables."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from benchmarks.common import relative_error
from evidence.tests.helpers.paper_hub import clip
from evidence.tests.helpers.terminal import console_text
from evidence.tests.helpers.tolerances import F32_ELEMENTWISE, F32_PRODUCT
from evidence.tests.helpers.vision import TINY, write_tasks
from rich.console import Console
from safetensors.torch import save_file
from transformers import AutoTokenizer, CLIPModel, CLIPVisionModel

from actmat.errors import CheckpointError, RecipeError
from actmat.extras.demo.tasks import generator_for
from actmat_experiments.harness.cache import Cache
from actmat_experiments.harness.heads import ClipHead, load_head
from actmat_experiments.harness.merging import Candidate, best_scale, merge_candidates
from actmat_experiments.harness.models import in_place, read_tensors
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.report import show
from actmat_experiments.harness.request import RunRequest, TableRequest
from actmat_experiments.harness.results import read_scores
from actmat_experiments.harness.rows import candidates
from actmat_experiments.harness.suite import score_file
from actmat_experiments.harness.training import Schedule, order_of
from actmat_experiments.vision import small, suite
from actmat_experiments.vision.clip import ClipTask, clip_base, clip_head, public_expert, text_feature
from actmat_experiments.vision.images import HubSet, ImageTask
from actmat_experiments.vision.train import augmented

# `vision` with a tiny CLIP: zero-shot heads, experts of both regimes, public experts, the way to the tables.


TASKS = ("mnist", "svhn", "eurosat")
SETTINGS = {
    "size": "32",
    "epochs": "1",
    "batch_size": "16",
    "micro_batches": "2",
    "warm_up_steps": "2",
    "rank": "2",
    "rate": "1e-3",
    "lora_rate": "1e-3",
    "precision": "float32",
    "samples": "8",
    "train": "32",
    "validation": "6",
}


@pytest.fixture(scope="module")
def request_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("clip")
    (root / "clip").mkdir()
    clip(root / "clip", 16, size=32).save_pretrained(root / "clip")
    # the classes have words of their own: ten each
    import numpy as np
    from evidence.tests.helpers.vision import arrays

    (root / "data").mkdir()
    for i, name in enumerate(TASKS):
        np.savez(root / "data" / f"{name}.npz", **arrays(i, 10, 60, gray=i == 0))

    def made(**changes):
        settings = SETTINGS | {"base": str(root / "clip")} | changes.pop("settings", {})
        fields = {"models": ["ViT-B/32"], "tasks": TASKS, "methods": ("actmat", "regmean"), "threads": 2}
        return RunRequest("vision", root / "cache", data=root / "data", settings=settings, **fields | changes)

    return made


@pytest.fixture(scope="module")
def finished(request_of):
    request = request_of(regimes=("full", "lora"))
    suite.run(request)
    return request


def prepared(request):
    return next(suite.experiments(request, Watch()))


def test_every_stage_runs_and_is_scored(finished):
    scores = read_scores(score_file(finished.cache, "vision"))
    rows = {(s.regime, s.method) for s in scores}
    expected = ("majority", "base", "experts", "actmat", "regmean")
    assert rows == {(r, m) for r in ("full", "lora") for m in expected}
    assert {(s.model, s.total) for s in scores} == {("ViT-B/32", 30)}
    made = prepared(finished)
    assert set(read_tensors(made.experts()["mnist"].path)) == set(read_tensors(made.base.path))


def test_the_table_puts_the_papers_figures_beside(finished):
    text = console_text(lambda console: show(TableRequest("vision", finished.cache, console=console)))
    row = next(line for line in text.splitlines() if line.split()[:1] == ["actmat"])
    assert "82.9" in row.split()
    assert "74.6" in text, "ACTMat on LoRA"
    assert "98.3 %" in text, "what cannot hold is said"
    assert max(map(len, text.splitlines())) <= 80


def test_a_head_is_the_zero_shot_classifier_of_clip(finished, request_of, tmp_path):
    location = request_of().settings["base"]
    cache = Cache(tmp_path)
    base = clip_base(cache, location)
    task = ImageTask("pets", ("cat", "dog", "/a/cow"), None, None, None, {})
    known = ClipTask("pets", HubSet("x"), "x", 1, ("a photo of a {}.", "the {}"), None)
    head = load_head(clip_head(cache, location, base, task, known))
    assert isinstance(head, ClipHead)

    model, tokenizer = CLIPModel.from_pretrained(location).eval(), AutoTokenizer.from_pretrained(location)
    pixels = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        rows = []
        for word in ("cat", "dog", "cow"):
            tokens = tokenizer([f"a photo of a {word}.", f"the {word}"], padding=True, return_tensors="pt")
            z = model.text_projection(model.text_model(**tokens).pooler_output)
            z = (z / z.norm(dim=-1, keepdim=True)).mean(0)
            rows.append(z / z.norm())
        z = model.visual_projection(model.vision_model(pixels).pooler_output)
        expected = (z / z.norm(dim=-1, keepdim=True)) @ torch.stack(rows).T * model.logit_scale.exp()
        encoder = CLIPVisionModel.from_pretrained(base / "encoder").eval()
        found = head(encoder(pixels).pooler_output)
    assert relative_error(found, expected) < F32_PRODUCT
    assert clip_head(cache, location, base, task, replace(known, templates=("the {}",))) != clip_head(
        cache, location, base, task, known
    )
    with pytest.raises(CheckpointError, match="3 classes, but words for 2"):
        clip_head(cache, location, base, task, replace(known, classes=("one", "two")))


def test_public_experts_take_the_place_of_training(finished, request_of, monkeypatch):
    vision = prepared(request_of())
    ready = {f"tanganke/clip-vit-base-patch32_{t}": path for t, (path, _) in vision.experts().items()}
    monkeypatch.setattr(suite, "public_expert", lambda cache, name: public_expert(cache, str(ready[name])))
    request = request_of(settings={"experts": "public"}, methods=("average",))
    public = prepared(request)
    assert {n: read_tensors(p).keys() for n, (p, _) in public.experts().items()}.keys() == set(TASKS)
    trained = vision.references()
    assert [(s.task, s.correct) for s in public.references()] == [(s.task, s.correct) for s in trained]
    with pytest.raises(RecipeError, match="public"):
        prepared(request_of(settings={"experts": "public"}, regimes=("lora",)))


def test_a_public_expert_that_lacks_weights_is_refused_and_not_drawn_at_random(finished, request_of, tmp_path):
    """transformers only warns of them."""
    path = next(iter(prepared(request_of()).experts().values())).path
    whole = read_tensors(path)
    shutil.copytree(path, tmp_path / "expert")
    lost = next(name for name in whole if name.endswith("mlp.fc1.weight"))
    save_file(
        {n: t for n, t in whole.items() if n != lost}, tmp_path / "expert" / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(CheckpointError, match="lacks 1 weights of an image encoder") as caught:
        public_expert(Cache(tmp_path / "cache"), str(tmp_path / "expert"))
    assert "fc1.weight" in str(caught.value) + str(getattr(caught.value, "problems", ""))
    assert public_expert(Cache(tmp_path / "cache"), str(path)).is_dir()


def test_a_prompt_that_the_text_encoder_cannot_read_is_told(tmp_path):
    (tmp_path / "clip").mkdir()
    clip(tmp_path / "clip", 16, size=32).save_pretrained(tmp_path / "clip")
    model, tokenizer = (kind.from_pretrained(tmp_path / "clip") for kind in (CLIPModel, AutoTokenizer))
    with pytest.raises(CheckpointError, match=r"a yyy.* has 152 tokens; the text encoder reads 77"):
        text_feature(["a x", "a " + "y" * 149], model, tokenizer, "cpu")


# `vision-small` with tiny models: scales, rows and tables; the command's tests run the suite.


SMALL_TASKS = ("one", "two", "three", "four")
METHODS = ("average", "task_arithmetic", "actmat", "regmean", "fisher", "knots_tsv")


@pytest.fixture(scope="module")
def small_request_of(tmp_path_factory):
    data = write_tasks(tmp_path_factory.mktemp("data"), ("cifar100", *SMALL_TASKS))
    cache = tmp_path_factory.mktemp("cache")

    def made(**changes):
        settings = TINY | changes.pop("settings", {})
        fields = {"data": data, "tasks": SMALL_TASKS, "methods": METHODS, "regimes": ("full", "lora"), "threads": 2}
        return RunRequest("vision-small", cache, settings=settings, **fields | changes)

    return made


def paths(made):
    return {name: path for name, (path, _) in made.items()}


@pytest.mark.slow
def test_a_scale_is_chosen_on_what_the_engine_would_write(small_request_of, tmp_path):
    row = Candidate("actmat", "actmat")
    for regime in ("full", "lora"):
        vision = next(v for v in small.experiments(small_request_of(), Watch()) if v.regime == regime)
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


def test_without_data_or_with_a_model_it_says_what_to_give(small_request_of):
    with pytest.raises(RecipeError, match="--data"):
        small.run(small_request_of(data=None))
    with pytest.raises(RecipeError, match="leave out --models"):
        small.run(small_request_of(models=["ViT-B/32"]))


# Parts of the vision experiments: batches that go on, augmentation, adapters, logs.


def test_batches_go_on_where_they_stopped():
    schedule = Schedule(3, 6, 0.1)
    whole = list(order_of(20, schedule, seed=0, name="a"))
    assert len(whole) == 9
    for first in (1, 3, 5, 8):
        rest = list(order_of(20, schedule, seed=0, name="a", first=first))
        assert [r.tolist() for r in rest] == [w.tolist() for w in whole[first:]]
    epoch = torch.cat(whole[:3])
    assert len(set(epoch.tolist())) == 18, "no example twice in an epoch"
    assert [w.tolist() for w in whole] != [w.tolist() for w in order_of(20, schedule, seed=1, name="a")]


def test_augmentation_moves_and_mirrors_and_depends_on_the_generator():
    images = torch.arange(2 * 3 * 16 * 16).float().reshape(2, 3, 16, 16)
    found = augmented(images, generator_for(0, "x"))
    assert found.shape == images.shape
    assert torch.equal(found, augmented(images, generator_for(0, "x")))
    assert not torch.equal(found, augmented(images, generator_for(1, "x")))
    constant = torch.full((4, 3, 16, 16), 0.5)
    assert torch.equal(augmented(constant, generator_for(0, "x")), constant), "borders are repeated, not black"


def test_every_stage_has_a_log_with_its_end_or_its_failure(tmp_path):
    console = Console(width=80)
    with console.capture() as capture, Watch(console, tmp_path) as watch:
        with watch.stage("experts: full", total=2) as stage:
            stage.advance()
            stage.log("half done")
        with pytest.raises(RuntimeError), watch.stage("experts: lora"):
            raise RuntimeError("broken")
    log = (tmp_path / "experts.log").read_text()
    assert "half done" in log
    assert log.count("begin") == 2
    assert "failed experts: lora" in log
    assert "RuntimeError('broken')" in log
    assert "experts: full: " in capture.get()
