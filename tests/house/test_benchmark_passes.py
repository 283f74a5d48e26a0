"""The passes that the benchmark times are those of a merge, and its terminal sees the first line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks import passes as benchmark
from benchmarks.start import first_line

from actmat.checkpoints.raw import raw_bytes
from actmat.methods.average import merge


def test_the_timed_passes_write_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "CHUNK", 10)
    torch.manual_seed(0)
    tensors = [torch.randn(30).bfloat16() for _ in range(4)]
    files = [tmp_path / str(k) for k in range(4)]
    for path, tensor in zip(files, tensors, strict=True):
        path.write_bytes(bytes(raw_bytes(tensor)))
    passes = benchmark.Passes()
    benchmark.average(files, tmp_path / "out", 3, passes)
    base, *experts = (t.float() for t in tensors)
    wanted = (base + merge([e - base for e in experts]).value).bfloat16()
    assert (tmp_path / "out").read_bytes() == bytes(raw_bytes(wanted))
    assert passes.seconds.keys() > benchmark.FLOOR
    assert all(seconds >= 0 for seconds in passes.seconds.values())


def test_a_merge_on_a_terminal_says_its_first_word_before_torch_is_there() -> None:
    assert 0 < first_line(1) < 60
