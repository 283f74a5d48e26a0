"""The demo from end to end, with a model too small to be good at anything."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tests.helpers.demo import TINY
from tests.helpers.json_layouts import PINNED

from actmat.errors import OutputError, RecipeError
from actmat.extras.demo.model import load_encoder
from actmat.extras.demo.run import accuracy_table, choose_methods, row_of, run_demo
from actmat.extras.demo.tasks import TASKS
from actmat.methods import all_methods


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
