"""Models and data sets of the hub: the format that is there, the commit, the splits that are used, malformed rows."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.hub import hub_stand_in

from actmat.errors import CheckpointError
from actmat_experiments.harness.hub import kept_rows, load_splits, model_folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with hub_stand_in(monkeypatch, tmp_path / "cache") as stand_in:
        yield stand_in


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
    with pytest.raises(CheckpointError, match="numbers: 2 of 100 rows cannot be used"):
        kept_rows(["1"] * 98 + ["x", "y"], int, "numbers")
    with pytest.raises(CheckpointError) as caught:
        kept_rows([], int, "numbers")
    assert list(caught.value.problems) == ["the data set has no rows"]
