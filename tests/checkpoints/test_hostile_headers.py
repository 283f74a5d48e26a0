"""Headers written by an enemy or cut by a broken download: one clear error, no crash, no allocation."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import torch
from safetensors.torch import save

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.header import MAX_HEADER_BYTES, header_length, read_header
from actmat.checkpoints.resolve import open_tensors
from actmat.errors import CheckpointError

VALID = save(
    {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.empty(0)},
    metadata={"format": "pt"},
)


def parse(content: bytes) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    return read_header(lambda offset, length: content[offset : offset + length], len(content), file="x.safetensors")


def build(header: Any, data: bytes = b"", *, raw: bytes | None = None) -> bytes:
    text = json.dumps(header).encode() if raw is None else raw
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: int = 0, end: int = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def problems(content: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        parse(content)
    assert "x.safetensors" in str(caught.value)
    return str(caught.value)


def test_a_file_cut_anywhere_is_refused() -> None:
    for cut in range(len(VALID)):
        assert "interrupted download" in problems(VALID[:cut])


@pytest.mark.parametrize("extra", [1, 7, 4096])
def test_bytes_behind_the_last_tensor_are_refused(extra: int) -> None:
    assert f"{extra} bytes of data follow" in problems(VALID + bytes(extra))


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, MAX_HEADER_BYTES + 1, len(VALID) - 7])
def test_a_lying_length_is_refused_before_anything_is_read(length: int) -> None:
    def read_at(offset: int, wanted: int) -> bytes:
        assert wanted <= 8, "the header was read although its length is impossible"
        return struct.pack("<Q", length)

    with pytest.raises(CheckpointError, match="claim a header"):
        read_header(read_at, len(VALID), file="x.safetensors")


def test_the_length_cap_itself_is_allowed() -> None:
    assert header_length(struct.pack("<Q", MAX_HEADER_BYTES), 2 * MAX_HEADER_BYTES, file="x") == MAX_HEADER_BYTES


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        ({"a": entry(), "b": entry(4, 12)}, 12, "overlaps tensor 'a' by 4 bytes"),
        ({"a": entry(), "b": entry()}, 8, "overlaps tensor 'a' by 8 bytes"),
        ({"a": entry(), "b": entry(12, 20)}, 20, "4 unused bytes before it"),
        ({"a": entry(8, 16)}, 16, "8 unused bytes before it"),
        ({"a": entry(0, 16, (4,))}, 8, "do not lie in the 8 bytes of data"),
        ({"a": entry(8, 0)}, 8, "do not lie in"),
        ({"a": entry(0, 2**62, (2**60,))}, 8, "do not lie in"),
        ({"a": entry(0, 8, (3,))}, 8, "takes 12 bytes, data_offsets give it 8"),
        ({"a": entry(dtype="F4")}, 8, "dtype 'F4' is not supported"),
        ({"a": entry(dtype="F8_E8M0")}, 8, "dtype 'F8_E8M0' is not supported"),
        ({"a": entry(dtype=["F32"])}, 8, "is not supported"),
        ({"a": entry(dtype=None)}, 8, "is not supported"),
        ({"a": entry(shape=[-2])}, 8, "not a list of non-negative integers"),
        ({"a": entry(shape=[2.0])}, 8, "not a list of non-negative integers"),
        ({"a": entry(shape=[True, 2])}, 8, "not a list of non-negative integers"),
        ({"a": entry(shape=["2"])}, 8, "not a list of non-negative integers"),
        ({"a": entry(shape=[2**64])}, 8, "not a list of non-negative integers"),
        ({"a": entry(shape=[2**32, 2**32])}, 8, "overflows 63 bits"),
        ({"a": entry(0, 0, shape=[0, 2**40, 2**40])}, 0, "overflows 63 bits"),
        ({"a": {**entry(), "shape": 2}}, 8, "not a list of non-negative integers"),
        ({"a": {**entry(), "data_offsets": [0]}}, 8, "not two non-negative integers"),
        ({"a": {**entry(), "data_offsets": [0, 8, 8]}}, 8, "not two non-negative integers"),
        ({"a": {**entry(), "data_offsets": [-8, 0]}}, 8, "not two non-negative integers"),
        ({"a": {**entry(), "more": 1}}, 8, "expected exactly dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32"}}, 8, "expected exactly dtype, shape and data_offsets"),
        ({"a": [1, 2]}, 8, "expected exactly dtype, shape and data_offsets"),
        ({"a": None}, 8, "expected exactly dtype, shape and data_offsets"),
        ({"\ud800": entry()}, 8, "surrogate"),
        ({"a": entry(), "__metadata__": {"k": "\udfff"}}, 8, "__metadata__ at 'k' holds half of a surrogate"),
        ({"a": entry(), "__metadata__": {"\udfff": "v"}}, 8, "holds half of a surrogate"),
        ({"a": entry(), "__metadata__": {"k": 1}}, 8, "map of strings, found int at 'k'"),
        ({"a": entry(), "__metadata__": ["k"]}, 8, "map of strings, found list"),
        ({"a": entry(), "__metadata__": None}, 8, "map of strings, found NoneType"),
    ],
)
def test_an_impossible_entry_is_named(header: Any, data: int, said: str) -> None:
    assert said in problems(build(header, bytes(data)))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "no opening brace"),
        (b"[]", "no opening brace"),
        (b' {"a": 1}', "no opening brace"),
        (b"{", "Expecting property name"),
        (b'{"a": {}} x', "Extra data"),
        (b'{"a": {}, "a": {}}', "the key 'a' twice"),
        (b'{"a": {"dtype": "F32", "dtype": "F16"}}', "the key 'dtype' twice"),
        (b'{"__metadata__": {"k": "1", "k": "2"}}', "the key 'k' twice"),
        (b'{"a": NaN}', "expected exactly dtype"),
        (b'{"a": "\xff"}', "codec can't decode byte 0xff"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number of 5000 digits"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested more than 100 deep"),
        (b'{"a":' + b"[" * 100_000, "nested more than 100 deep"),
    ],
)
def test_text_that_is_not_strict_json_is_refused(raw: bytes, said: str) -> None:
    assert said in problems(build(None, raw=raw))


def test_padding_after_the_header_is_allowed() -> None:
    text = json.dumps({"a": entry()}).encode() + b" " * 5
    assert set(parse(build(None, bytes(8), raw=text))[0]) == {"a"}


def test_every_bad_entry_is_listed_and_long_names_are_cut() -> None:
    header = {"x" * 10_000: entry(dtype="F4"), "b": entry(shape=[-1]), "__metadata__": {"k": 0}, "fine": entry()}
    with pytest.raises(CheckpointError) as caught:
        parse(build(header, bytes(8)))
    assert len(caught.value.problems) == 3
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("seed", [b"<html><body>404</body></html>", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_file_of_another_kind_is_guessed(seed: bytes) -> None:
    assert "a Git LFS pointer, an HTML error page, a pickle" in problems(seed * 4)


def test_twenty_thousand_tensors_in_shards_open_in_seconds(tmp_path: Path) -> None:
    weight_map: dict[str, str] = {}
    for shard in range(20):
        file = f"model-{shard:05}-of-00020.safetensors"
        header = {f"model.layers.{shard}.experts.{i}.w": entry(2 * i, 2 * i + 2, (1,), "BF16") for i in range(1000)}
        weight_map.update(dict.fromkeys(header, file))
        (tmp_path / file).write_bytes(build(header, bytes(2000)))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    start = process_time()
    with open_tensors(tmp_path) as checkpoint:
        assert len(checkpoint.specs) == 20_000
    assert process_time() - start < 5


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_folder_or_pipe_with_the_name_of_a_weight_file_does_not_hang(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError):
        open_tensors(tmp_path)
    if not (tmp_path / "model.safetensors").is_dir():
        with pytest.raises(CheckpointError, match="expected a file"):
            open_tensors(tmp_path / "model.safetensors")
