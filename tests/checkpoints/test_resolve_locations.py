"""From what a user writes to a checkpoint: what wins, and what every refusal says."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from actmat.checkpoints.formats.safetensors import SafetensorsFiles
from actmat.checkpoints.formats.torch_files import TorchFiles
from actmat.checkpoints.memory import MemoryTensors
from actmat.checkpoints.resolve import open_model, open_tensors
from actmat.errors import CheckpointError

ONE = {"w": torch.ones(2)}


def refused(location: str | Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_tensors(location)
    return str(caught.value)


def test_mappings_and_open_models_pass_through() -> None:
    model = open_model(ONE)
    assert isinstance(model.tensors, MemoryTensors)
    assert open_model(model) is model


def test_safetensors_win_over_torch_files(tmp_path: Path) -> None:
    torch.save({"old": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert isinstance(open_tensors(tmp_path), TorchFiles)
    save_file(ONE, tmp_path / "model.safetensors")
    found = open_model(str(tmp_path))
    assert isinstance(found.tensors, SafetensorsFiles)
    assert set(found.specs) == {"w"}
    assert found.location == str(tmp_path)
    assert found.folder.directory == tmp_path


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x.pth", "x.bin"])
def test_single_files_open_without_a_folder(tmp_path: Path, name: str) -> None:
    save = save_file if name.endswith("safetensors") else torch.save
    save(ONE, tmp_path / name)
    with open_model(tmp_path / name) as checkpoint:
        assert torch.equal(checkpoint.tensors.read("w"), ONE["w"])
        assert checkpoint.folder.directory is None
        assert checkpoint.config is None


def test_a_local_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    save_file(ONE, tmp_path / "org" / "model" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert isinstance(open_tensors("org/model"), SafetensorsFiles)


def test_a_misspelt_sibling_is_not_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "experts" / "math").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "Did you mean 'math'?" in refused("experts/mth")
    assert "hf://org/name" in refused("experts/mth")


@pytest.mark.parametrize("location", ["./nowhere", "/no/where/at/all", "nowhere", "a/b/c", "~/definitely-not-here/x"])
def test_what_can_only_be_a_path_is_not_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "found nothing there" in refused(location)
    assert "found nothing there" in refused(Path(location))


def test_a_path_object_is_never_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "found nothing there" in refused(Path("org/name"))


@pytest.mark.parametrize("location", ["", "a\0b"])
def test_text_that_names_nothing(location: str) -> None:
    assert "expected a folder" in refused(location)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], "PEFT adapter"),
        (["adapter_config.json", "adapter_model.bin"], "PEFT adapter"),
        (["config.json", "tf_model.h5"], "tf_model.h5 is a TensorFlow checkpoint"),
        (["config.json", "flax_model.msgpack"], "flax_model.msgpack is a Flax checkpoint"),
        (["model-Q4_K_M.ggml"], "is a GGML file"),
        (["config.json", "README.md"], "a download of the config alone"),
        ([], "an empty folder"),
        (["training_args.bin", "optimizer.pt"], "expected weights"),
    ],
)
def test_folders_without_usable_weights_say_what_they_hold(tmp_path: Path, files: list[str], said: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    message = refused(tmp_path)
    assert said in message
    assert "Fix" in message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x.ggml", "GGML"),
        ("x.h5", "TensorFlow"),
        ("notes.txt", "notes.txt"),
        ("adapter_model.safetensors", "PEFT"),
    ],
)
def test_files_of_other_kinds_are_named(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).write_text("")
    assert said in refused(tmp_path / name)


def test_a_full_checkpoint_beside_an_adapter_is_the_full_checkpoint(tmp_path: Path) -> None:
    save_file({"lora": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file(ONE, tmp_path / "model.safetensors")
    assert set(open_tensors(tmp_path).specs) == {"w"}
