"""`model+adapter` as a checkpoint, against PEFT's `merge_and_unload`."""

import random
from pathlib import Path

import peft
import pytest
import torch
import transformers
from tests.tolerances import F32_ELEMENTWISE
from torch import Tensor

from actmat.checkpoints.layer_names import adapted_parts
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.resolve import open_handle, open_tensors
from actmat.errors import CheckpointError
from actmat.recipe.load import local_location

DATA = Path(__file__).parents[1] / "data" / "mergekit"


@pytest.fixture(scope="module")
def merged() -> dict[str, Tensor]:
    """The model `a` with the adapter, which was trained on `base`, as PEFT merges it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(DATA / "a", dtype=torch.float32)
    with_adapter = peft.PeftModel.from_pretrained(model, str(DATA / "lora"))
    return dict(with_adapter.merge_and_unload().state_dict())


def test_tensors_are_those_of_peft(merged: dict[str, Tensor]) -> None:
    with open_tensors(f"{DATA / 'a'}+{DATA / 'lora'}") as adapted, open_tensors(DATA / "a") as plain:
        changed = [n for n in adapted.specs if not torch.equal(adapted.read(n), plain.read(n))]
        assert changed
        assert all("q_proj" in n or "v_proj" in n for n in changed)
        for name in adapted.specs:
            torch.testing.assert_close(adapted.read(name), merged[name], rtol=0, atol=F32_ELEMENTWISE)
        assert adapted.identity() != plain.identity()


def test_any_range_here_and_from_a_handle() -> None:
    rng = random.Random(0)
    with open_tensors(f"{DATA / 'a'}+{DATA / 'lora'}") as here, open_handle(here.handle()) as there:
        for name, spec in here.specs.items():
            whole = here.read(name)
            start = rng.randrange(spec.nbytes)
            buffer = bytearray(rng.randrange(spec.nbytes - start + 1))
            there.read_into(name, start, memoryview(buffer))
            assert bytes(buffer) == bytes(raw_bytes(whole)[start : start + len(buffer)]), name


def test_layers_of_a_model_with_an_adapter_stack() -> None:
    location = f"{DATA / 'base'}[0:1] + {DATA / 'a'}+{DATA / 'lora'}[2:4]"
    with open_tensors(location) as stack, open_tensors(f"{DATA / 'a'}+{DATA / 'lora'}") as adapted:
        name = "self_attn.q_proj.weight"
        assert torch.equal(stack.read(f"model.layers.2.{name}"), adapted.read(f"model.layers.3.{name}"))
        with open_handle(stack.handle()) as again:
            assert torch.equal(again.read(f"model.layers.1.{name}"), adapted.read(f"model.layers.2.{name}"))


def test_a_second_model_is_no_adapter() -> None:
    with pytest.raises(CheckpointError, match=r"a\+.*/b: '.*/b' is not an adapter"):
        open_tensors(f"{DATA / 'a'}+{DATA / 'b'}")
    with pytest.raises(CheckpointError, match="has no 'x'"):
        open_tensors(f"{DATA / 'x'}+{DATA / 'lora'}")


def test_parts_of_a_location(tmp_path: Path) -> None:
    assert adapted_parts("a+b") == ("a", "b")
    assert [adapted_parts(t) for t in ("a", "+b", "a+", "a+b+c", "https://host/a+b")] == [None] * 5
    for name in ("a", "lora", "a+b"):
        (tmp_path / name).mkdir()
    assert local_location("a+lora", tmp_path) == f"{tmp_path}/a+{tmp_path}/lora"
    assert local_location("./a+org/lora", tmp_path) == f"{tmp_path}/a+org/lora"
    assert local_location("a+b", tmp_path) == f"{tmp_path}/a+b", "a folder of that name"
    assert local_location(f"{tmp_path}/a+lora", tmp_path) == f"{tmp_path}/a+{tmp_path}/lora"
