"""The adapter benchmark writes adapters that load, and its comparisons compare the same thing."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.adapters import per_layer, real, write_adapters

from actmat.checkpoints.adapter_open import open_adapter


def test_made_adapters_are_sound_and_kept(tmp_path: Path) -> None:
    places = write_adapters(tmp_path / "group", 2, 2, 16, 24, 1)
    before = (places[0] / "adapter_model.safetensors").stat().st_mtime_ns
    assert write_adapters(tmp_path / "group", 2, 2, 16, 24, 1) == places
    assert (places[0] / "adapter_model.safetensors").stat().st_mtime_ns == before
    with open_adapter(places[1]) as adapter:
        assert not adapter.problems
        assert {m.scaling for m in adapter.modules.values()} == {2.0}
        assert len(adapter.modules) == 7


def test_the_table_over_folders_has_every_group_and_rule(tmp_path: Path) -> None:
    write_adapters(tmp_path / "group", 2, 2, 16, 24, 1)
    rows = {r["method"]: r for r in real(tmp_path)}
    assert rows["average"]["norm/sum"] == pytest.approx(0.5)
    assert rows["actmat"]["rank"] == 4
    assert rows["actmat"]["adapters"] == 2


def test_layers_are_timed_by_shape() -> None:
    rows = per_layer(2, 2, 16, 24)
    assert [r["shape"] for r in rows] == ["16x16", "16x24", "24x16"]
    assert all(r["ratio"] > 0 for r in rows)
