"""The adapter benchmark writes adapters that load, and its comparisons compare the same thing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.adapters import SIDES, difference, named_pairs, per_layer, real, side, write_adapters

from actmat.experts.resolve import open_adapter
from actmat.methods import all_methods


def test_made_adapters_are_sound_and_kept(tmp_path: Path) -> None:
    places = write_adapters(tmp_path / "group", 2, 2, 16, 24, 1)
    before = (places[0] / "adapter_model.safetensors").stat().st_mtime_ns
    assert write_adapters(tmp_path / "group", 2, 2, 16, 24, 1) == places
    assert (places[0] / "adapter_model.safetensors").stat().st_mtime_ns == before
    with open_adapter(places[1]) as adapter:
        assert not adapter.problems
        assert {m.scaling for m in adapter.modules.values()} == {2.0}
        assert len(adapter.modules) == 7


def test_the_table_over_folders_has_every_group_and_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_adapters(tmp_path / "group", 2, 2, 16, 24, 1)
    (tmp_path / "lists" / "a").mkdir(parents=True)
    for place in ("lists/a/one.pt", "lists/two.pt"):
        torch.save([torch.randn(12, 2), torch.randn(2, 9), torch.randn(8, 2), torch.randn(2, 8)], tmp_path / place)
    found = real(tmp_path, ["ties"])
    low_rank = {m.name for m in all_methods() if m.lowrank is not None and not m.needs_statistics}
    for group in ("group", "lists"):
        rows = {r["method"]: r for r in found if r["group"] == group}
        assert set(rows) == low_rank | {"ties"}
        assert rows["average"]["norm/sum"] == pytest.approx(0.5)
        assert rows["actmat"]["rank"] == 4
        assert rows["actmat"]["adapters"] == 2
        assert rows["actmat"]["cut off"] < 1e-12 < rows["ties"]["cut off"]
        assert {m: r["form"] for m, r in rows.items()} == {**dict.fromkeys(low_rank, "low rank"), "ties": "dense"}
    assert "2 lists of pairs, converted" in capsys.readouterr().out


def test_a_converted_list_has_the_deltas_of_the_list(tmp_path: Path) -> None:
    pairs = [torch.randn(6, 2), torch.randn(2, 5), torch.randn(4, 2), torch.randn(2, 4)]
    torch.save(pairs, tmp_path / "a.pt")
    with open_adapter(named_pairs(tmp_path / "a.pt", tmp_path / "a")) as adapter:
        assert not adapter.problems
        for n, module in enumerate(adapter.modules.values()):
            assert module.name == f"pairs.{n:04d}"
            assert torch.equal(adapter.factors(module, torch.float32).dense(), pairs[2 * n] @ pairs[2 * n + 1])
    torch.save({"w": pairs[0]}, tmp_path / "b.pt")
    with pytest.raises(SystemExit, match="expected a list"):
        named_pairs(tmp_path / "b.pt", tmp_path / "b")


def test_both_sides_add_up_the_same_adapters(tmp_path: Path) -> None:
    adapters = write_adapters(tmp_path / "group", 2, 2, 16, 24, 1)
    for name in SIDES:
        (tmp_path / name).mkdir()
        side(name, adapters, tmp_path / name, (16, 24, 1))
        assert json.loads((tmp_path / name / "seconds.json").read_text()) > 0
        assert difference(tmp_path / "actmat" / "merged", tmp_path / name / "merged") < 1e-5
    assert difference(adapters[0], tmp_path / "actmat" / "merged") > 0.1


def test_layers_are_timed_by_shape() -> None:
    rows = per_layer(2, 2, 16, 24)
    assert [r["shape"] for r in rows] == ["16x16", "16x24", "24x16"]
    assert all(r["ratio"] > 0 for r in rows)
