"""However a checkpoint is stored, the same values give the same merge; the output loads in every dtype and sharding."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.checkpoint_files import save_sharded
from tests.helpers.merging import loaded_whole
from tests.helpers.models import BY_NAME, naive_merge, perturbed, stored
from tests.tolerances import BF16_ROUNDING, F16_ROUNDING, F32_ELEMENTWISE, relative_error
from torch import Tensor

import actmat

LLAMA = BY_NAME["llama"]
Tensors = Mapping[str, Tensor]
Models = tuple[Path, dict[str, Tensor], dict[str, Tensor]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A bfloat16 base on disk and the values of two bfloat16 experts."""
    folder = tmp_path_factory.mktemp("forms") / "base"
    LLAMA.build().to(torch.bfloat16).save_pretrained(folder)
    start = stored(folder)
    return folder, perturbed(start, 1), perturbed(start, 2)


@pytest.fixture(scope="module")
def reference(models: Models, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Content hash of the merge of experts stored plainly."""
    return merge_stored_as(plain, models, tmp_path_factory.mktemp("reference"))


def merge_stored_as(store: Callable[[Tensors, Path], Path], models: Models, folder: Path) -> str:
    base, *values = models
    places = []
    for number, tensors in enumerate(values):
        (folder / f"expert{number}").mkdir()
        places.append(store(tensors, folder / f"expert{number}"))
    experts = [{"path": str(p), "name": f"expert{i}"} for i, p in enumerate(places)]
    report = actmat.merge(base, experts, out=folder / "out", threads=1, durable=False)
    return str(report.manifest["output"]["content"])


def plain(tensors: Tensors, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def other_order(tensors: Tensors, folder: Path) -> Path:
    torch.save({n: tensors[n] for n in sorted(tensors, reverse=True)}, folder / "pytorch_model.bin")
    return folder


def sharded(tensors: Tensors, folder: Path) -> Path:
    save_sharded(tensors, folder, shards=5)
    return folder


def sharded_bin(tensors: Tensors, folder: Path) -> Path:
    names = sorted(tensors)
    weight_map = {n: f"pytorch_model-{i % 2 + 1:05}-of-00002.bin" for i, n in enumerate(names)}
    for file in set(weight_map.values()):
        torch.save({n: tensors[n] for n in names if weight_map[n] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def bare_safetensors(tensors: Tensors, folder: Path) -> Path:
    save_file(dict(tensors), folder / "weights.safetensors")
    return folder / "weights.safetensors"


def bare_torch(tensors: Tensors, folder: Path) -> Path:
    torch.save(dict(tensors), folder / "weights.pt")
    return folder / "weights.pt"


def training_checkpoint(tensors: Tensors, folder: Path) -> Path:
    torch.save({n: t.T.contiguous().T if t.ndim == 2 else t for n, t in tensors.items()}, folder / "strided.pth")
    return folder / "strided.pth"


def wider(tensors: Tensors, folder: Path) -> Path:
    """The same values, exactly, in float32."""
    return plain({n: t.float() for n, t in tensors.items()}, folder)


def mixed(tensors: Tensors, folder: Path) -> Path:
    kinds = (torch.float32, torch.bfloat16, torch.float64)
    return plain({n: t.to(kinds[i % 3]) for i, (n, t) in enumerate(tensors.items())}, folder)


def prefixed(tensors: Tensors, folder: Path) -> Path:
    return plain({f"module.{n}": t for n, t in tensors.items()}, folder)


FORMS = (
    other_order,
    sharded,
    sharded_bin,
    bare_safetensors,
    bare_torch,
    training_checkpoint,
    wider,
    mixed,
    prefixed,
)


@pytest.mark.parametrize("store", FORMS, ids=lambda f: f.__name__)
def test_storage_of_the_experts_does_not_matter(
    store: Callable[[Tensors, Path], Path], models: Models, reference: str, tmp_path: Path
) -> None:
    assert merge_stored_as(store, models, tmp_path) == reference


@pytest.mark.parametrize("store", [sharded, sharded_bin, other_order], ids=lambda f: f.__name__)
def test_storage_of_the_base_does_not_matter(
    store: Callable[[Tensors, Path], Path], models: Models, reference: str, tmp_path: Path
) -> None:
    base, *values = models
    (tmp_path / "base").mkdir()
    store(stored(base), tmp_path / "base")
    (tmp_path / "base" / "config.json").write_bytes((base / "config.json").read_bytes())
    assert merge_stored_as(plain, (tmp_path / "base", values[0], values[1]), tmp_path) == reference


def test_small_shards_load(models: Models, tmp_path: Path) -> None:
    base, first, _ = models
    expert = plain(first, tmp_path / "expert")
    report = actmat.merge(base, [expert], out=tmp_path / "one", threads=1, durable=False)
    shards = actmat.merge(base, [expert], out=tmp_path / "many", threads=1, durable=False, max_shard_size="8KB")
    files = sorted(f.name for f in shards.out.glob("*.safetensors"))
    assert len(files) > 3
    index = json.loads((shards.out / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert not (report.out / "model.safetensors.index.json").exists()
    one, many = stored(report.out), stored(shards.out)
    assert one.keys() == many.keys() == index["weight_map"].keys()
    assert all(torch.equal(one[n], many[n]) for n in one)
    assert torch.isfinite(LLAMA.output(loaded_whole(LLAMA.loader, shards.out).float())).all()


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        ("float32", F32_ELEMENTWISE),
        ("bfloat16", BF16_ROUNDING),
        ("float16", F16_ROUNDING),
        ("float64", F32_ELEMENTWISE),
    ],
)
def test_output_dtype(dtype: str, bound: float, models: Models, tmp_path: Path) -> None:
    base, first, second = models
    places = [plain(first, tmp_path / "a"), plain(second, tmp_path / "b")]
    report = actmat.merge(base, places, method="average", out=tmp_path / "out", threads=1, durable=False, dtype=dtype)
    wanted = naive_merge(stored(base), [first, second], LLAMA.views, method="average")
    found = stored(report.out)
    assert {t.dtype for t in found.values()} == {getattr(torch, dtype)}
    assert max(relative_error(found[n], wanted[n]) for n in wanted) < bound
    assert json.loads((report.out / "config.json").read_text())["dtype"] == dtype
    model = LLAMA.loader.from_pretrained(report.out)
    assert model.dtype == getattr(torch, dtype)
