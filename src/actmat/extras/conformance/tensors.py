"""The test-suite of the `Tensors` contract, shipped so that a new format can be tested with it.

Subclass `TensorsConformance` in a test file and define how tensors are stored:

    class TestMyFormat(TensorsConformance):
        def store(self, tensors, folder):
            write_my_format(tensors, folder / "weights.mine")
            return open_tensors(folder)

Every `test_*` method checks one clause by plain assertions; a test runner supplies `tmp_path`.
"""

from __future__ import annotations

import abc
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from actmat.checkpoints.base import DTYPES, Tensors
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.resolve import open_handle
from actmat.errors import CheckpointError


def conformance_tensors() -> dict[str, Tensor]:
    """Tensors that every format must hold: all common dtypes; zero, one and many entries."""
    generator = torch.Generator().manual_seed(11)
    tensors = {
        f"{name}.weight": (torch.randint(0, 2, (5, 16), dtype=torch.uint8, generator=generator)).to(dtype)
        for name, (dtype, _) in DTYPES.items()
        if not name.startswith(("float8", "uint16", "uint32", "uint64"))
    }
    tensors["noise.weight"] = torch.randn(33, 65, generator=generator)
    tensors["layer.bias"] = torch.randn(7, generator=generator).to(torch.bfloat16)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 4)
    tensors["special"] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42])
    return tensors


class TensorsConformance(abc.ABC):
    """One method per clause of `Tensors`."""

    has_handle: ClassVar[bool] = True
    """False for tensors that another process cannot open; their `handle` must refuse."""

    @abc.abstractmethod
    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        """Store the tensors (in the empty folder, if files are needed) and open them."""

    def test_specs_tell_names_shapes_dtypes_and_sizes(self, tmp_path: Path) -> None:
        """`specs` lists every tensor and no other name."""
        tensors = conformance_tensors()
        with self.store(tensors, tmp_path) as opened:
            assert set(opened.specs) == set(tensors), "specs list other names than were stored"
            for name, tensor in tensors.items():
                spec = opened.specs[name]
                assert spec.name == name, f"spec of {name!r} is called {spec.name!r}"
                assert spec.shape == tuple(tensor.shape), f"{name!r}: shape {spec.shape}, stored {tuple(tensor.shape)}"
                assert DTYPES[spec.dtype][0] == tensor.dtype, f"{name!r}: dtype {spec.dtype}, stored {tensor.dtype}"
                assert spec.nbytes == tensor.numel() * tensor.itemsize, f"{name!r}: wrong number of bytes"

    def test_specs_are_in_storage_order(self, tmp_path: Path) -> None:
        """Reading in the order of `specs` reads every file once, from front to back."""
        with self.store(conformance_tensors(), tmp_path) as opened:
            files = [spec.file for spec in opened.specs.values()]
            visits = [file for i, file in enumerate(files) if i == 0 or files[i - 1] != file]
            assert len(visits) == len(set(visits)), f"files are visited more than once: {visits}"
            positions = [(visits.index(spec.file), spec.offset) for spec in opened.specs.values()]
            assert positions == sorted(positions), "offsets go back within a file"

    def test_read_returns_the_stored_bytes(self, tmp_path: Path) -> None:
        """`read` gives shape, dtype and every bit back, contiguous, on the CPU."""
        tensors = conformance_tensors()
        with self.store(tensors, tmp_path) as opened:
            for name, tensor in tensors.items():
                value = opened.read(name)
                assert (value.shape, value.dtype) == (tensor.shape, tensor.dtype), f"{name!r} has another form"
                assert value.is_contiguous(), f"{name!r} is not contiguous"
                assert value.device.type == "cpu", f"{name!r} is on {value.device}"
                assert raw_bytes(value) == raw_bytes(tensor), f"{name!r} has other bytes"

    def test_read_into_fills_any_range(self, tmp_path: Path) -> None:
        """`read_into` fills exactly the buffer, from any byte, aligned to entries or not."""
        stored = torch.randn(37, 11, generator=torch.Generator().manual_seed(3))
        expected = bytes(raw_bytes(stored))
        with self.store({"w": stored, "behind": torch.ones(9)}, tmp_path) as opened:
            size = len(expected)
            ranges = ((0, size), (0, 1), (3, 50), (44, 44), (size - 1, 1), (size, 0), (0, 0), (1, size - 1))
            for start, length in ranges:
                out = bytearray(b"\xaa" * (length + 2))
                opened.read_into("w", start, memoryview(out)[1 : 1 + length])
                assert out[1 : 1 + length] == expected[start : start + length], f"bytes at {start} + {length} differ"
                assert (out[0], out[-1]) == (0xAA, 0xAA), "bytes outside the buffer were written"

    def test_read_into_refuses_what_it_cannot_fill(self, tmp_path: Path) -> None:
        """A range outside the tensor and a buffer that is not plain writable bytes are `ValueError`s."""
        with self.store({"w": torch.ones(4), "behind": torch.ones(9)}, tmp_path) as opened:
            cases = (
                (1, memoryview(bytearray(16))),
                (-1, memoryview(bytearray(4))),
                (17, memoryview(bytearray())),
                (0, memoryview(bytes(4))),
                (0, memoryview(bytearray(8)).cast("f")),
                (0, memoryview(bytearray(8))[::2]),
            )
            for start, out in cases:
                case = f"read_into from byte {start} into a buffer of {out.nbytes} bytes"
                refusal(ValueError, case, opened.read_into, "w", start, out)

    def test_an_unknown_name_is_refused_with_the_near_one(self, tmp_path: Path) -> None:
        """Reading a tensor that does not exist is a `CheckpointError`."""
        with self.store({"model.weight": torch.ones(4)}, tmp_path) as opened:
            reading = refusal(CheckpointError, "read of a name that does not exist", opened.read, "model.weigth")
            buffer = memoryview(bytearray())
            into = refusal(CheckpointError, "read_into of no tensor", opened.read_into, "model.weigth", 0, buffer)
            assert "'model.weight'" in reading, f"read does not offer the near name: {reading}"
            assert "'model.weight'" in into, f"read_into does not offer the near name: {into}"

    def test_prefetch_never_fails(self, tmp_path: Path) -> None:
        """`prefetch` is a hint: any names, also after `close`."""
        opened = self.store(conformance_tensors(), tmp_path)
        opened.prefetch(["noise.weight", "empty", "no such tensor"])
        opened.close()
        opened.prefetch(["noise.weight"])

    def test_threads_may_read_at_once(self, tmp_path: Path) -> None:
        """Reads from many threads give every thread its own tensor."""
        tensors = {f"t{i}": torch.full((257,), float(i)) for i in range(16)}
        with self.store(tensors, tmp_path) as opened, ThreadPoolExecutor(8) as pool:
            names = list(tensors) * 6
            for name, read in zip(names, pool.map(opened.read, names), strict=True):
                assert torch.equal(read, tensors[name]), f"{name!r} was mixed up"

    def test_identity_is_stable(self, tmp_path: Path) -> None:
        """`identity` is the same before and after reading."""
        with self.store({"w": torch.ones(4)}, tmp_path) as opened:
            before = opened.identity()
            opened.read("w")
            assert opened.identity() == before, "reading changed the identity"

    def test_a_handle_opens_the_same_tensors_again(self, tmp_path: Path) -> None:
        """`handle` can be pickled, and `open_handle` gives the same specs and bytes under the same location."""
        with self.store({"w": torch.arange(6.0), "v": torch.ones(2, 3)}, tmp_path) as opened:
            if not self.has_handle:
                refusal(CheckpointError, "handle of tensors that only this process can read", opened.handle)
                return
            handle = pickle.loads(pickle.dumps(opened.handle()))
            with open_handle(handle) as again:
                assert again.location == opened.location, f"reopened as {again.location}"
                assert dict(again.specs) == dict(opened.specs), "specs differ after reopening"
                assert again.identity() == opened.identity(), "identity differs after reopening"
                assert torch.equal(again.read("w"), opened.read("w")), "bytes differ after reopening"
                assert again.handle() == opened.handle(), "the handle differs after reopening"

    def test_close_ends_reading_and_may_be_called_twice(self, tmp_path: Path) -> None:
        """After `close` a read raises `ValueError`, as a closed file does; specs stay."""
        opened = self.store({"w": torch.ones(4)}, tmp_path)
        opened.close()
        opened.close()
        assert set(opened.specs) == {"w"}, "specs are gone after close"
        refusal(ValueError, "read after close", opened.read, "w")
        refusal(ValueError, "read_into after close", opened.read_into, "w", 0, memoryview(bytearray(16)))


def refusal(kind: type[Exception], case: str, call: Callable[..., object], *arguments: object) -> str:
    """Message of the error of type `kind` that the call must raise."""
    try:
        call(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError(f"expected {kind.__name__}, nothing was raised: {case}")
