"""The benchmark of quantised layouts: what it writes is read by the codecs, and its table is on the page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks import quantised as benchmark

from actmat.checkpoints.resolve import open_checkpoint


@pytest.mark.parametrize("layout", benchmark.LAYOUTS)
def test_its_inputs_are_codes_of_the_layout(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "HIDDEN", 128)
    monkeypatch.setattr(benchmark, "INNER", 256)
    total = benchmark.write_inputs(tmp_path, benchmark.LAYOUTS[layout], 1)
    names = {name for name, _, _ in benchmark.shapes(1)}
    with open_checkpoint(tmp_path / "base") as base, open_checkpoint(tmp_path / "a") as expert:
        assert set(base.specs) == names == set(expert.specs)
        for name in names:
            assert bool(base.scheme(name)) == (layout != "bfloat16")
            found = base.read(name)
            assert found.dtype == torch.bfloat16
            assert torch.isfinite(found).all()
            assert 0.001 < float(found.float().std()) < 0.2
            assert not torch.equal(found, expert.read(name))
    plain = 2 * 3 * sum(rows * columns for _, rows, columns in benchmark.shapes(1))
    assert (total < 0.8 * plain) == (layout != "bfloat16")


def test_every_layout_that_is_written_is_measured_both_ways() -> None:
    assert set(benchmark.WRITTEN) <= set(benchmark.LAYOUTS)
