"""Base and deltas as rows of one matrix: the entries, hashes and findings of deltas that are read one by one."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.one_tensor import VECTOR, OneTensor, digest
from torch import Tensor

import actmat
from actmat.engine import deltas as module
from actmat.engine.deltas import RowDeltas
from actmat.errors import CheckpointError, NumericalError
from actmat.linalg.inner import inner_products
from actmat.planning.regions import CHUNK, Region

NAN, INF = float("nan"), float("inf")
WHOLE = Region(0, 11, (11,), VECTOR)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRODUCT", 4)


def walked(stack: RowDeltas) -> list[Tensor]:
    """The rows of all places, put together."""
    places = [[row.clone() for row in stack.basis] for _ in stack.chunks()]
    return [torch.cat(row) for row in zip(*places, strict=True)]


@pytest.mark.parametrize("with_base", [True, False])
@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 3, (torch.float32,) * 3,
                                    (torch.bfloat16, torch.float32, torch.float16)])  # fmt: skip
def test_rows_and_hashes(dtypes: Sequence[torch.dtype], compute: torch.dtype, with_base: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    base, *experts = (torch.randn(11, generator=generator).to(dtype) for dtype in dtypes)
    setup = OneTensor(base, *experts, compute=compute)
    stack = RowDeltas(setup.reader, WHOLE, with_base=with_base)
    wanted = [expert.to(compute) - base.to(compute) for expert in experts]
    wanted = [base.to(compute), *wanted] if with_base else wanted
    assert list(stack.chunks()) == [0, 4, 8]
    for found in (walked(stack), walked(stack)):
        assert [torch.equal(row, whole) for row, whole in zip(found, wanted, strict=True)] == [True] * len(wanted)
    assert setup.reader.hashes() == (digest(base), tuple(map(digest, experts)))
    assert setup.findings.problems() == []
    torch.testing.assert_close(stack.inner_products(), inner_products(wanted))


def test_rows_lie_equally_far_apart_also_at_the_end() -> None:
    setup = OneTensor(torch.zeros(11), torch.ones(11), torch.ones(11))
    stack = RowDeltas(setup.reader, WHOLE, with_base=False)
    for _ in stack.chunks():
        assert stack.basis.rows_TS.stride() == (4, 1)
        assert [row.data_ptr() for row in stack.basis] == [row.data_ptr() for row in stack.basis.rows_TS]


def test_nobody_looks_before_somebody_asks_and_then_once() -> None:
    base, good, bad = torch.ones(11), torch.arange(11.0), torch.arange(11.0)
    base[2] = good[2] = bad[2] = -INF  # a mask
    bad[6], bad[9] = NAN, INF
    setup = OneTensor(base, good, bad)
    stack = RowDeltas(setup.reader, WHOLE, with_base=False)
    first, second = walked(stack)
    assert (int(first.isnan().sum()), int((~second.isfinite()).sum())) == (1, 3)
    assert setup.findings.problems() == []
    stack.clear()
    for _ in range(2):
        first, second = walked(stack)
        assert first.tolist() == torch.where(base.isfinite(), good - base, 0.0).tolist()
        assert second.tolist() == torch.where(bad.isfinite(), bad - base, 0.0).tolist()
    assert setup.findings.problems() == ["tensor 'w' of expert 'e1' has 2 values that are NaN or Inf"]
    assert setup.reader.hashes() == (digest(base), (digest(good), digest(bad)))


def test_an_expert_with_the_bits_of_the_base_is_exactly_zero() -> None:
    base = torch.tensor([NAN, 1.0, INF, -0.0] * 3)[:11]
    setup = OneTensor(base, base.clone(), torch.ones(11))
    same, other = walked(RowDeltas(setup.reader, WHOLE, with_base=False))
    assert same.tolist() == [0.0] * 11
    assert int(other.isfinite().sum()) == 5


class Files:
    """A base and three experts with one large tensor each, on disk."""

    def __init__(self, folder: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        size = CHUNK + 1000
        self.base = torch.randn(size, generator=generator)
        self.experts = [self.base + 0.01 * torch.randn(size, generator=generator) for _ in range(3)]
        self.folder = folder

    def merge(self, method: str, **settings: object) -> Tensor:
        for name, tensor in (("base", self.base), *((f"e{t}", expert) for t, expert in enumerate(self.experts))):
            (self.folder / name).mkdir(exist_ok=True)
            save_file({"model.weight": tensor}, self.folder / name / "model.safetensors")
        experts = [self.folder / f"e{t}" for t in range(3)]
        out = self.folder / "out"
        actmat.merge(
            self.folder / "base", experts, method=method, out=out, scope="all", durable=False, overwrite=True,
            **settings,
        )  # fmt: skip
        return load_file(out / "model.safetensors")["model.weight"]


@pytest.mark.parametrize("method", ["model_stock", "karcher"])
def test_a_merge_names_what_is_not_finite(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRODUCT", 1 << 18)
    files = Files(tmp_path)
    files.experts[1][7], files.experts[2][-1] = NAN, INF
    with pytest.raises(CheckpointError, match=r"(?s)expert 'e1' has 1 value.*expert 'e2' has 1 value"):
        files.merge(method)


@pytest.mark.parametrize("method", ["model_stock", "karcher"])
def test_what_nobody_changed_keeps_its_bits(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRODUCT", 1 << 18)
    files = Files(tmp_path)
    files.base[5], files.base[6] = -0.0, -INF
    files.experts = [files.base.clone() for _ in range(3)]
    assert files.merge(method).view(torch.int32).equal(files.base.view(torch.int32))


PLAIN_SUM = """
from dataclasses import replace
from actmat.methods.facets import Combination
from actmat.extras.research.model_stock import MODEL_STOCK

def combine(gram, **options):
    return Combination([1.0] * len(gram), {})

PLAIN_SUM = replace(MODEL_STOCK, name="plain_sum", combine=combine)
"""


def test_a_sum_beyond_the_range_of_the_dtype_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRODUCT", 1 << 18)
    files = Files(tmp_path)
    files.base[:] = 0
    files.experts = [torch.full_like(files.base, 2e38) for _ in range(3)]
    assert files.merge("model_stock").tolist()[:2] == [pytest.approx(2e38)] * 2, "large is not too large"
    (tmp_path / "rule.py").write_text(PLAIN_SUM)
    with pytest.raises(NumericalError, match="gave NaN or Inf for finite deltas"):
        files.merge(f"{tmp_path / 'rule.py'}:PLAIN_SUM")
