"""Norms of a merge from a sample: exact where all is sampled, near where not, the same however the entries arrive."""

import json
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.helpers.merging import actmat as run

import actmat
from actmat.checkpoints.resolve import open_tensors
from actmat.diagnostics.totals import Norms
from actmat.diagnostics.warnings import size_finding, truncation_finding
from actmat.engine.record import Record
from actmat.engine.size import RUN, RUNS, InputSample, Sample, sample_runs
from actmat.experts.deltas import DeltaSource

LARGE = RUNS * RUN * 3 + 17


@pytest.mark.parametrize("numel", [0, 1, RUNS * RUN, RUNS * RUN + 1, LARGE])
def test_runs_are_in_order_inside_and_apart(numel: int) -> None:
    runs = sample_runs(numel)
    assert sum(b - a for a, b in runs) == min(numel, RUNS * RUN)
    assert all(0 <= a < b <= numel for a, b in runs)
    assert all(b <= a for (_, b), (a, _) in pairwise(runs))
    assert not runs or (runs[0][0], runs[-1][1]) == (0, numel)


@pytest.mark.parametrize("chunk", [1000, RUN, 50_000, LARGE])
def test_the_sample_is_the_same_for_any_chunks(chunk: int) -> None:
    values = torch.randn(LARGE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    sample = Sample(LARGE)
    for start in range(0, LARGE, chunk):
        sample.add(start, values[start : start + chunk])
    expected = torch.cat([values[a:b] for a, b in sample_runs(LARGE)]).double()
    assert torch.equal(sample.entries, expected)
    assert sample.wanted_from == math.inf


class Formed:
    """An expert whose delta is formed, as that of an adapter is."""

    def __init__(self, delta: torch.Tensor) -> None:
        self._delta = delta

    def dense(self, _: str, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
        return self._delta[low:high].to(dtype)


def memory_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytearray(tensor.contiguous().view(torch.uint8).numpy().tobytes()))


@pytest.mark.parametrize("numel", [10, LARGE])
@pytest.mark.parametrize("chunk", [3001, LARGE])
@pytest.mark.parametrize("order", [(0, 2, 3), (3, 2, 0)])
@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("base_last", [False, True])
def test_sums_have_the_bits_of_a_loop_over_the_experts(
    numel: int, chunk: int, order: tuple[int, ...], by_expert: bool, base_last: bool
) -> None:
    """Experts 0, 2 and 3 are stored, 1 is formed; a method may ask for them in any order, whole or chunk by chunk."""
    draw = torch.Generator().manual_seed(1)
    base, *experts = (torch.randn(numel, generator=draw).to(torch.bfloat16) for _ in range(5))
    experts[3][0] = math.inf
    deltas = [x.double() - base.double() for x in experts]
    deltas[1] = experts[1].double()
    deltas[3][0] = 0.0
    item = SimpleNamespace(numel=numel, base_dtype="bfloat16")
    sources = [DeltaSource(str(t), "formed" if t == 1 else "stored", "bfloat16", 0, 1) for t in range(4)]
    sample = InputSample(item, sources, [Formed(x) for x in experts])
    starts = range(0, numel, chunk)
    steps = [(t, start) for t in order for start in starts] if by_expert else [(t, s) for s in starts for t in order]
    bases = [(-1, start) for start in starts]
    for t, start in [*steps, *bases] if base_last else [*bases, *steps]:
        stored = experts[t] if t >= 0 else base
        sample.take(t + 1, 2 * start, memory_of(stored[start : start + chunk]))
    for _variant in range(2):  # that share the sample: each finishes it
        sample.finish()
    expected = [torch.cat([d[a:b] for a, b in sample_runs(numel)]) for d in deltas]
    total = torch.zeros_like(expected[0])
    for delta in expected:
        total = total + delta
    assert torch.equal(sample.total, total)
    assert sample.squares == pytest.approx([float(d @ d) for d in expected])


def norms_by_hand(models: Path, out: Path) -> tuple[float, float, list[float]]:
    """From all entries: of the merged delta, of the sum, of each expert's."""
    manifest = json.loads((out / "actmat_manifest.json").read_text())
    merged = [r["name"] for r in manifest["tensors"] if r["action"] == "merge"]
    places = [models / "base", out, *(models / "experts" / n for n in ("math", "code"))]
    base, made, *experts = ({n: open_tensors(str(p)).read(n).double() for n in merged} for p in places)

    def norm(rows: list[torch.Tensor]) -> float:
        return math.sqrt(sum(float((r * r).sum()) for r in rows))

    deltas = [[e[n] - base[n] for n in merged] for e in experts]
    total = [sum(d) for d in zip(*deltas, strict=True)]
    return norm([made[n] - base[n] for n in merged]), norm(total), [norm(d) for d in deltas]


def test_totals_are_the_norms_of_what_is_on_disk(models: Path, tmp_path: Path) -> None:
    experts = [models / "experts" / n for n in ("math", "code")]
    for method, options in (("ties", {}), ("slerp", {}), ("task_arithmetic", {"scaling": 1.0})):
        out = tmp_path / method
        report = actmat.merge(
            models / "base", experts, method=method, options=options, out=out, dtype="float32", scale=0.5
        )
        merged, total, each = norms_by_hand(models, out)
        norms = report.totals.norms
        assert norms.merged == pytest.approx(merged, rel=1e-4)
        assert norms.total == pytest.approx(total, rel=1e-5)
        assert list(norms.experts) == pytest.approx(each, rel=1e-5)
    assert norms.merged == pytest.approx(0.5 * norms.total, rel=1e-5)


def test_adapters_merged_into_a_model_have_sizes_too(models: Path, tmp_path: Path) -> None:
    adapters = [models / "adapters" / n for n in ("math", "code")]
    model = actmat.merge(models / "base", adapters, method="average", out=tmp_path / "model", dtype="float32")
    adapter = actmat.merge(None, adapters, method="average", out=tmp_path / "adapter")
    assert model.totals.norms.merged == pytest.approx(adapter.totals.norms.merged, rel=1e-5)
    assert model.totals.norms.experts == pytest.approx(adapter.totals.norms.experts, rel=1e-5)


def test_records_keep_their_size_in_the_journal() -> None:
    size = {"norm": 1.0, "sum_norm": 2.0, "expert_norms": [1.0, 1.5], "base_norm": 3.0, "sampled": 10}
    record = Record("a", "00", {"a": "00"}, size=size)
    assert Record.from_json(record.to_json()) == record
    assert Record.from_json(record.to_json() | {"size": {**size, "expert_norms": "x"}}) is None


def norms(merged: float, experts: list[float]) -> Norms:
    return Norms(merged, 1.0, tuple(experts))


def test_what_is_far_off_has_a_code() -> None:
    assert size_finding(norms(1.0, [1.0, 1.0])) is None
    assert (size_finding(norms(3.1, [1.0, 1.0])) or "")[0] == "AM402"
    assert size_finding(norms(3.1, [1.0, 1.0]), by_inputs=True) is None, "also good merges by inputs are this large"
    assert (size_finding(norms(10.1, [1.0, 1.0]), by_inputs=True) or "")[0] == "AM403"
    assert (size_finding(norms(0.066, [1.0, 1.0, 1.0])) or "")[0] == "AM403"
    assert size_finding(norms(1 / 7**0.5, [1.0] * 7)) is None, "the average of seven that share nothing"
    assert truncation_finding(0.3) is None
    assert (truncation_finding(0.43) or "")[0] == "AM404"
    assert size_finding(norms(0.0, [0.0, 0.0])) is None


def test_the_command_line_says_the_size_and_warns_once(models: Path, tmp_path: Path) -> None:
    def said(*more: str) -> str:
        places = ["-b", "base", "-e", "experts/math", "-e", "experts/code"]
        inputs = [w if w.startswith("-") else str(models / w) for w in places]
        return run(["merge", "-m", "actmat", *inputs, "--out", tmp_path / "out", "--overwrite", *more]).out

    plain = said()
    assert "norm of" not in plain, "norms do not say whether a merge is good"
    assert "warning AM402" in plain
    assert "warning" not in said("--scale", "0.1")
    assert "warning" not in said("--set", "mute=AM402")
    diagnosed = said("--diagnose")
    assert "warning" not in diagnosed  # the check says it
    assert "AM402" in diagnosed
    assert said("--quiet") == ""
