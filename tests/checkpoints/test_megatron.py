"""Checkpoints of Megatron-core: files that it wrote with two ranks are read as it reads them, and averaged."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.merging import actmat
from tests.helpers.repository import ROOT
from tests.tolerances import F32_ELEMENTWISE
from torch import Tensor

import actmat as library
from actmat.checkpoints.resolve import open_checkpoint
from actmat.errors import CheckpointError

SAVED = ROOT / "tests/data/dcp/megatron"
SCRIPT = ROOT / "tests/helpers/megatron_gpt.py"
STEPS = [SAVED / "step-1", SAVED / "step-2"]


def loaded(step: int) -> dict[str, Tensor]:
    """What Megatron's own `load` gave a model in one process, by the names in the checkpoint: layers are stacked."""
    mine: dict[str, list[Tensor]] = {}
    for key, tensor in load_file(SAVED / "loaded.safetensors").items():
        number, _, name = key.partition("/")
        if int(number) == step:
            mine.setdefault(_stored(name), []).append(tensor)
    return {n: torch.stack(t) if ".layers." in n else t[0] for n, t in mine.items()}


def _stored(name: str) -> str:
    """Name in the checkpoint, where a norm lies with the layer that follows, of a parameter of the model."""
    stem = ".".join(part for part in name.split(".") if not part.isdecimal())
    for norm, layer in (("input_layernorm", "self_attention.linear_qkv"), ("pre_mlp_layernorm", "mlp.linear_fc1")):
        stem = stem.replace(f"{norm}.", f"{layer}.layer_norm_")
    return stem


@pytest.mark.parametrize("step", [1, 2])
def test_parts_of_two_ranks_are_what_megatron_loads(step: int) -> None:
    wanted = loaded(step)
    with open_checkpoint(SAVED / f"step-{step}") as checkpoint:
        assert checkpoint.specs.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(checkpoint.read(name), tensor), name
        assert "'optimizer'" in checkpoint.notes[0]
        assert "stacks the layers" in checkpoint.notes[1]


def test_an_average_is_that_of_float64(tmp_path: Path) -> None:
    done = actmat(["merge", "--average", "uniform", *map(str, STEPS), "--out", str(tmp_path / "out")])
    assert done.code == 0, done
    first, second = loaded(1), loaded(2)
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.specs.keys() == first.keys()
        for name, tensor in first.items():
            wanted, found = (tensor.double() + second[name].double()) / 2, checkpoint.read(name)
            assert not torch.equal(tensor, second[name]), name
            if tensor.dtype == torch.bfloat16:
                assert torch.equal(found, wanted.bfloat16()), name
            else:
                assert (found.double() - wanted).norm() <= F32_ELEMENTWISE * wanted.norm(), name


def test_the_folder_of_nemo_is_opened(tmp_path: Path) -> None:
    """NeMo 2 keeps the same files in `weights`, beside `context`."""
    shutil.copytree(STEPS[0], tmp_path / "step/weights")
    (tmp_path / "step/context").mkdir()
    with open_checkpoint(tmp_path / "step") as checkpoint:
        assert checkpoint.specs.keys() == loaded(1).keys()


def test_zarr_and_archives_of_nemo_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "zarr/decoder.final_layernorm.weight").mkdir(parents=True)
    (tmp_path / "zarr/common.pt").touch()
    (tmp_path / "zarr/metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    with pytest.raises(CheckpointError, match=r"'zarr'.*Fix: .*torch_dist"):
        open_checkpoint(tmp_path / "zarr")
    (tmp_path / "model.nemo").touch()
    with pytest.raises(CheckpointError, match=r"an archive of NeMo"):
        open_checkpoint(tmp_path / "model.nemo")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_megatron_saves_and_loads_an_average(tmp_path: Path) -> None:
    def megatron(*job: str) -> None:
        subprocess.run([sys.executable, "-P", str(SCRIPT), *job], check=True, cwd=tmp_path)

    megatron("save", "run", "2")
    steps = [tmp_path / f"run/step-{n}" for n in (1, 2, 3)]
    library.average(steps, out=tmp_path / "averaged", durable=False)
    library.export(tmp_path / "averaged", out=tmp_path / "resume")
    shutil.copy(steps[-1] / "common.pt", tmp_path / "resume")
    for place in (*steps, tmp_path / "resume"):
        megatron("load", str(place), f"{place.name}.pt")
    models = [torch.load(tmp_path / f"{p.name}.pt")["model"] for p in steps]
    found = torch.load(tmp_path / "resume.pt")
    assert found["iteration"] == 3
    for name, tensor in found["model"].items():
        wanted = sum(m[name].double() for m in models) / 3
        eps = torch.finfo(tensor.dtype).eps
        assert ((tensor.double() - wanted).abs() <= eps * wanted.abs()).all(), name
