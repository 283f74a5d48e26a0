"""Paths that do not exist, bases that are gone, and a hub that is out of reach, each called by its name."""

import shutil
from pathlib import Path

import pytest
from tests.helpers.checkpoint_files import edit_config
from tests.helpers.merging import actmat


@pytest.fixture
def place(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with `base`, `experts` and `adapters`, without a hub."""
    for name in ("base", "experts", "adapters"):
        shutil.copytree(models / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.mark.parametrize(
    "flags",
    [
        ["-e", "adapters/nope", "-e", "adapters/code"],
        ["-e", "experts/nope", "-e", "experts/none", "-m", "ties"],
        ["-e", "adapters/nope", "-e", "adapters/code", "--to", "adapter"],
    ],
)
def test_a_path_that_does_not_exist_is_not_called_a_missing_base(place: Path, flags: list[str]) -> None:
    done = actmat(["merge", *flags, "--out", "out"], code=1)
    missing = [f for f in flags if "/no" in f]
    assert all(f"{name}: expected a folder" in done.err for name in missing), done.err
    assert "--base" not in done.err


@pytest.mark.parametrize("flags", [["-e", "a="], ["-e", "", "-w", "0.2,0.5"], ["-b", "base", "-e", "a="]])
def test_an_empty_path_is_no_path(place: Path, flags: list[str]) -> None:
    done = actmat(["merge", *flags, "--out", "out"], code=1)
    assert "expected a folder, a weight file, a hub id or a URL, found ''" in done.words


def test_a_recipe_file_with_a_missing_path_names_it_too(place: Path) -> None:
    (place / "r.yaml").write_text("experts: [experts/nope, experts/math]\nmethod: ties\nout: out\n")
    assert "experts/nope: expected a folder" in actmat(["merge", "r.yaml"]).err


def test_an_output_at_home_is_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place))
    (place / "r.yaml").write_text("experts: [adapters/math, adapters/code]\nout: ~/one\n")
    actmat(["merge", "r.yaml"], code=0)
    actmat(["merge", "-e", "~/adapters/math", "-e", "~/adapters/code", "--out=~/two"], code=0)
    assert (place / "one").is_dir()
    assert (place / "two").is_dir()


def test_checkpoints_without_a_base_are_averaged_by_default(place: Path) -> None:
    done = actmat(["merge", "-e", "experts/math", "-e", "experts/code", "--out", "out"], code=0)
    assert "average" in done.out


def _without_base(place: Path, base: str) -> list[str]:
    for name in ("math", "code"):
        edit_config(place / "adapters" / name, base_model_name_or_path=base)
    return ["-e", "adapters/math", "-e", "adapters/code"]


@pytest.mark.parametrize("base", ["models/gone", "/data/models/gone"])
@pytest.mark.parametrize("command", [["try", "--prompt", "x"], ["tune", "--data", "q.jsonl", "--out", "out"]])
def test_a_missing_base_of_adapters_is_named_with_the_file_that_names_it(
    place: Path, base: str, command: list[str]
) -> None:
    (place / "q.jsonl").write_text('{"text": "hello"}\n')
    done = actmat([*command, *_without_base(place, base)], code=1)
    assert f"The base '{base}' of" in done.err
    assert "it comes from adapter_config.json" in done.err
    assert "--base BASE" in done.err


def test_a_name_that_could_be_a_hub_id_is_said_to_be_no_path(place: Path) -> None:
    done = actmat(["plan", "-b", "models/gone", "-e", "experts/math"])
    assert "models/gone: no local path of this name, and offline" in done.err


def test_a_dry_run_of_a_push_needs_no_hub(place: Path) -> None:
    actmat(["merge", "-e", "adapters/math", "-e", "adapters/code", "--out", "out"], code=0)
    done = actmat(["push", "out", "org/name", "--dry-run"], code=0)
    assert "adapter_model.safetensors" in done.out
    assert "the hub was not asked" in done.out
    refused = actmat(["push", "out", "org/name"], code=1)
    assert "unset it" in refused.err


def test_the_place_of_the_output_given_with_o_is_understood(place: Path) -> None:
    done = actmat(["merge", "-b", "base", "-e", "experts/math", "-o", "out"])
    assert "found 'out'. The place of the output is --out" in done.err
