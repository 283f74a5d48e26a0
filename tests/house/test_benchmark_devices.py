"""The benchmark of devices: its rates, its choices of devices, its bytes; on simulated devices."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import devices as benchmark
from benchmarks.common import Run
from benchmarks.make_llama import Size, make_family
from tests.helpers.repository import ROOT

from actmat.engine.devices.device import SimulatedDevice

TINY = Size(hidden=16, intermediate=24, layers=1, heads=2, key_value_heads=1, vocabulary=20)


def test_rates_are_positive_and_complete() -> None:
    rates = benchmark.rates_of(SimulatedDevice("cpu:0", 1 << 26), matrix=16, block=1 << 16)
    assert set(rates) == set(benchmark.RATES)
    assert all(rates[key] > 0 for key in benchmark.RATES if key not in ("device", "name"))
    assert rates["name"] == "simulated"


def test_one_device_alone_and_all() -> None:
    assert benchmark.single_and_all("cpu:0,2,5") == ["cpu:0", "cpu:0,2,5"]
    assert benchmark.single_and_all("cpu:1") == ["cpu:1"]


def test_bytes_that_go_up_are_those_of_the_matrices(tmp_path: Path) -> None:
    base, experts = make_family(tmp_path, TINY, 2)
    matrices = sum(
        shape[0] * shape[1] for name, shape in TINY.tensors().items() if len(shape) == 2 and "embed" not in name
    )
    assert benchmark.moved_bytes(base, experts, "actmat", "cpu:0") == 3 * 2 * matrices
    assert benchmark.moved_bytes(base, experts, "average", "cpu:0") == 0


def test_other_bytes_than_the_hosts_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = benchmark.arguments(["--device", "cpu:0", "--repeats", "1"])
    wall = {"cpu": 4.0, "cpu:0": 2.0}
    monkeypatch.setattr(benchmark, "WORK", tmp_path)
    monkeypatch.setattr(benchmark, "family_of", lambda given: (tmp_path, []))
    monkeypatch.setattr(benchmark, "moved_bytes", lambda *of: 10**9)
    monkeypatch.setattr(benchmark, "largest_difference", lambda *of: 0.0)
    monkeypatch.setattr(benchmark, "merge", lambda base, experts, method, device, out: Run(wall[device], 1, 1))
    monkeypatch.setattr(benchmark, "weights_digest", lambda out: "same")
    host, row = benchmark.rows_of("actmat", ["cpu:0"], {"cpu:0": 2.0}, given)
    assert "share_of_links" not in host
    assert (row["speed_up"], row["up_gbps"], row["share_of_links"]) == (2.0, 0.5, 0.25)
    monkeypatch.setattr(benchmark, "weights_digest", str)
    with pytest.raises(SystemExit, match="other bytes than the host"):
        benchmark.rows_of("actmat", ["cpu:0"], {"cpu:0": 2.0}, given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_devices_it_says_how_to_try_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["devices"])
    with pytest.raises(SystemExit, match="--device cpu:0,1 runs on simulated ones"):
        benchmark.main()


@pytest.mark.parametrize("name", ["devices", "device_rates"])
def test_kept_results_say_that_they_are_simulated(name: str) -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    assert result["simulated"] == all(row["device"].startswith("cpu") for row in result["rows"])
