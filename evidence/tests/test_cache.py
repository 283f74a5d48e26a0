"""Stages on disk: found by everything that determines them; what is fetched from the hub, and loaded."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

from actmat.errors import CheckpointError, OutputError
from actmat_experiments.harness.cache import (
    Cache,
    canonical,
    code_digest,
    digest,
    file_digest,
    meaning,
)
from actmat_experiments.harness.hub import kept_rows, load_splits, model_folder
from actmat_experiments.harness.merging import merging_code
from actmat_experiments.harness.training import Schedule, side_by_side
from actmat_experiments.vision.backbones import PLAIN_SCALE, Backbone

# Stages on disk: found by everything that determines them, whole or not at all.


class Maker:
    def __init__(self, text: str = "made") -> None:
        self.calls, self.text, self.found = 0, text, []

    def __call__(self, out: Path) -> None:
        self.calls += 1
        self.found.append(sorted(p.name for p in out.iterdir()))
        (out / "result").write_text(self.text)


def test_a_finished_stage_is_not_made_again(tmp_path):
    cache, make = Cache(tmp_path), Maker()
    key = {"seed": 1, "rate": 0.1}
    first = cache.get("train", key, make)
    again = cache.get("train", {"rate": 0.1, "seed": 1}, make)
    assert (first, make.calls) == (again, 1)
    assert (first / "result").read_text() == "made"
    assert json.loads((first / "key.json").read_text()) == key
    assert first == tmp_path / "train" / digest(key)
    assert len(first.name) == 16


@pytest.mark.parametrize("other", [{"seed": 2}, {"seed": 1, "more": None}, {"seed": 1.5}, {"seeds": 1}])
def test_any_change_of_the_key_makes_it_anew(tmp_path, other):
    cache, make = Cache(tmp_path), Maker()
    cache.get("train", {"seed": 1}, make)
    assert not cache.holds("train", other)
    cache.get("train", other, make)
    assert make.calls == 2


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(("resumable", "left"), [(False, []), (True, ["state"])])
def test_a_failed_stage_does_not_look_finished_and_only_a_resumable_one_finds_what_it_left(
    tmp_path, error, resumable, left
):
    cache, make = Cache(tmp_path), Maker()

    def fail(out: Path) -> None:
        (out / "state").write_text("half")
        raise error

    with pytest.raises(error):
        cache.get("train", {"seed": 1}, fail, resumable=resumable)
    assert not cache.holds("train", {"seed": 1})
    cache.get("train", {"seed": 1}, make, resumable=resumable)
    assert make.found == [left]


def test_only_what_is_missing_of_many_is_made(tmp_path):
    cache = Cache(tmp_path)
    cache.get("merge", {"row": "a"}, Maker("old"))
    asked = []

    def make(parts):
        asked.append(sorted(parts))
        for name, part in parts.items():
            (part / "result").write_text(name)

    keys = {name: {"row": name} for name in "abc"}
    done = cache.get_many("merge", keys, make)
    assert asked == [["b", "c"]]
    assert {n: (p / "result").read_text() for n, p in done.items()} == {"a": "old", "b": "b", "c": "c"}
    cache.get_many("merge", keys, make)
    assert len(asked) == 1


def test_two_at_once_make_one(tmp_path):
    cache, make, gate = Cache(tmp_path), Maker(), threading.Barrier(2)

    def get() -> None:
        gate.wait()
        cache.get("train", {"seed": 1}, make)

    threads = [threading.Thread(target=get) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert make.calls == 1


@pytest.mark.parametrize("value", [Path("/data"), float("nan"), object(), {1, 2}])
def test_a_key_that_does_not_say_what_it_contains_is_refused(value):
    with pytest.raises(TypeError, match="cache key"):
        canonical({"x": value})


def test_dataclasses_and_tuples_are_plain_data():
    found = json.loads(canonical({"schedule": Schedule(1, 2, 0.5), "names": ("a", "b")}))
    assert found == {"names": ["a", "b"], "schedule": asdict(Schedule(1, 2, 0.5))}


def test_another_key_under_the_same_digits_is_an_error(tmp_path):
    cache, make = Cache(tmp_path), Maker()
    place = cache.get("train", {"seed": 1}, make)
    (place / "key.json").write_text('{"seed": 2}\n')
    with pytest.raises(OutputError, match="does not match"):
        cache.get("train", {"seed": 1}, make)


def test_a_place_that_cannot_be_written_is_said_so(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="--cache"):
        Cache(tmp_path / "file").get("train", {"seed": 1}, Maker())
    with pytest.raises(ValueError, match="not a valid stage name"):
        Cache(tmp_path).get("../train", {}, Maker())


def test_the_hash_of_files_is_that_of_names_and_bytes(tmp_path):
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    before = file_digest([tmp_path / "a", tmp_path / "b"])
    assert file_digest([tmp_path / "b", tmp_path / "a"]) == before
    (tmp_path / "b").write_text("3")
    assert file_digest([tmp_path / "a", tmp_path / "b"]) != before


MODULE = '''"""What it is."""

LIMIT = 3
"""Of something."""


def f(x):
    """Doubles."""
    return 2 * x  # exactly


class A:
    """Only a docstring."""
'''


@pytest.mark.parametrize(
    "same",
    [
        MODULE.replace("What it is.", "What it is, said better."),
        MODULE.replace('"""Of something."""\n', ""),
        MODULE.replace('    """Doubles."""\n', ""),
        MODULE.replace("  # exactly", ""),
        MODULE.replace('"""Only a docstring."""', "pass"),
        MODULE.replace("2 * x", "(2\n    * x)"),
    ],
)
def test_code_is_the_same_when_only_its_text_for_readers_changes(same):
    assert same != MODULE
    assert meaning(same) == meaning(MODULE)


@pytest.mark.parametrize(
    ("old", "new"), [("LIMIT = 3", "LIMIT = 4"), ("2 * x", "x * 2"), ("class A", "class B"), ("def f(x):", "def f(y):")]
)
def test_code_that_does_something_else_is_another(old, new):
    assert meaning(MODULE.replace(old, new)) != meaning(MODULE)


def test_the_code_of_merges_is_of_layers_that_are_there() -> None:
    assert merging_code() == merging_code()
    with pytest.raises(AssertionError, match="renamed"):
        code_digest("linalg", "plan")


# Models and data sets of the hub: the format that is there, the commit, the splits that are used, malformed rows.


def repository(folder, *names):
    folder.mkdir()
    for name in names:
        if name.endswith(".safetensors"):
            save_file({"w": torch.ones(2)}, folder / name)
        else:
            (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (("model.safetensors", "pytorch_model.bin"), {"model.safetensors"}),
        (("pytorch_model.bin", "tf_model.h5"), {"pytorch_model.bin"}),
        (
            ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "flax_model.msgpack"),
            {"pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"},
        ),
    ],
)
def test_weights_are_taken_in_the_first_format_that_is_there(hub, tmp_path, names, taken):
    commit = hub.add("org/model", repository(tmp_path / "model", "config.json", "README.md", *names))
    folder, identity = model_folder("org/model")
    assert {p.name for p in folder.iterdir()} == {"config.json", *taken}
    assert identity == f"org/model@{commit}"
    assert not hub.bytes_of(".h5")
    assert not hub.bytes_of(".msgpack")


def test_a_revision_is_taken_and_a_branch_is_known_by_its_commit(hub, tmp_path):
    first = hub.add("org/model", repository(tmp_path / "a", "config.json", "model.safetensors"))
    second = hub.add("org/model", repository(tmp_path / "b", "config.json", "pytorch_model.bin"))
    assert model_folder("org/model")[1] == f"org/model@{second}"
    folder, identity = model_folder(f"org/model@{first}")
    assert identity == f"org/model@{first}"
    assert (folder / "model.safetensors").is_file()


def test_what_has_no_weights_or_is_not_there_is_told(hub, tmp_path):
    hub.add("org/empty", repository(tmp_path / "e", "config.json", "tf_model.h5"))
    with pytest.raises(CheckpointError, match=r"expected \*\.safetensors or pytorch_model\*\.bin, found config"):
        model_folder("org/empty")
    with pytest.raises(CheckpointError, match="is not a folder"):
        model_folder("org/nowhere")


SCRIPTED = """
import sys, warnings
from actmat_experiments.harness.hub import load_splits
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    found, identity = load_splits("org/scripted", "some", ("train", "test"))
print(len(found["train"]), found["test"][1]["text"], identity.count("@" + sys.argv[1]))
print([str(w.message) for w in seen if "script" in str(w.message)])
"""


@pytest.mark.slow
def test_a_data_set_that_is_a_script_is_read_from_the_hubs_conversion(hub, tmp_path, monkeypatch):
    """In a process of its own: `datasets` takes the hub's address when it is imported."""
    from datasets import Dataset

    script = tmp_path / "script"
    script.mkdir()
    (script / "README.md").write_text("# A set\n")
    (script / "scripted.py").write_text("raise SystemExit\n")
    hub.add("datasets/org/scripted", script)
    converted = tmp_path / "converted"
    for split in ("train", "test", "extra"):
        (converted / "some" / split).mkdir(parents=True)
        rows = Dataset.from_dict({"text": [f"{split} {i}" for i in range(3)]})
        rows.to_parquet(converted / "some" / split / "0000.parquet")
    commit = hub.add("datasets/org/scripted", converted, branch="refs/convert/parquet")
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    command = [sys.executable, "-c", SCRIPTED, commit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[0] == "3 test 1 2"
    assert "refs/convert/parquet" in done.stdout
    assert not hub.bytes_of("extra/0000.parquet")


def test_rows_of_a_folder_are_known_by_their_bytes(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets-cache"))
    for split in ("train", "test"):
        made = datasets.Dataset.from_dict({"n": [1, 2]})
        made.to_parquet(tmp_path / "set" / "data" / f"{split}-00000-of-00001.parquet")
    found, identity = load_splits(str(tmp_path / "set"), None, ("train",))
    assert list(found) == ["train"]
    assert list(found["train"]["n"]) == [1, 2]
    datasets.Dataset.from_dict({"n": [1, 3]}).to_parquet(tmp_path / "set" / "data" / "train-00000-of-00001.parquet")
    assert load_splits(str(tmp_path / "set"), None, ("train",))[1] != identity
    with pytest.raises(CheckpointError, match=r"no split 'validation'; it has (test, train|train, test)"):
        load_splits(str(tmp_path / "set"), None, ("validation",))


def test_one_malformed_row_in_a_hundred_is_left_out():
    found, problems = kept_rows(["1"] * 199 + ["x"], int, "numbers")
    assert (len(found), len(problems)) == (199, 1)
    assert problems[0].startswith("row 200: invalid literal")
    with pytest.raises(CheckpointError, match="numbers: 2 of 100 rows cannot be used; at most 1 % may be"):
        kept_rows(["1"] * 98 + ["x", "y"], int, "numbers")
    with pytest.raises(CheckpointError) as caught:
        kept_rows([], int, "numbers")
    assert list(caught.value.problems) == ["the data set has no rows"]


# Loading from several threads leaves the library as it was.


def test_loads_in_threads_leave_weights_tied_in_later_models(tmp_path: Path) -> None:
    tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    hf.ViTModel(hf.ViTConfig(**tiny, image_size=8, patch_size=4), add_pooling_layer=False).save_pretrained(tmp_path)
    backbone = Backbone("vit", 8, PLAIN_SCALE)
    before = hf.PreTrainedModel.tie_weights
    side_by_side(lambda i: backbone.load(tmp_path), range(40), threads=4)
    assert hf.PreTrainedModel.tie_weights is before
    model = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=11, n_positions=4))
    assert model.lm_head.weight is model.transformer.wte.weight
