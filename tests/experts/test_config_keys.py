"""No key of a config of PEFT is read in silence: each field is in one list; refused and unknown ones are said."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
from tests.experts.test_families import CONFIGS as FAMILIES
from tests.helpers.adapters import save_peft, tiny
from tests.helpers.checkpoint_files import edit_config
from tests.helpers.located import open_expert

import actmat
from actmat import plugins
from actmat.checkpoints.keys import Keys
from actmat.checkpoints.resolve import open_model
from actmat.errors import MergeError
from actmat.experts.changes.base import Reader
from actmat.experts.peft import reader_of

LINEAR = ["q_proj", "down_proj"]
CONFIGS: dict[str, peft.PeftConfig] = {
    **FAMILIES,
    "pissa": peft.LoraConfig(r=2, init_lora_weights="pissa", target_modules=LINEAR),
    "lora_tokens": peft.LoraConfig(r=2, target_modules=LINEAR, trainable_token_indices=[1]),
}


def keys_of(name: str) -> Keys:
    reader = reader_of(CONFIGS[name].to_dict())
    return reader.keys


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_of_a_family_is_in_one_list(name: str) -> None:
    keys = keys_of(name)
    lists = [set(keys.obeyed), keys.irrelevant.keys(), keys.refused.keys()]
    fields = {f.name for f in dataclasses.fields(CONFIGS[name])}
    assert not fields - keys.known, "new fields of PEFT: obey them, or say why not"
    assert sum(map(len, lists)) == len(set().union(*lists)), "a field is in two lists"


def test_every_family_that_is_read_has_lists() -> None:
    readers = plugins.load_all("actmat.experts", Reader, "reader")
    assert {r.name for r in readers.values()} == {r.name for n in CONFIGS if (r := reader_of(CONFIGS[n].to_dict()))}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and an adapter of every family."""
    folder = tmp_path_factory.mktemp("keys")
    tiny("llama").save_pretrained(folder / "base")
    for name, config in CONFIGS.items():
        if name != "pissa":  # which PEFT initializes in float32 only
            save_peft(folder / name, "llama", 1, config)
    return folder


def changed(place: Path, name: str, folder: Path, **fields: Any) -> Path:
    """A copy of an adapter with other fields."""
    shutil.copytree(place / name, folder)
    edit_config(folder, **fields)
    return folder


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "pissa"])
def test_a_field_that_is_not_known_is_noted(name: str, place: Path, tmp_path: Path) -> None:
    found = [*map(str, actmat.plan(place / "base", [place / name], method="linear").notes)]
    assert not [note for note in found if "unknown fields" in note]
    adapter = changed(place, name, tmp_path / "a", sparsity=0.5, later=None)
    notes = [*map(str, actmat.plan(place / "base", [adapter], method="linear").notes)]
    assert sum("unknown fields, which are ignored: sparsity" in note for note in notes) == 1


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("adalora", {"use_dora": True}, "use_dora is set: DoRA normalizes"),
        ("adalora", {"target_parameters": ["experts.up"]}, "target_parameters is set: stacked experts"),
        ("dora", {"use_qalora": True}, "use_qalora is set"),
    ],
)
def test_a_refused_field_is_an_error(
    name: str, fields: dict[str, Any], words: str, place: Path, tmp_path: Path
) -> None:
    adapter = changed(place, name, tmp_path / "a", **fields)
    with open_model(place / "base") as base, pytest.raises(MergeError) as error:
        open_expert(adapter, base)
    assert str(error.value).count(words) == 1
