"""The demo from end to end, with a model too small to be good at anything."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tests.helpers.demo import TINY

from actmat.errors import OutputError, RecipeError
from actmat.extras.demo.heads import load_heads
from actmat.extras.demo.merging import choose_methods
from actmat.extras.demo.model import load_encoder
from actmat.extras.demo.run import run_demo
from actmat.extras.demo.tasks import TASKS
from actmat.methods import all_methods


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out"
    console = Console(width=80)
    with console.capture() as capture:
        result = run_demo(out, seed=1, methods=["average", "actmat"], threads=2, console=console, settings=TINY)
    return out, result, capture.get()


def test_everything_is_kept(finished):
    out, result, _ = finished
    assert sorted(p.name for p in (out / "experts").iterdir()) == sorted(t.name for t in TASKS)
    assert sorted(p.name for p in (out / "merged").iterdir()) == ["actmat", "average"]
    assert sorted(load_heads(out / "heads.safetensors")) == sorted(t.name for t in TASKS)
    stored = json.loads((out / "results.json").read_text())
    assert [r["name"] for r in stored["rows"]] == ["majority", "base", "experts", "average", "actmat"]
    assert stored == json.loads(json.dumps(result.to_json()))
    assert set(stored["seconds"]) == {"base", "experts", "merges", "evaluation"}
    assert stored["versions"]["torch"] == torch.__version__


def test_tables_and_the_next_command_are_printed(finished):
    out, _, text = finished
    assert "Test accuracy in %" in text
    assert "Points lost" in text
    assert f"--expert {out}/experts/mod3" in text
    assert "--method actmat --out my-merge" in text


def test_the_merged_average_is_the_average_of_the_experts(finished):
    out, _, _ = finished
    experts = [load_file(out / "experts" / t.name / "model.safetensors") for t in TASKS]
    merged = load_file(out / "merged" / "average" / "model.safetensors")
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, torch.stack([e[name] for e in experts]).mean(0), atol=1e-6, rtol=1e-5)


def test_the_packed_projection_is_merged_by_the_matrix_rule_and_the_tables_are_not(finished):
    out, _, _ = finished
    average, actmat = (load_encoder(out / "merged" / m).state_dict() for m in ("average", "actmat"))
    differ = {name for name in average if not torch.allclose(average[name], actmat[name], atol=1e-6)}
    assert {"patch_proj.weight", "layers.0.attention.in_proj_weight", "layers.1.down_proj.weight"} <= differ
    assert not differ & {"class_token", "position_embeddings.weight", "norm.weight", "layers.0.up_proj.bias"}


def test_the_seed_decides_everything_and_the_number_of_threads_nothing(finished, tmp_path):
    out, result, _ = finished
    again = run_demo(tmp_path / "again", seed=1, methods=["average", "actmat"], threads=1, settings=TINY)
    assert list(again.rows) == list(result.rows)
    for place in ("base", "experts/turned", "merged/actmat"):
        first, second = (load_file(root / place / "model.safetensors") for root in (out, tmp_path / "again"))
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_earlier_demo_is_not_replaced_unasked(finished):
    out, _, _ = finished
    with pytest.raises(OutputError, match="--overwrite"):
        run_demo(out, seed=2, settings=TINY)
    assert json.loads((out / "results.json").read_text())["seed"] == 1


def test_wrong_methods_and_threads_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(RecipeError, match="actmat"):
        run_demo(tmp_path / "out", methods=["actmta"], settings=TINY)
    with pytest.raises(RecipeError, match="needs statistics"):
        run_demo(tmp_path / "out", methods=["regmean"], settings=TINY)
    with pytest.raises(RecipeError, match="thread"):
        run_demo(tmp_path / "out", threads=0, settings=TINY)
    assert not (tmp_path / "out").exists()


def test_every_method_is_run_or_left_out_with_a_reason():
    chosen, left_out = choose_methods(None, 6)
    assert sorted([*chosen, *left_out]) == sorted(m.name for m in all_methods())
    assert {"average", "actmat", "tsv", "iso_c"} <= set(chosen)
    assert "data" in left_out["regmean"]
    assert "at most 2" in left_out["slerp"]
    assert "slerp" in choose_methods(None, 2)[0]


def test_a_method_named_twice_is_run_once():
    assert choose_methods(["ties", "actmat", "ties"], 6) == (["ties", "actmat"], {})
