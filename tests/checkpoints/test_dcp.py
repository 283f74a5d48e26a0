"""Checkpoints of torch.distributed.checkpoint: read by ranges, from the metadata on."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest
import torch
from tests.helpers.distributed import example, halves, save_by_two, save_dcp
from tests.helpers.merging import actmat, expert_of, llama_tensors, save_checkpoint
from torch import Tensor

import actmat as library
from actmat.checkpoints.base import Tensors
from actmat.checkpoints.files import FileReader
from actmat.checkpoints.resolve import open_model, open_tensors
from actmat.errors import CheckpointError
from actmat.extras.conformance.tensors import TensorsConformance

TWO_RANKS = Path(__file__).parents[1] / "data/dcp/two_ranks"


class TestDcp(TensorsConformance):
    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        return open_tensors(save_dcp(tensors, folder / "step-1"))


class TestDcpCutByRows(TensorsConformance):
    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        cut = {n: halves(t.shape, 0) for n, t in tensors.items() if t.numel() > 1}
        return open_tensors(save_dcp(tensors, folder, files=3, cut=cut))


class TestDcpCutByTheLastAxis(TensorsConformance):
    """Nested under `model`, in the folder that accelerate makes, beside state of the optimizer."""

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        cut = {f"model.{n}": halves(t.shape, t.ndim - 1) for n, t in tensors.items() if t.numel() > 1}
        state = {"model": tensors, "optim": {"state": {n: {"exp_avg": t} for n, t in tensors.items()}}}
        save_dcp(state, folder / "pytorch_model_fsdp_0", files=2, cut=cut)
        return open_tensors(folder)


class TestTransposedDcp(TensorsConformance):
    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        turned = {n: t.t().contiguous().t() if t.ndim == 2 else t for n, t in tensors.items()}
        return open_tensors(save_dcp(turned, folder))


def test_a_checkpoint_of_two_processes_is_put_together() -> None:
    with open_model(TWO_RANKS) as checkpoint:
        assert checkpoint.specs.keys() == example().keys()
        for name, wanted in example().items():
            assert torch.equal(checkpoint.tensors.read(name), wanted), name
        assert [n.text for n in checkpoint.folder.notes] == ["10 tensors of training ('optimizer') are left out"]


@pytest.mark.slow
def test_two_processes_save_what_is_read(tmp_path: Path) -> None:
    save_by_two(tmp_path / "step-1")
    with open_model(tmp_path / "step-1") as checkpoint:
        assert all(torch.equal(checkpoint.tensors.read(n), t) for n, t in example().items())


def test_a_box_of_two_axes_and_any_range_of_bytes(tmp_path: Path) -> None:
    tensor = torch.arange(7 * 5 * 3, dtype=torch.int16).view(7, 5, 3)
    boxes = [((a, b, 0), (h, w, 3)) for a, h in ((0, 4), (4, 3)) for b, w in ((0, 2), (2, 2), (4, 1))]
    save_dcp({"w": tensor}, tmp_path, files=2, cut={"w": boxes})
    want = tensor.numpy().tobytes()
    with open_model(tmp_path) as checkpoint:
        for start in range(0, len(want), 7):
            for length in (1, 2, 9, 30, 61, 120):
                out = bytearray(min(length, len(want) - start))
                checkpoint.tensors.read_into("w", start, memoryview(out))
                assert bytes(out) == want[start : start + len(out)]


def test_no_more_is_read_than_the_rows_that_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_dcp({"a": torch.ones(1000, 64), "b": torch.ones(1000, 64)}, tmp_path)
    read: list[int] = []
    original = FileReader.read_into

    def counted(self: FileReader, label: str, offset: int, out: memoryview, *, tensor: str = "") -> None:
        read.append(len(out))
        original(self, label, offset, out, tensor=tensor)

    monkeypatch.setattr(FileReader, "read_into", counted)
    with open_model(tmp_path) as checkpoint:
        assert not read  # opening reads the metadata only
        out = bytearray(10 * 256)
        checkpoint.tensors.read_into("b", 500 * 256, memoryview(out))
    assert sum(read) < 256 * 10 + 20_000  # the rows, and the directory of the item


def test_names_of_the_model_and_what_is_left_out(tmp_path: Path) -> None:
    weights = {"layers.0.weight": torch.ones(2, 2)}
    cases: list[tuple[dict[str, object], str]] = [
        ({"app": {"model": weights, "optim": {"m": torch.zeros(2)}}}, "'optim'"),
        ({**weights, "optimizer.state.exp_avg": torch.zeros(2), "rng_state": torch.zeros(2)}, "'optimizer'"),
        ({"model": weights, "ema": {"layers.0.weight": torch.zeros(2, 2)}}, "outside of 'model'"),
        (dict(weights), ""),
    ]
    for number, (state, said) in enumerate(cases):
        with open_model(save_dcp(state, tmp_path / str(number))) as checkpoint:
            assert list(checkpoint.specs) == ["layers.0.weight"]
            assert torch.equal(checkpoint.tensors.read("layers.0.weight"), torch.ones(2, 2))
            assert said in " ".join(map(str, checkpoint.folder.notes))


def test_two_models_and_none_are_refused(tmp_path: Path) -> None:
    one = {"a": torch.ones(2)}
    with pytest.raises(CheckpointError, match=r"'model' and 'module'.*dcp.save"):
        open_tensors(save_dcp({"model": one, "module": one}, tmp_path / "two"))
    with pytest.raises(CheckpointError, match="only state of training"):
        open_tensors(save_dcp({"optim": one}, tmp_path / "none"))


class Evil:
    """A pickle that would write a file."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.place,)


def test_a_hostile_metadata_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for number, evil in enumerate([Evil(marker), {"state_dict_metadata": Evil(marker)}, [1, 2], b"x"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / ".metadata").write_bytes(pickle.dumps(evil))
        with pytest.raises(CheckpointError, match="Nothing in it was run"):
            open_tensors(folder)
    assert not marker.exists()


def test_a_file_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    save_dcp({"a": torch.ones(2)}, tmp_path / "x")
    metadata = tmp_path / "x/.metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", b"../secret.tt"))
    with pytest.raises(CheckpointError, match="not a plain name"):
        open_tensors(tmp_path / "x")


def test_parts_that_do_not_make_up_a_tensor_are_refused(tmp_path: Path) -> None:
    tensor = torch.ones(4, 4)
    for number, boxes in enumerate([
        [((0, 0), (2, 4))], [((0, 0), (3, 4)), ((2, 0), (2, 4))], [((0, 0), (2, 4)), ((2, 0), (2, 3))],
    ]):  # fmt: skip
        folder = tmp_path / str(number)
        with mock.patch("torch.distributed.checkpoint.default_planner._validate_global_plan", return_value=[]):
            save_dcp({"w": tensor}, folder, cut={"w": boxes})
        with pytest.raises(CheckpointError, match="do not cover its shape"):
            open_tensors(folder)


def test_short_files_and_other_contents_are_named(tmp_path: Path) -> None:
    save_dcp({"w": torch.ones(64, 64)}, tmp_path)
    data = (tmp_path / "__0_0.distcp").read_bytes()
    (tmp_path / "__0_0.distcp").write_bytes(data[:1000])
    with pytest.raises(CheckpointError, match="shorter than the metadata says"):
        open_tensors(tmp_path)
    (tmp_path / "__0_0.distcp").write_bytes(bytes(len(data)))
    with (
        open_model(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match="damaged item"),
    ):
        checkpoint.tensors.read("w")
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        open_tensors(tmp_path)


def test_a_shape_that_no_file_holds_is_refused(tmp_path: Path) -> None:
    """Before memory is asked for: of a terabyte, here."""
    save_dcp({"w": torch.ones(3, 3)}, tmp_path)
    metadata = (tmp_path / ".metadata").read_bytes()
    size = b"K\x03K\x03\x86"
    assert metadata.count(size) == 2  # of the tensor, and of its part
    huge = b"J\x00\x00\x00\x40K\x03\x86"
    (tmp_path / ".metadata").write_bytes(metadata.replace(size, huge).replace(metadata[2:11], b""))
    with pytest.raises(CheckpointError, match=r"cannot be in \d+ bytes"):
        open_tensors(tmp_path)


def test_code_in_an_item_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    save_dcp({"w": torch.ones(4)}, tmp_path / "x")
    path = tmp_path / "x/__0_0.distcp"
    length = path.stat().st_size
    torch.save(Evil(marker), path)
    grown = path.read_bytes()
    assert len(grown) <= length
    metadata = (tmp_path / "x/.metadata").read_bytes()
    changed = metadata.replace(b"M" + length.to_bytes(2, "little"), b"M" + len(grown).to_bytes(2, "little"))
    assert changed != metadata
    (tmp_path / "x/.metadata").write_bytes(changed)
    with open_model(tmp_path / "x") as checkpoint, pytest.raises(CheckpointError, match="the name"):
        checkpoint.tensors.read("w")
    assert not marker.exists()


def test_an_average_of_distributed_checkpoints(tmp_path: Path) -> None:
    base = llama_tensors(1)
    steps = [expert_of(base, n) for n in range(3)]
    for n, tensors in enumerate(steps):
        cut = {f"model.{k}": halves(t.shape, n % t.ndim) for k, t in tensors.items()}
        save_dcp({"model": tensors, "optim": {"m": torch.zeros(2)}}, tmp_path / f"step-{n}", files=2, cut=cut)
    places = [tmp_path / f"step-{n}" for n in range(3)]
    report = library.average(places, weights="linear", out=tmp_path / "out", durable=False)
    plain = [save_checkpoint(tmp_path / f"plain-{n}", t) for n, t in enumerate(steps)]
    wanted = library.average(plain, weights="linear", out=tmp_path / "wanted", durable=False)
    with open_tensors(report.out) as found, open_tensors(wanted.out) as expected:
        assert found.specs.keys() == expected.specs.keys()
        assert all(torch.equal(found.read(n), expected.read(n)) for n in found.specs)
    note = "1 tensors of training ('optim') are left out"
    assert any(note in n and "base, expert 'step-0'" in n for n in map(str, report.plan.notes))


def test_inspect_recognizes_training_checkpoints() -> None:
    shown = actmat(["inspect", TWO_RANKS], code=0)
    assert "note: 10 tensors of training" in shown.out
    one_file = actmat(["inspect", TWO_RANKS / "__0_0.distcp"])
    assert "Fix: give the folder" in one_file.words


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"), "zero_to_fp32.py"),
        (("layer_00-model_states.pt", "mp_rank_00_model_states.pt"), "DeepSpeed states"),
        (("latest", "zero_to_fp32.py", "global_step100"), "found global_step100, .*Fix: give the folder that holds"),
        ((".metadata", "__0_0.distcp", "common.pt", "metadata.json"), "a Megatron-core file"),
        (("common.pt", "metadata.json"), "a Megatron-core file"),
        (("shard-00001-model-00001-of-00001.safetensors",), "consolidate_safetensors_files"),
    ],
)
def test_other_training_checkpoints_are_refused_with_the_way_out(
    tmp_path: Path, names: tuple[str, ...], says: str
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=says):
        open_tensors(tmp_path)
    if ".pt" in names[0]:
        with pytest.raises(CheckpointError, match=says):
            open_tensors(tmp_path / names[0])
    save_checkpoint(tmp_path, {"w": torch.ones(2)})  # what a converter writes there is read
    open_tensors(tmp_path).close()


def test_an_unknown_form_is_refused(tmp_path: Path) -> None:
    found = actmat(["export", tmp_path, "--to", "onnx", "--out", tmp_path / "out"], code=1)
    assert "Formats: comfy, diffusers, gguf, kohya" in found.err
