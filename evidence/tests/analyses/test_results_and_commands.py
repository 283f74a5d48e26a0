"""Files that appear whole, JSON without NaN, pictures that repeat, and the commands around them."""

from __future__ import annotations

import json
import math
import re
from xml.etree import ElementTree

import pytest
import torch
from benchmarks.make_llama import Size, make_family
from evidence.tests.helpers.analyses import Plain
from evidence.tests.helpers.terminal import actmat

from actmat.errors import MergeError, OutputError
from actmat.extras.collect.collect import collect
from actmat_experiments import analyses
from actmat_experiments.analyses import save_analysis
from actmat_experiments.analyses.result import degrees, need_matplotlib, short_names, shown
from actmat_experiments.commands.analyze import app
from actmat_experiments.harness.figures import COLORS, MARKERS, new_panels


def run(*argv: object):
    return actmat(argv)


# Results


def test_three_files_with_numbers_that_json_knows(tmp_path):
    out = tmp_path / "new" / "folder"
    paths = save_analysis(Plain(2.0), out)
    assert [p.name for p in paths] == ["plain.json", "plain.png", "plain.svg"]
    assert sorted(p.name for p in paths[0].parent.iterdir()) == sorted(p.name for p in paths)
    stored = json.loads(paths[0].read_text())
    assert stored["analysis"] == "plain"
    assert stored["nested"] == {"list": [1.0, None], "3": None}
    assert stored["versions"]["torch"] == torch.__version__
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(paths[2]).getroot().tag.endswith("svg")
    first = [p.read_bytes() for p in paths]
    with pytest.raises(OutputError, match="--overwrite") as caught:
        save_analysis(Plain(3.0), out)
    assert len(caught.value.problems) == 3
    assert [p.read_bytes() for p in paths] == first
    assert [p.read_bytes() for p in save_analysis(Plain(2.0), out, overwrite=True)] == first, "the same bytes"
    with pytest.raises(OutputError, match="cannot be written"):
        save_analysis(Plain(1.0), paths[0] / "folder")


def test_a_missing_matplotlib_is_found_before_the_work(monkeypatch):
    need_matplotlib()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MergeError, match=r"pip install actmat-experiments"):
        need_matplotlib()


def test_numbers_and_names_for_tables():
    assert (degrees(math.pi / 2), degrees(math.nan), shown(1234.5)) == ("90.0", "-", "1.23e+03")
    assert short_names(["a.in_proj_weight[q]", "b.weight"]) == {"a.in_proj_weight[q]": "a.in_proj[q]", "b.weight": "b"}


def test_panels_and_series_are_told_apart():
    assert len(set(COLORS)) == len(set(MARKERS)) == 8
    figure, panels = new_panels(6, "six")
    assert len(panels) == len(figure.axes) == 6
    with pytest.raises(MergeError, match="no linear layer"):
        new_panels(0, "none")


# Commands


def test_every_analysis_is_a_command():
    functions = {m.removesuffix("_of_statistics") for m in analyses.__all__ if m.islower()}
    assert {c.callback.__name__ for c in app.registered_commands} == functions - {"save_analysis"}


def test_theorem1(tmp_path):
    arguments = ("analyze", "theorem1", "--steps", 3, "--images", 20, "--width", 8, "--out", tmp_path)
    outcome = run(*arguments)
    assert outcome.code == 0
    assert "after 3 steps" in outcome.out
    assert all(len(line) <= 80 for line in outcome.out.splitlines() if not line.startswith("Saved"))
    stored = json.loads((tmp_path / "theorem1.json").read_text())
    assert stored["settings"]["n_steps"] == 3
    assert stored["worst_excess"] < 0
    assert stored["largest_possible_angle"] == pytest.approx(math.pi / 2)
    layer = stored["moments"][-1]["layers"]["linear.0.weight"]
    assert layer["bound"] == pytest.approx(layer["cross"] + layer["correlation"] + layer["drift"])
    assert layer["estimate"] <= layer["bound"]
    said = json.loads(run(*arguments, "--overwrite", "--json").out)
    files = [str(tmp_path / f"theorem1.{kind}") for kind in ("json", "png", "svg")]
    assert said == {"schema": "actmat.analyze/1", **stored, "files": files}


@pytest.mark.parametrize(
    ("command", "flags", "key"),
    [
        ("drift", ("--task", "digit", "--moments", "2", "--layer", "*up_proj*"), "moments"),
        ("scale", (), "layers"),
        ("cosine", ("--samples", "1,5", "--draws", "1"), "layers"),
        ("correlation", ("--samples", "4,8", "--permutations", "3", "--layer", "*up_proj*"), "layers"),
        ("distribution", ("--samples", "8", "--permutations", "2", "--layer", "*up_proj*"), "layers"),
        ("trajectory", ("--moments", "2", "--layer", "*up_proj*"), "layers"),
        ("interference", ("-m", "average"), "models"),
        ("transfer", (), "tasks"),
    ],
)
def test_analyses_of_a_demo(command, flags, key, demo, tmp_path):
    outcome = run("analyze", command, "--demo", demo, *flags, "--out", tmp_path)
    assert outcome.code == 0, outcome.err
    assert all(len(line) <= 80 for line in outcome.out.splitlines() if not line.startswith("Saved"))
    stored = json.loads((tmp_path / f"{command}.json").read_text())
    assert stored["analysis"] == command
    assert stored[key]
    # names of packed blocks are not taken for markup
    if command in ("scale", "cosine"):
        assert "in_proj[q]" in outcome.out


def test_ones_own_checkpoints_with_statistics(tmp_path):
    from transformers import AutoModelForCausalLM

    size = Size(hidden=32, intermediate=48, layers=2, heads=4, key_value_heads=2, vocabulary=64)
    base, places = make_family(tmp_path, size, 2)
    experts = dict(zip(("math", "code"), places, strict=True))
    for index, (name, place) in enumerate(experts.items()):
        ids = torch.randint(3, 60, (4, 6), generator=torch.Generator().manual_seed(index))
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        collect(model, [{"input_ids": ids}]).save(tmp_path / f"{name}-statistics")
    pairs = [
        x for n, p in experts.items() for x in ("-e", f"{n}={p}", "--statistics", f"{n}={tmp_path / n}-statistics")
    ]
    own = ("-b", base, *pairs, "--out", tmp_path / "out")
    outcome = run("analyze", "interference", *own, "--merged", f"math-itself={experts['math']}")
    assert outcome.code == 0, outcome.err
    stored = json.loads((tmp_path / "out" / "interference.json").read_text())
    assert stored["models"]["math-itself"]["experts"]["math"] == 0
    assert stored["models"]["math-itself"]["experts"]["code"] > 0
    for command in ("scale", "cosine"):
        assert run("analyze", command, *own).code == 0
        assert len(json.loads((tmp_path / "out" / f"{command}.json").read_text())["layers"]) == 15
    assert run("analyze", "interference", *own, "--overwrite", "-m", "average").code == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("theorem2", "--tasks", "9"), "2 to 6"),
        (("cosine", "--samples", "1,x"), "comma-separated positive"),
        (("scale", "--demo", "nowhere"), "actmat demo --out"),
        (("scale", "--base", "b"), "with the same names"),
        (("scale", "-b", "b", "-e", "a=x", "--statistics", "c=y"), "['a'] and statistics ['c']"),
        (("interference", "--merged", "x"), "NAME=PATH"),
    ],
)
def test_wrong_inputs_exit_with_one_and_say_why(argv, words, tmp_path):
    outcome = run("analyze", *argv, "--out", tmp_path)
    assert outcome.code == 1
    assert words in re.sub(r"\s+", " ", outcome.err)
    assert not list(tmp_path.iterdir())
