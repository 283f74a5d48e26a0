"""The test-suite of the `Deltas` contract, shipped so that a new family of adapters can be held to it.

Subclass `DeltasConformance` in a test file, and store a base, an expert of it, and the tensors it stands for:

    class TestMyAdapter(DeltasConformance):
        def store(self, folder, seed):
            ...
            return StoredExpert(base=folder / "base", expert=folder / "adapter", tuned=tensors)

The location is opened with `locate`, so the family has to be installed as a plug-in. Every `test_*` method
checks one clause of the contract by plain assertions. No test framework is imported; a runner supplies `tmp_path`
(pytest does).
"""

from __future__ import annotations

import abc
import atexit
import concurrent.futures
import contextlib
import functools
import math
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.model import Model
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.resolve import open_model
from actmat.errors import CheckpointError
from actmat.experts.deltas import Deltas, DeltasHandle, DeltaSource, SourceKind
from actmat.experts.locate import fit_expert, locate, open_handle
from actmat.experts.lora.adapter import Adapter
from actmat.extras.conformance.tensors import refusal


@dataclass(frozen=True)
class StoredExpert:
    """A full checkpoint and an expert in storage.

    `tuned` are the fine-tuned tensors `W_t` by the names of the base, of a dtype in which `W_0 + D_t` can be compared.
    """

    base: Path
    expert: Path
    tuned: Mapping[str, Tensor]


class DeltasConformance(abc.ABC):
    """One method per clause of `Deltas`.

    Attributes:
        kinds: kinds of sources that the expert must show, so that no clause is tested on nothing.
        tolerance: of formed deltas, relative to the norm of `W_t`.
        register: makes a family known in another process, if it is not installed there.
    """

    kinds: frozenset[SourceKind]
    tolerance = 1e-12
    register: Callable[[], None] | None = None

    @abc.abstractmethod
    def store(self, folder: Path, seed: int) -> StoredExpert:
        """Store a base and an expert in a folder that does not exist yet.

        The base is the same for all seeds, the expert's data are others for every seed.
        """

    @contextlib.contextmanager
    def opened(self, folder: Path) -> Iterator[tuple[Model, Deltas, Mapping[str, Tensor]]]:
        """The base, the expert of seed 1 and its fine-tuned tensors."""
        stored = self.store(folder, 1)
        with open_model(stored.base) as base, fit_expert(locate(stored.expert), base) as expert:
            yield base, expert, stored.tuned

    def test_attributes_describe_the_expert(self, tmp_path: Path) -> None:
        """`location` is the opened one, sizes are counted, `needs_base` distinguishes adapters from full models."""
        stored = self.store(tmp_path / "seed1", 1)
        located = locate(stored.expert)
        with open_model(stored.base) as base, fit_expert(located, base) as expert:
            assert expert.location == str(stored.expert), f"location is {expert.location!r}"
            assert expert.needs_base == isinstance(located, Adapter), f"needs_base is {expert.needs_base}"
            assert expert.model.specs, "nothing is stored"

    def test_sources_agree_with_specs(self, tmp_path: Path) -> None:
        """Every tensor in `specs` has a source of its name, and costs and ranks belong to its kind."""
        with self.opened(tmp_path / "seed1") as (base, expert, _):
            assert {expert.source(n).kind for n in expert.specs} == self.kinds, "other kinds of sources than expected"
            for name, spec in expert.specs.items():
                source = expert.source(name)
                assert source.name == name, f"the source of {name!r} is called {source.name!r}"
                assert source.dtype == spec.dtype, f"{name!r}: source has {source.dtype}, spec {spec.dtype}"
                assert source.rank == 0 or source.kind == "formed", f"{name!r} is {source.kind} and has a rank"
                if source.kind == "stored":
                    assert source.nbytes == spec.nbytes, f"{name!r}: reads {source.nbytes} bytes of {spec.nbytes}"
                else:
                    assert (source.nbytes > 0) == (source.kind == "formed"), f"{name!r}: reads {source.nbytes} bytes"
                    of_base = base.specs[name]
                    assert (spec.shape, spec.dtype) == (of_base.shape, of_base.dtype), (
                        f"{name!r}: spec is not the base's"
                    )

    def test_deltas_lead_to_the_tuned_tensors(self, tmp_path: Path) -> None:
        """`W_0 + D_t = W_t` for every given tensor; others are tied to given ones."""
        with self.opened(tmp_path / "seed1") as (base, expert, tuned):
            for name in expert.specs:
                _assert_near(_tuned(expert, base, name), tuned[name], self.tolerance, f"{name!r}")
                if expert.source(name).kind == "zero":
                    assert torch.equal(base.tensors.read(name), tuned[name]), f"{name!r} is changed, its source is zero"
            expected = [tuned[name] for name in expert.specs]
            for name in tuned.keys() - expert.specs.keys():
                assert any(torch.equal(tuned[name], t) for t in expected), f"{name!r} is given under no name"

    def test_stored_tensors_are_read_in_ranges(self, tmp_path: Path) -> None:
        """`read` gives the spec's shape and dtype, `read_into` any range of its bytes."""
        with self.opened(tmp_path / "seed1") as (_, expert, _):
            for name in _names(expert, "stored"):
                tensor, spec = expert.read(name), expert.specs[name]
                assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, torch_dtype(spec.dtype)), f"form of {name!r}"
                data = bytes(raw_bytes(tensor))
                for start, stop in _ranges(len(data)):
                    out = bytearray(stop - start)
                    expert.read_into(name, start, memoryview(out))
                    assert out == data[start:stop], f"{name!r}: bytes {start}:{stop} differ from those of `read`"

    def test_a_part_of_a_delta_is_that_of_the_whole(self, tmp_path: Path) -> None:
        """`dense(name, start, stop)` is a slice of the flattened delta, in the dtype that is asked for."""
        with self.opened(tmp_path / "seed1") as (_, expert, _):
            for name in _names(expert, "formed", "zero"):
                numel = expert.specs[name].numel
                whole = expert.dense(name, 0, numel, torch.float64)
                for start, stop in _ranges(numel):
                    part = expert.dense(name, start, stop, torch.float64)
                    assert part.shape == (stop - start,), f"{name!r}: {start}:{stop} has shape {tuple(part.shape)}"
                    _assert_near(part, whole[start:stop], self.tolerance, f"{name!r}, entries {start}:{stop}")
                assert expert.dense(name, 0, numel, torch.float32).dtype == torch.float32, f"{name!r}: dtype"

    def test_factors_multiply_to_the_delta(self, tmp_path: Path) -> None:
        """`factors` of a formed source with a rank have that rank; those of a zero source the shape asked for."""
        with self.opened(tmp_path / "seed1") as (_, expert, _):
            for name in _names(expert, "formed", "zero"):
                source, spec = expert.source(name), expert.specs[name]
                if len(spec.shape) < 2 or (source.kind == "formed" and not source.rank):
                    continue
                shape = (spec.shape[0], math.prod(spec.shape[1:]))
                product = expert.factors(name, shape, torch.float64)
                delta = expert.dense(name, 0, spec.numel, torch.float64)
                _assert_near(product.dense().flatten(), delta, self.tolerance, f"product of {name!r}")
                assert product.rank == max(source.rank, 1), f"{name!r}: factors of rank {product.rank}, {source}"
                if source.kind == "zero":
                    assert tuple(product.shape) == shape, f"{name!r}: shape {tuple(product.shape)}, expected {shape}"

    def test_what_a_source_does_not_give_is_refused(self, tmp_path: Path) -> None:
        """Reading an unstored tensor, and forming a stored one, are `ValueError`s that name the tensor."""
        with self.opened(tmp_path / "seed1") as (_, expert, _):
            for name in expert.specs:
                source = expert.source(name)
                for what, call in _not_given(expert, source):
                    assert f"'{name}'" in refusal(ValueError, f"{what} of {source}", call), f"{what} names no tensor"

    def test_an_unknown_name_is_refused_with_the_near_one(self, tmp_path: Path) -> None:
        """A name that is not in `specs` is a `CheckpointError`, whatever is asked for."""
        with self.opened(tmp_path / "seed1") as (_, expert, _):
            near = next(iter(expert.specs))
            unknown = DeltaSource(f"{near}x", "zero", "float32", 0)
            calls = {"source": lambda: expert.source(unknown.name), **dict(_all_calls(expert, unknown))}
            for what, call in calls.items():
                message = refusal(CheckpointError, f"{what} of a name that does not exist", call)
                assert f"'{near}'" in message, f"{what} does not offer the near name: {message}"

    def test_content_tells_data_apart(self, tmp_path: Path) -> None:
        """`content` of a formed delta changes with its data and with nothing else; zeros are equal everywhere."""
        first, second = (self.store(tmp_path / f"seed{seed}", seed) for seed in (1, 2))
        with (
            open_model(first.base) as base,
            fit_expert(locate(first.expert), base) as deltas,
            fit_expert(locate(first.expert), base) as same,
            fit_expert(locate(second.expert), base) as other,
        ):
            for name in _names(deltas, "formed", "zero"):
                assert deltas.content(name) == same.content(name), f"{name!r}: content differs between two openings"
                differs = deltas.content(name) != other.content(name)
                assert differs == (deltas.source(name).kind == "formed"), f"{name!r}: content does not tell data apart"
            if deltas.stored is not None and same.stored is not None and other.stored is not None:
                hashes = deltas.stored.hashes
                assert hashes == same.stored.hashes, "hashes differ between two openings"
                assert len(hashes) == len(deltas.model.specs), "not every stored tensor has a hash"
                assert hashes != other.stored.hashes, "hashes do not tell data apart"
                assert deltas.stored.check_values("math") == [], "finite values are reported as NaN or Inf"

    def test_another_process_opens_the_handle(self, tmp_path: Path) -> None:
        """`handle` is picklable, and gives the same bits in another process."""
        with self.opened(tmp_path / "seed1") as (_, expert, _):
            contents = _other_process().submit(_contents, expert.handle(), self.register).result()
            here = {name: _content(expert, name) for name in expert.specs}
            assert contents == here, "another process gives other deltas"

    def test_threads_may_read_at_once(self, tmp_path: Path) -> None:
        """Requests from many threads give every thread its own tensor."""
        with self.opened(tmp_path / "seed1") as (_, expert, _), concurrent.futures.ThreadPoolExecutor(8) as pool:
            expected = {name: _content(expert, name) for name in expert.specs}
            names = list(expected) * 4
            for name, content in zip(names, pool.map(functools.partial(_content, expert), names), strict=True):
                assert content == expected[name], f"{name!r} was mixed up"

    def test_close_ends_reading_and_may_be_called_twice(self, tmp_path: Path) -> None:
        """After `close`, reading and forming raise `ValueError`, as for a closed file; specs stay."""
        with self.opened(tmp_path / "seed1") as (_, expert, _):
            names = [*_names(expert, "stored", "formed")]
            expert.close()
            expert.close()
            for name in names:
                refusal(ValueError, f"{name!r} after close", functools.partial(_content, expert, name))
            assert set(names) <= set(expert.specs), "specs are gone after close"


def _names(expert: Deltas, *kinds: SourceKind) -> list[str]:
    """Names of the tensors with sources of these kinds."""
    return [name for name in expert.specs if expert.source(name).kind in kinds]


def _ranges(size: int) -> list[tuple[int, int]]:
    """Ranges of `size` entries: all, none, and some with ends in the middle of a row."""
    third = size // 3
    return [(0, size), (0, 0), (size, size), (0, 1), (size - 1, size), (third, 2 * third + 1), (1, size)]


def _tuned(expert: Deltas, base: Model, name: str) -> Tensor:
    """`W_t` in float64."""
    spec = expert.specs[name]
    if expert.source(name).kind == "stored":
        return expert.read(name).double()
    return base.tensors.read(name).double() + expert.dense(name, 0, spec.numel, torch.float64).view(spec.shape)


def _content(expert: Deltas, name: str) -> bytes:
    """The bytes of a stored tensor, or of a delta in float64."""
    if expert.source(name).kind == "stored":
        return bytes(raw_bytes(expert.read(name)))
    return bytes(raw_bytes(expert.dense(name, 0, expert.specs[name].numel, torch.float64).contiguous()))


def _contents(handle: DeltasHandle, register: Callable[[], None] | None) -> dict[str, bytes]:
    """Open a handle and read everything; runs in another process."""
    if register is not None:
        register()
    with open_handle(handle) as expert:
        return {name: _content(expert, name) for name in expert.specs}


@functools.cache
def _other_process() -> concurrent.futures.ProcessPoolExecutor:
    """One process with an interpreter of its own, shared by all tests, as starting one takes seconds."""
    pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    atexit.register(pool.shutdown)
    return pool


def _all_calls(expert: Deltas, source: DeltaSource) -> list[tuple[str, Callable[[], object]]]:
    """Every request for the data of a tensor."""
    name = source.name
    return [
        ("read", lambda: expert.read(name)),
        ("read_into", lambda: expert.read_into(name, 0, memoryview(bytearray()))),
        ("dense", lambda: expert.dense(name, 0, 0, torch.float64)),
        ("content", lambda: expert.content(name)),
        ("factors", lambda: expert.factors(name, (1, 1), torch.float64)),
    ]


def _not_given(expert: Deltas, source: DeltaSource) -> list[tuple[str, Callable[[], object]]]:
    """The requests that a source of this kind does not serve."""
    methods = {"stored": ("read", "read_into"), "zero": ("dense", "content", "factors"), "formed": ("dense", "content")}
    served = (*methods[source.kind], *(["factors"] if source.rank else []))
    return [(what, call) for what, call in _all_calls(expert, source) if what not in served]


def _assert_near(value: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Assert that two tensors are equal up to a fraction of the norm of the second."""
    assert value.shape == expected.shape, f"{what}: shape {tuple(value.shape)}, expected {tuple(expected.shape)}"
    wanted = expected.double()
    error, norm = float((value.double() - wanted).norm()), float(wanted.norm())
    assert error <= tolerance * norm, f"{what}: off by {error:.3g} at a norm of {norm:.3g}"
