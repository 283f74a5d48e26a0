"""The demo: its data, its models, and a run of a second from end to end."""

import copy
import json
import shlex
import sys

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tests.helpers.json_layouts import PINNED

from actmat.errors import CheckpointError, MergeError, OutputError, RecipeError
from actmat.extras.demo.model import EncoderConfig, features, fit_head, load_encoder, new_encoder, save_encoder
from actmat.extras.demo.run import accuracy_table, choose_methods, row_of, run_demo
from actmat.extras.demo.tasks import (
    LOOKS,
    TASKS,
    Examples,
    Split,
    generator_for,
    load_photographs,
    pose_split,
    split_photographs,
)
from actmat.extras.demo.training import DemoSchedule, DemoSettings, finetune
from actmat.methods import all_methods

TINY_ENCODER = EncoderConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)

TINY = DemoSettings(
    encoder=TINY_ENCODER,
    n_validation=1400,
    n_test=200,
    n_views=1,
    pretraining=DemoSchedule(1, 64, 3e-3),
    finetuning=DemoSchedule(1, 64, 1e-3),
)
"""A demo of a second: 197 photographs to train on, too few steps to learn much."""


def some_photographs(n, seed=0):
    """Random pixels, every digit in turn."""
    generator = torch.Generator().manual_seed(seed)
    return Examples(torch.rand(n, 8, 8, generator=generator), torch.arange(n) % 10)


# The demo from end to end, with a model too small to be good at anything.


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out, console = tmp_path_factory.mktemp("my demo") / "out", Console(width=80)
    with console.capture() as capture:
        result = run_demo(out, seed=1, methods=["average", "actmat"], console=console, settings=TINY)
    return out, result, capture.get()


def test_everything_is_kept(finished):
    out, result, _ = finished
    assert sorted(p.name for p in (out / "experts").iterdir()) == sorted(t.name for t in TASKS)
    assert sorted(p.name for p in (out / "merged").iterdir()) == ["actmat", "average"]
    stored = json.loads((out / "results.json").read_text())
    assert [r["name"] for r in stored["rows"]] == ["majority", "base", "experts", "average", "actmat"]
    assert stored == json.loads(json.dumps(result))
    assert stored.keys() == PINNED["demo"]


def test_the_table_fits_a_terminal_and_the_next_command_survives_a_shell(finished):
    out, _, text = finished
    table = text[text.index("Test accuracy in %, 200 photographs, seed 1") : text.index("Checkpoints")]
    assert max(map(len, table.splitlines())) <= 80
    assert all(name in table for name in ("majority", "experts", "actmat", "jumbled", "of expert"))
    assert shlex.split(text[text.index("actmat merge") :]) == [
        *("actmat", "merge", "-b", str(out / "base")),
        *(word for t in TASKS for word in ("-e", str(out / "experts" / t.name))),
        *("--out", "my-merge"),
    ]


def test_the_merges_are_those_of_the_engine(finished):
    out, _, _ = finished
    experts = [load_file(out / "experts" / t.name / "model.safetensors") for t in TASKS]
    average, actmat = (load_encoder(out / "merged" / m).state_dict() for m in ("average", "actmat"))
    for name, tensor in average.items():
        torch.testing.assert_close(tensor, torch.stack([e[name] for e in experts]).mean(0), atol=1e-6, rtol=1e-5)
    differ = {name for name in average if not torch.allclose(average[name], actmat[name], atol=1e-6)}
    assert {"patch_proj.weight", "layers.0.attention.in_proj_weight", "layers.1.down_proj.weight"} <= differ
    assert not differ & {"class_token", "position_embeddings.weight", "norm.weight", "layers.0.up_proj.bias"}


def test_the_seed_decides_everything_and_the_number_of_cores_nothing(finished, tmp_path, monkeypatch):
    out, result, _ = finished
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    again = run_demo(tmp_path / "again", seed=1, methods=["average", "actmat"], settings=TINY)
    assert again["rows"] == result["rows"]
    for place in ("base", "experts/turned", "merged/actmat"):
        first, second = (load_file(root / place / "model.safetensors") for root in (out, tmp_path / "again"))
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_folder_in_use_and_wrong_methods_are_refused_before_anything_is_written(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note").touch()
    for place in (tmp_path / "mine", tmp_path / "mine" / "note"):
        with pytest.raises(OutputError, match=r"not empty|not a folder|exists|is a file"):
            run_demo(place, settings=TINY)
    for method, said in (("actmta", "actmat"), ("regmean", "which these methods cannot"), ("slerp", "cannot")):
        with pytest.raises(RecipeError, match=said):
            run_demo(tmp_path / "out", methods=[method], settings=TINY)
    assert not (tmp_path / "out").exists()


def test_every_method_is_run_or_left_out():
    chosen, others = choose_methods(None)
    assert sorted([*chosen, *others]) == sorted(m.name for m in all_methods())
    assert {"average", "actmat", "tsv", "iso_c"} <= set(chosen)
    assert {"regmean", "slerp"} <= set(others)
    assert choose_methods(["ties", "actmat", "ties"]) == (["ties", "actmat"], [])


def test_a_row_compares_with_the_expert_and_is_judged_by_photograph():
    expert = {"a": torch.tensor([1, 1, 1, 1]).bool(), "b": torch.tensor([1, 1, 0, 0]).bool()}
    right = {"a": torch.tensor([1, 1, 0, 1]).bool(), "b": torch.tensor([1, 1, 1, 0]).bool()}
    row = row_of("x", "merged", right, expert)
    assert row["tasks"] == {"a": 0.75, "b": 0.75}
    assert row["of_expert"] == pytest.approx((0.75 / 1 + 0.75 / 0.5) / 2)
    one = torch.tensor([1, 1, 0, 0, 1, 0, 1, 1]).bool()
    three = row_of("x", "merged", dict.fromkeys("abc", one), dict.fromkeys("abc", one))  # tasks that agree say no more
    assert three["average"] == 0.625
    assert three["half"] == pytest.approx(float(1.959963984540054 * one.double().std() / 8**0.5))


def test_methods_stand_below_the_references_best_first():
    shares = {"majority": 0.2, "base": 0.7, "experts": 0.8, "average": 0.74, "actmat": 0.76, "task_arithmetic": 0.65}
    kinds = {"majority": "majority", "base": "base", "experts": "expert"}
    rows = [
        {"name": n, "kind": kinds.get(n, "merged"), "tasks": {"a": s}, "average": s, "half": 0.01, "of_expert": s / 0.8}
        for n, s in shares.items()
    ]
    console = Console(width=80)
    with console.capture() as capture:
        console.print(accuracy_table(rows, "t"))
    lines = [line.split() for line in capture.get().splitlines() if line.split() and line.split()[0] in shares]
    assert [line[0] for line in lines] == ["majority", "base", "experts", "actmat", "average", "task_arithmetic"]
    assert lines[3] == ["actmat", "76.0", "76.0", "±1.0", "95.0"]


# Photographs and tasks: read, split, moved and asked about as promised.


def test_a_missing_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MergeError, match=r"actmat\[demo\]"):
        load_photographs()


def test_parts_are_disjoint_and_complete_and_follow_the_seed(monkeypatch):
    photographs = some_photographs(40)
    monkeypatch.setattr("actmat.extras.demo.tasks.load_photographs", lambda: photographs)
    split, again, other = (split_photographs(6, 9, torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    parts = (split.train, split.validation, split.test)
    assert [len(part) for part in parts] == [25, 6, 9]
    assert len(torch.cat([part.images_NHW.flatten(1) for part in parts]).unique(dim=0)) == 40
    for part in parts:  # images and digits travel together
        for image, digit in zip(part.images_NHW, part.labels_N, strict=True):
            where = (photographs.images_NHW == image).flatten(1).all(1)
            assert photographs.labels_N[where].tolist() == [int(digit)]
    assert torch.equal(split.test.images_NHW, again.test.images_NHW)
    assert not torch.equal(split.test.images_NHW, other.test.images_NHW)


def test_parts_of_a_task_come_from_the_same_parts_of_the_photographs():
    photographs = some_photographs(60)
    cut = torch.arange(60).split([30, 10, 20])
    split = Split(*map(photographs.take, cut))
    assert len({task.look for task in TASKS}) == len(TASKS) == 6
    for task in TASKS:
        data, again, other = (pose_split(task, split, n_views=2, seed=seed) for seed in (5, 5, 6))
        assert [len(part) for part in (data.train, data.validation, data.test)] == [60, 10, 20]
        assert set(data.train.labels_N.tolist()) == set(range(task.n_classes))
        assert torch.equal(data.train.images_NHW, again.train.images_NHW)
        assert not torch.equal(data.train.images_NHW, other.train.images_NHW)
        if task.question != "turned":  # test photographs as they are, whatever the seed
            assert torch.equal(data.test.images_NHW, LOOKS[task.look](split.test.images_NHW))


# The encoder, its checkpoints, the heads and the training.


IMAGES = some_photographs(12).images_NHW


def test_a_checkpoint_is_an_ordinary_one_and_gives_the_same_bits(tmp_path):
    encoder = new_encoder(EncoderConfig(), seed=0)
    save_encoder(encoder, tmp_path / "deep" / "model")
    assert torch.equal(load_encoder(tmp_path / "deep" / "model")(IMAGES), encoder(IMAGES))
    assert json.loads((tmp_path / "deep" / "model" / "config.json").read_text())["model_type"] == "actmat-demo-vit"
    tensors = load_file(tmp_path / "deep" / "model" / "model.safetensors")
    assert tensors["layers.0.attention.in_proj_weight"].shape == (192, 64)
    assert not any("head" in name for name in tensors)


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: expected .*found None"):
        load_encoder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match="found 'bert'"):
        load_encoder(tmp_path)


def test_the_head_minimizes_the_ridge_objective():
    generator = torch.Generator().manual_seed(0)
    features_ND, labels_N = torch.randn(50, 6, generator=generator), torch.randint(3, (50,), generator=generator)
    head = fit_head(features_ND, labels_N, 3, ridge=0.2, scale=1.0)
    z, y = features_ND.double(), torch.eye(3, dtype=torch.float64)[labels_N]
    penalty = 0.2 * (z - z.mean(0)).square().sum() / 6
    weight, bias = head.weight_CD.double().requires_grad_(), head.bias_C.double().requires_grad_()
    (((z @ weight.mT + bias - y) ** 2).sum() + penalty * weight.square().sum()).backward()
    assert max(weight.grad.abs().max(), bias.grad.abs().max()) < 1e-4
    ten = fit_head(features_ND, labels_N, 3, ridge=0.2, scale=10.0)
    torch.testing.assert_close(ten(features_ND), 10 * head(features_ND))


def test_an_expert_learns_its_task_while_base_and_head_stay():
    labels_N = torch.arange(128) % 2
    noise = torch.rand(128, 8, 8, generator=generator_for(0, "noise"))
    examples = Examples(0.8 * noise + 0.2 * labels_N[:, None, None], labels_N)
    base, stranger = new_encoder(TINY_ENCODER, seed=0), new_encoder(TINY_ENCODER, seed=9)
    # a head that says nothing about the features of the base, so that there is all to gain
    head = fit_head(features(stranger, examples.images_NHW), labels_N, 2, ridge=0.1, scale=10.0)
    weight, before = head.weight_CD.clone(), copy.deepcopy(base.state_dict())
    experts = [copy.deepcopy(base) for _ in range(3)]
    for expert, seed in zip(experts, (0, 0, 1), strict=True):
        finetune(expert, head, examples, DemoSchedule(10, 32, 3e-3), generator_for(seed, "x"))

    def share(encoder):
        return float((head(features(encoder, examples.images_NHW)).argmax(1) == labels_N).float().mean())

    assert share(base) < 0.7
    assert share(experts[0]) > 0.9
    assert torch.equal(head.weight_CD, weight)
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    first, again, other = (expert.state_dict() for expert in experts)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["norm.weight"], other["norm.weight"])
    assert all(not torch.equal(tensor, before[name]) for name, tensor in first.items())  # every tensor takes part
