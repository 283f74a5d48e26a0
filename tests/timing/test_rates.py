"""Rates: the file, what is wrong with one, times at a size; and the calibration that makes one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.json_layouts import pinned
from tests.helpers.merging import actmat
from tests.helpers.rates import rates_of

from actmat.api.calibrating import calibrate
from actmat.errors import RecipeError
from actmat.linalg.operations import Operation
from actmat.timing import measure
from actmat.timing.measure import Effort
from actmat.timing.rates import Rates, load_rates, rates_file, save_rates, seconds

TINY = Effort(sizes=(16, 48), spectral=(16, 32), file_bytes=1 << 22, least_s=0.001)


def test_rates_survive_their_file(tmp_path: Path) -> None:
    rates = rates_of(cores=4, devices=True)
    save_rates(rates, tmp_path / "new" / "rates.json")
    assert load_rates(tmp_path / "new" / "rates.json") == rates
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["rates.json"]
    assert all(str(line) for line in rates.lines())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(actmat_rates=0), "layout 1"),
        (lambda d: d.pop("cores"), "cores"),
        (lambda d: d.update(speed=1), "speed"),
        (lambda d: d["rates"].update(hash=0), "rates.hash: expected a positive rate, found 0"),
        (lambda d: d["rates"].update(start_s=-1), "rates.start_s: expected seconds"),
        (lambda d: d["rates"]["busy"].update(matrix=2), "rates.busy.matrix: expected a share"),
        (lambda d: d["rates"]["busy"].pop("entry"), "rates.busy.entry"),
        (lambda d: d["rates"]["compute"].pop("eigh float64"), "'eigh float64' is missing"),
        (lambda d: d["rates"]["compute"].update({"svd float32": [[9, 1.0], [4, 1.0]]}), "ascending sizes"),
        (lambda d: d["rates"]["compute"].update({"svd float32": [[9, -1.0]]}), "positive rates"),
        (lambda d: d["devices"]["cuda"].update(transfer=float("inf")), "devices.cuda.transfer"),
        (lambda d: d["devices"]["cuda"]["compute"].pop("product float32"), "devices.cuda.compute"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(edit: Any, message: str, tmp_path: Path) -> None:
    data = rates_of(cores=4, devices=True).to_json()
    edit(data)
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(data))
    with pytest.raises(RecipeError, match=message.replace("(", r"\(")) as error:
        load_rates(path)
    assert str(path) in str(error.value)


def test_all_problems_are_listed_at_once() -> None:
    data = rates_of().to_json()
    data["rates"] |= {"hash": 0, "entry": -1.0}
    with pytest.raises(RecipeError) as error:
        Rates.from_json(data)
    assert len(error.value.problems) == 2


def test_a_machine_that_was_not_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert rates_file().parent == tmp_path / "actmat" / "rates"
    with pytest.raises(RecipeError, match="run 'actmat calibrate'"):
        load_rates()
    with pytest.raises(RecipeError, match="there is no file"):
        load_rates(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("fast")
    with pytest.raises(RecipeError, match="expected JSON"):
        load_rates(tmp_path / "text.json")


def test_rates_are_interpolated_over_sizes() -> None:
    host = dataclasses.replace(rates_of().rates, entry=10.0)
    table = {**host.compute, "product float32": ((10, 1e2), (1000, 1e4)), "product float64": ((10, 5.0),)}
    host = dataclasses.replace(host, compute=table)
    for size, rate in ((1, 1e2), (10, 1e2), (100, 1e3), (1000, 1e4), (5000, 1e4)):
        assert seconds(Operation("product", 1000, size), host, "float32") == pytest.approx(1000 / rate)
    assert seconds(Operation("product", 10, 10, double=True), host, "float32") == 2.0
    assert seconds(Operation("product", 10, 10), host, "float64") == 2.0
    assert seconds(Operation("entry", 30), host, "float32") == 3.0


@pytest.mark.slow
def test_calibration_measures_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command with tiny matrices: a usable file, which a simulation reads again."""
    monkeypatch.setattr(measure, "QUICK", TINY)
    monkeypatch.setattr("actmat.api.calibrating.SMALL", (2, 12))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    outcome = actmat(["calibrate", "--quick", "--folder", str(tmp_path)])
    assert outcome.code == 0, outcome.err
    assert "written to" in outcome.out
    assert "measuring svd in float64" in outcome.err
    monkeypatch.setattr("actmat.api.calibrating.calibrate", lambda *effort, **more: load_rates())
    told = pinned(json.loads(actmat(["calibrate", "--json", "--folder", str(tmp_path)]).out), "calibrate")
    assert told["rates"] == load_rates().to_json()
    rates = load_rates()
    assert {key for key, table in rates.rates.compute.items() if len(table) == 2} == set(rates.rates.compute)
    assert 0 < rates.rates.start_s < 120
    assert {"actmat", "torch", "python"} == set(rates.versions)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    notes: list[str] = []
    with pytest.raises(OSError, match="none"):
        calibrate(TINY, folder=tmp_path / "none", note=notes.append)
    assert notes[-1] == "storage"
