"""One suite for all readings and sinks: the formula in float64, rounded once, in range, hashed, unchanged bits kept."""

import abc
import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.one_tensor import digest
from tests.helpers.samples import Samples
from tests.helpers.sessions import run_here
from torch import Tensor

import actmat
from actmat.engine.deltas import RegionDeltas
from actmat.engine.record import Record
from actmat.errors import NumericalError
from actmat.methods import get_method
from actmat.planning.item import Item, Strategy, WriteKind
from actmat.progress import Progress

Q, K, UP = (f"model.layers.0.{n}.weight" for n in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"))
EXACT = {"compute_dtype": "float64", "dtype": "float64"}
SCALE = 0.7


def of_method(name: str, base: Tensor, deltas: Sequence[Tensor]) -> Tensor:
    """The method's result on deltas in float64."""
    method = get_method(name)
    needs = {"base": base.double()} if method.needs_base else {}
    return method.merge([d.double() for d in deltas], **needs, **method.resolve_options({})).value


class MergeConformance(abc.ABC):
    """A reading and a sink against the formula.

    Attributes:
        write, strategy: of the item that is merged; its `name`.
        fields: of the recipe.
    """

    write: ClassVar[WriteKind] = "sum"
    strategy: ClassVar[Strategy | None]
    name: ClassVar[str] = UP
    fields: ClassVar[Mapping[str, Any]] = {}

    def samples(self, folder: Path) -> Samples:
        return Samples.checkpoints(folder)

    @abc.abstractmethod
    def expected(self, base: Mapping[str, Tensor], experts: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """The output of the item in float64."""

    def found(self, written: Mapping[str, Tensor]) -> Tensor:
        """The output of the item, from what was written."""
        return written[self.name]

    def run(self, samples: Samples, **fields: Any) -> tuple[Item, Record, dict[str, Tensor]]:
        out = samples.folder / f"out{len(list(samples.folder.glob('out*')))}"
        recipe = {**samples.recipe(), **self.fields, **fields}
        spec, units, results = run_here([recipe], [out])
        (plan,) = spec.plans
        item = plan.by_name[self.name]
        unit = next(u for u in units if any(plan.items[n] is item for _, n in u.members))
        readings = [None if r is None else r.strategy for r in (unit.reading, item.reading)]
        assert (item.write.kind, readings) == (self.write, [self.strategy, self.strategy])
        record = next(r for result in results for _, r in result.records if r.name == self.name)
        return item, record, {n: t for file in out.iterdir() for n, t in load_file(file).items()}

    def formula(self, samples: Samples) -> Tensor:
        base = {} if samples.base is None else load_file(samples.base / "model.safetensors")
        experts = [t for e in samples.experts for f in e.glob("*.safetensors") for t in [load_file(f)]]
        return self.expected(base, experts)

    def test_the_formula_in_float64(self, tmp_path: Path) -> None:
        samples = self.samples(tmp_path)
        _, _, written = self.run(samples, **EXACT)
        found, expected = self.found(written).double(), self.formula(samples)
        assert float((found - expected).norm()) <= 1e-12 * float(expected.norm())

    def test_rounded_once(self, tmp_path: Path) -> None:
        samples = self.samples(tmp_path)
        _, _, exact = self.run(samples, **EXACT)
        _, _, rounded = self.run(samples, compute_dtype="float64", dtype="bfloat16")
        for name, tensor in rounded.items():
            assert torch.equal(tensor, exact[name].to(torch.bfloat16)), name

    def test_hashes_are_those_of_the_bytes(self, tmp_path: Path) -> None:
        item, record, written = self.run(self.samples(tmp_path))
        assert record.hashes == {s.name: digest(written[s.name]) for s in item.outputs}
        assert record.hash

    def test_values_beyond_the_range_stop_the_merge(self, tmp_path: Path) -> None:
        with pytest.raises(NumericalError, match="range"):
            self.run(self.samples(tmp_path), scale=1e30, dtype="float16")

    def test_unchanged_bits_stay(self, tmp_path: Path) -> None:
        samples = self.samples(tmp_path)
        if samples.base is None:
            pytest.skip("no base")
        base = load_file(samples.base / "model.safetensors")
        base[self.name].flatten()[:2] = torch.tensor([-0.0, 1e-40])
        for folder in (samples.base, *samples.experts):
            if (folder / "model.safetensors").exists():
                save_file(base, folder / "model.safetensors", {"format": "pt"})
            else:
                pytest.skip("an adapter changes what it is made for")
        self.assert_unchanged(self.run(samples), base[self.name])

    def assert_unchanged(self, found: tuple[Item, Record, dict[str, Tensor]], base: Tensor) -> None:
        _, record, written = found
        assert record.unchanged
        assert torch.equal(written[self.name].view(torch.int32), base.view(torch.int32))


class TestCopy(MergeConformance):
    strategy = None
    fields: ClassVar[Mapping[str, Any]] = {"method": "average", "keep": [UP]}

    def expected(self, base: Mapping[str, Tensor], experts: Sequence[Mapping[str, Tensor]]) -> Tensor:
        return base[UP].double()

    def test_values_beyond_the_range_stop_the_merge(self, tmp_path: Path) -> None:
        samples = self.samples(tmp_path)
        large = {n: t * 1e6 for n, t in load_file(samples.base / "model.safetensors").items()}
        save_file(large, samples.base / "model.safetensors", {"format": "pt"})
        with pytest.raises(NumericalError, match="range"):
            self.run(samples, dtype="float16", scale=1e-6)


class TestDense(MergeConformance):
    strategy = "each"
    fields: ClassVar[Mapping[str, Any]] = {"method": "actmat", "scale": SCALE}

    def expected(self, base: Mapping[str, Tensor], experts: Sequence[Mapping[str, Tensor]]) -> Tensor:
        deltas = [e[UP].double() - base[UP].double() for e in experts]
        return base[UP].double() + SCALE * of_method(self.fields["method"], base[UP], deltas)


class TestDenseByChunks(TestDense):
    strategy = "held"
    fields: ClassVar[Mapping[str, Any]] = {"method": "ties", "scale": SCALE, "scope": "all"}


class TestCombine(MergeConformance):
    strategy = "combine"
    fields: ClassVar[Mapping[str, Any]] = {"method": "model_stock", "scale": SCALE}

    def expected(self, base: Mapping[str, Tensor], experts: Sequence[Mapping[str, Tensor]]) -> Tensor:
        deltas = [e[UP].double() - base[UP].double() for e in experts]
        return base[UP].double() + SCALE * of_method("model_stock", base[UP], deltas)


class Adapters(MergeConformance):
    """Two adapters of rank 2, `alpha / r = 2`."""

    def samples(self, folder: Path) -> Samples:
        return Samples.adapters(folder)

    def delta(self, expert: Mapping[str, Tensor]) -> Tensor:
        stem = f"base_model.model.{UP.removesuffix('.weight')}.lora_"
        return 2 * expert[f"{stem}B.weight"].double() @ expert[f"{stem}A.weight"].double()


class TestFactored(Adapters):
    strategy = "factors"
    fields: ClassVar[Mapping[str, Any]] = {"method": "actmat", "scale": SCALE, "output": "model"}

    def expected(self, base: Mapping[str, Tensor], experts: Sequence[Mapping[str, Tensor]]) -> Tensor:
        return base[UP].double() + SCALE * of_method("actmat", base[UP], [self.delta(e) for e in experts])


class TestFactoredModule(Adapters):
    write = "factors"
    strategy = "factors"
    name = UP.removesuffix(".weight")
    fields: ClassVar[Mapping[str, Any]] = {"method": "actmat", "scale": SCALE, "output": "adapter", "base": ""}

    def samples(self, folder: Path) -> Samples:
        made = Samples.adapters(folder)
        return Samples(made.folder, None, made.experts)

    def found(self, written: Mapping[str, Tensor]) -> Tensor:
        stem = f"base_model.model.{self.name}.lora_"
        return written[f"{stem}B.weight"].double() @ written[f"{stem}A.weight"].double()

    def expected(self, base: Mapping[str, Tensor], experts: Sequence[Mapping[str, Tensor]]) -> Tensor:
        deltas = [self.delta(e) for e in experts]
        return SCALE * of_method("actmat", torch.zeros_like(deltas[0]), deltas)


class TestExtracted(MergeConformance):
    write = "svd"
    strategy = "each"
    fields: ClassVar[Mapping[str, Any]] = {
        "method": "average",
        "scale": SCALE,
        "output": {"kind": "extracted", "rank": 3, "others": "leave"},
    }

    def found(self, written: Mapping[str, Tensor]) -> Tensor:
        stem = f"base_model.model.{UP.removesuffix('.weight')}.lora_"
        return written[f"{stem}B.weight"].double() @ written[f"{stem}A.weight"].double()

    def expected(self, base: Mapping[str, Tensor], experts: Sequence[Mapping[str, Tensor]]) -> Tensor:
        deltas = [e[UP].double() - base[UP].double() for e in experts]
        u_OK, s_K, v_KI = torch.linalg.svd(SCALE * of_method("average", base[UP], deltas), full_matrices=False)
        return (u_OK[:, :3] * s_K[:3]) @ v_KI[:3]

    def assert_unchanged(self, found: tuple[Item, Record, dict[str, Tensor]], base: Tensor) -> None:
        _, record, _ = found
        assert record.unchanged
        assert (record.hashes, record.stats["norm"]) == ({}, 0.0)

    def test_unchanged_bits_stay(self, tmp_path: Path) -> None:
        samples = self.samples(tmp_path)
        base = load_file(samples.base / "model.safetensors")
        for folder in samples.experts:
            tensors = load_file(folder / "model.safetensors")
            save_file({**tensors, UP: base[UP]}, folder / "model.safetensors", {"format": "pt"})
        spec, units, results = run_here([{**samples.recipe(), **self.fields}], [tmp_path / "unfinished"], finish=False)
        item = spec.plans[0].by_name[UP]
        assert len(units) == len(results)
        record = next(r for result in results for _, r in result.records if r.name == UP)
        self.assert_unchanged((item, record, {}), base[UP])


def test_deltas_of_a_region_go_before_garbage_is_collected(models: Path, tmp_path: Path) -> None:
    """They hold the factors of all experts."""

    class Alive(Progress):
        most = 0

        def done(self, parts: int) -> None:
            self.most = max(self.most, sum(isinstance(o, RegionDeltas) for o in gc.get_objects()))

    watch, adapters = Alive(), [models / "adapters" / name for name in ("math", "code")]
    gc.collect()
    gc.disable()
    try:
        actmat.merge(None, adapters, method="actmat", out=tmp_path / "out", threads=1, durable=False, progress=watch)
    finally:
        gc.enable()
    assert watch.most <= 1
