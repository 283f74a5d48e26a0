"""The writer, the files beside the weights, and content hashes."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import xxhash

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.hashing import ContentHash, hash_names, sha256_file
from actmat.checkpoints.model import ModelFolder
from actmat.checkpoints.source import LocalSource
from actmat.checkpoints.writing.shards import Shard, plan_shards
from actmat.checkpoints.writing.sidecars import copy_sidecars
from actmat.checkpoints.writing.staging import check_output_path
from actmat.checkpoints.writing.writer import ShardWriter
from actmat.errors import OutputError


def shards_of(*sizes: int) -> tuple[Shard, ...]:
    return plan_shards([TensorSpec(f"t{i}", (n,), "uint8", "") for i, n in enumerate(sizes)], 10**9)


def model_folder(folder: Path) -> ModelFolder:
    return ModelFolder(files=(LocalSource(folder),))


def view(text: bytes) -> memoryview:
    return memoryview(bytearray(text))


def test_tensors_arrive_in_any_order_and_pieces(tmp_path: Path) -> None:
    shards = shards_of(4, 0, 6)
    writer = ShardWriter(tmp_path, shards, durable=False)
    last, first = writer.sink("t2"), writer.sink("t0")
    last.write(view(b"ab"))
    first.write(view(b"0123"))
    last.write(view(b"cdef"))
    assert (tmp_path / "model.safetensors").read_bytes() == shards[0].header + b"0123abcdef"
    assert last.digest == xxhash.xxh3_128_hexdigest(b"abcdef")
    assert writer.sink("t1").digest == xxhash.xxh3_128_hexdigest(b"")
    writer.close()
    writer.close()


def test_aliases_get_the_same_bytes(tmp_path: Path) -> None:
    shards = shards_of(3, 3)
    writer = ShardWriter(tmp_path, shards, durable=False)
    sink = writer.sink("t0", ["t1"])
    sink.write(view(b"x"))
    sink.write(view(b"yz"))
    assert (tmp_path / "model.safetensors").read_bytes() == shards[0].header + b"xyzxyz"
    assert writer.holds("t0", sink.digest)
    assert writer.holds("t1", sink.digest)
    writer.close()


def test_too_many_and_too_few_bytes(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, shards_of(3, 3), durable=False)
    sink = writer.sink("t0")
    sink.write(view(b"xy"))
    with pytest.raises(ValueError, match="2 bytes written, the header promises 3"):
        _ = sink.digest
    with pytest.raises(ValueError, match="more bytes than the 3"):
        sink.write(view(b"zz"))
    data = (tmp_path / "model.safetensors").read_bytes()
    assert data.endswith(b"xy\0\0\0\0"), "the neighbor is untouched"
    writer.close()


def test_what_is_there_is_kept_if_it_fits_else_cleared(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, shards_of(4, 4), durable=False)
    sink = writer.sink("t0")
    sink.write(view(b"good"))
    digest = sink.digest
    writer.close()
    again = ShardWriter(tmp_path, shards_of(4, 4), durable=False)
    assert again.holds("t0", digest)
    assert not again.holds("t1", digest)
    assert not again.holds("stranger", digest)
    again.close()
    other = ShardWriter(tmp_path, shards_of(2, 6), durable=False)
    assert not other.holds("t0", digest)
    assert set((tmp_path / "model.safetensors").read_bytes()[-8:]) == {0}
    other.close()


def test_a_place_that_cannot_be_written_leaves_no_handle_open(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((OutputError, IsADirectoryError)):
        ShardWriter(tmp_path, shards_of(1))
    assert len(os.listdir("/proc/self/fd")) == before


def folder(place: Path, **files: str) -> Path:
    place.mkdir()
    for name, text in files.items():
        (place / name.replace("__", ".")).write_text(text)
    return place


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": "float32", "torch_dtype": "float32"}, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
    ],
)
def test_the_config_is_told_the_output_dtype(tmp_path: Path, config: dict[str, str], expected: dict[str, str]) -> None:
    base = folder(tmp_path / "base", config__json=json.dumps(config | {"model_type": "llama"}))
    out = tmp_path / "out"
    out.mkdir()
    copy_sidecars(*[model_folder(base)] * 3, out=out, dtype="bfloat16")
    assert json.loads((out / "config.json").read_text()) == expected | {"model_type": "llama"}
    assert json.loads((base / "config.json").read_text()) == config | {"model_type": "llama"}


def test_no_folder_no_sidecars(tmp_path: Path) -> None:
    assert copy_sidecars(*[ModelFolder()] * 3, out=tmp_path, dtype="float16") == []


def test_a_running_hash_is_the_hash_of_all_bytes() -> None:
    seen = ContentHash()
    for piece in (b"ab", b"", b"c" * 1000):
        seen.update(piece)
    assert seen.size == 1002
    assert seen.hexdigest() == xxhash.xxh3_128_hexdigest(b"ab" + b"c" * 1000)


def test_the_hash_of_a_checkpoint_depends_on_names_and_contents_not_on_order() -> None:
    pairs = [("a", "1"), ("b", "2")]
    assert hash_names(pairs) == hash_names(reversed(pairs))
    assert hash_names(pairs) == xxhash.xxh3_128_hexdigest(b"a\x001\nb\x002\n")
    assert len({hash_names(p) for p in (pairs, [("a", "2"), ("b", "1")], [("a", "1")], [])}) == 4


def test_sha256_is_that_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 100_000)
    assert sha256_file(tmp_path / "f") == hashlib.sha256(b"x" * 100_000).hexdigest()


def test_places_to_write(tmp_path: Path) -> None:
    def problems(out: Path, *, overwrite: bool = False) -> list[str]:
        return check_output_path(out, overwrite=overwrite, inputs={"base": tmp_path / "base"})

    (tmp_path / "base").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "base")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    assert problems(tmp_path / "new" / "deep" / "out") == []
    assert "is, or contains, an input" in problems(tmp_path / "link")[0]
    assert "lies inside an input" in problems(tmp_path / "link" / "out")[0]
    assert "is a link or a file" in problems(tmp_path / "dangling")[0]
    done = folder(tmp_path / "done", actmat_manifest__json="{}")
    assert "pass --overwrite" in problems(done)[0]
    assert problems(done, overwrite=True) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "is not writable" in check_output_path(tmp_path / "out", overwrite=False, inputs={})[0]
    tmp_path.chmod(0o700)
