"""Where output tensors go: a pure function of names, shapes and dtypes, readable by the safetensors library."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from actmat.checkpoints.base import DTYPES, TensorSpec
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.resolve import open_tensors
from actmat.checkpoints.writing.shards import parse_size, plan_shards
from actmat.checkpoints.writing.writer import ShardWriter


def spec(name: str, shape: tuple[int, ...], dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, shape, dtype, "")


SPECS = st.lists(
    st.builds(
        spec,
        st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=8).filter(
            lambda n: n != "__metadata__"
        ),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.sampled_from(sorted(DTYPES)),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda s: s.name,
)


@given(SPECS, st.integers(1, 300))
def test_every_tensor_once_aligned_without_holes_within_the_limit(specs: list[TensorSpec], limit: int) -> None:
    shards = plan_shards(specs, limit)
    placed = [n for s in shards for n in s.specs]
    assert sorted(placed) == sorted(s.name for s in specs)
    by_name = {s.name: s for s in specs}
    for shard in shards:
        reached = len(shard.header)
        assert reached % 8 == 0
        for name, spec in shard.specs.items():
            assert (spec.file, spec.offset, spec.nbytes) == (shard.file, reached, by_name[name].nbytes)
            assert spec.offset % by_name[name].itemsize == 0
            reached += spec.nbytes
        assert reached == shard.size
        size = sum(p.nbytes for p in shard.specs.values())
        large = [p for p in shard.specs.values() if p.nbytes]
        assert size <= limit or len(large) == 1
    assert plan_shards(specs, limit) == shards


@settings(max_examples=40)
@given(SPECS, st.sampled_from([40, 10**9]))
def test_the_reference_library_reads_what_is_written(specs: list[TensorSpec], limit: int) -> None:
    rng = torch.Generator().manual_seed(0)
    tensors = {}
    for s in specs:
        raw = torch.randint(0, 2 if s.dtype == "bool" else 256, (s.nbytes,), dtype=torch.uint8, generator=rng)
        tensors[s.name] = (
            raw.view(DTYPES[s.dtype][0]).view(s.shape) if s.nbytes else torch.empty(s.shape, dtype=DTYPES[s.dtype][0])
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = plan_shards(specs, limit)
        writer = ShardWriter(folder, shards, durable=False)
        for key, tensor in tensors.items():
            sink = writer.sink(key)
            sink.write(raw_bytes(tensor))
            assert writer.holds(key, sink.digest)
        writer.finish(specs)
        seen = set()
        for shard in shards:
            with safe_open(folder / shard.file, "pt") as file:
                assert file.metadata() == {"format": "pt"}
                for key in file.keys():  # noqa: SIM118 - no mapping
                    found = file.get_tensor(key)
                    assert found.dtype == tensors[key].dtype
                    assert tuple(found.shape) == tuple(tensors[key].shape)
                    assert bytes(raw_bytes(found.contiguous())) == bytes(raw_bytes(tensors[key]))
                    seen.add(key)
        assert seen == set(tensors)
        with open_tensors(folder) as ours:
            assert {n: (s.shape, s.dtype) for n, s in ours.specs.items()} == {s.name: (s.shape, s.dtype) for s in specs}


def test_names_of_files_and_the_index(tmp_path: Path) -> None:
    specs = [spec(f"t{i}", (10,)) for i in range(5)]
    assert [s.file for s in plan_shards(specs, 10**9)] == ["model.safetensors"]
    shards = plan_shards(specs, 80)
    assert [s.file for s in shards] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [list(s.specs) for s in shards] == [["t0", "t1"], ["t2", "t3"], ["t4"]]
    writer = ShardWriter(tmp_path, shards, durable=True)
    writer.finish(specs)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200, "total_parameters": 50}
    assert index["weight_map"] == {n: s.file for s in shards for n in s.specs}


def test_wider_dtypes_come_first_and_keep_their_order() -> None:
    specs = [
        spec("a", (3,), "uint8"),
        spec("b", (1,), "float64"),
        spec("c", (3,), "bfloat16"),
        spec("d", (1,), "int64"),
    ]
    assert list(plan_shards(specs, 10**9)[0].specs) == ["b", "d", "c", "a"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("4GiB", 4 * 2**30),
        ("500 mb", 5 * 10**8),
        ("1.5kB", 1500),
        ("17", 17),
        (17, 17),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size
