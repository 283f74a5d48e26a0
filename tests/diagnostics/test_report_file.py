"""report.json: what is written is read back, and nothing else is read."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.diagnoses import a_diagnosis, a_measure

from actmat.diagnostics.model import (
    AgreementRow,
    DataResidual,
    Diagnosis,
    RivalAnswers,
    read_diagnosis,
    write_diagnosis,
)
from actmat.errors import CheckpointError, MergeError


def test_it_comes_back_from_data_from_text_and_from_disk(tmp_path: Path) -> None:
    diagnosis = a_diagnosis()
    assert Diagnosis.from_json(diagnosis.to_json()) == diagnosis
    assert Diagnosis.from_json(json.dumps(diagnosis.to_json())) == diagnosis
    assert write_diagnosis(diagnosis, tmp_path) == tmp_path / "report.json"
    assert read_diagnosis(tmp_path) == read_diagnosis(tmp_path / "report.json") == diagnosis
    write_diagnosis(diagnosis, tmp_path / "new" / "mine.json")
    assert read_diagnosis(tmp_path / "new" / "mine.json") == diagnosis
    assert sorted(p.name for p in tmp_path.rglob("*.json")) == ["mine.json", "report.json"]
    assert not list(tmp_path.rglob("*.part"))


AGREEMENT = {
    "expert": "math", "data": "d.jsonl", "inputs": 8, "kept": 6, "disagreement": 0.25, "divergence": 0.125,
    "predictions": 64,
}  # fmt: skip
ON_DATA = {"expert": "code", "statistics": "stats/code", "residual": 0.5, "matrices": 14}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The plain data with one place changed: "measures.0.norms"."""
    data: Any = json.loads(json.dumps(a_diagnosis().to_json()))
    *parents, last = path.split(".")
    place = data
    for key in parents:
        place = place[int(key)] if key.isdigit() else place[key]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return dict(data)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("format", 2, "format"),
        ("kind", "comparison", "kind"),
        ("extra", 1, "extra"),
        ("method", KeyError, "method"),
        ("measures.0.norms", [1.0], "norms of 'model.layers.0.q_proj.weight' has 1 entries for 2 experts"),
        ("measures.0.norms", [1.0, "2"], r"measures.0.norms.1"),
        ("measures.0.cosine", [[1.0, 0.0]], "cosine of .* is not 2 x 2"),
        ("measures.0.merged_norm", None, "measures.0.merged_norm"),
        ("measures.0.shape", [1, 2, 3], "measures.0.shape"),
        ("experts.0.kind", "lora", "experts.0.kind"),
        ("experts.0.residual", None, "experts.0.residual"),
        ("actions.merge", "1", "actions.merge"),
        ("agreement", [{"expert": "math"}], "agreement.0.data"),
        ("agreement", [AGREEMENT | {"expert": "law"}], "agreement does not name experts"),
        ("agreement", [AGREEMENT, AGREEMENT], "each once"),
        ("residual_on_data", [ON_DATA | {"expert": "law"}], "residual_on_data does not name experts"),
        ("residual_on_data", [ON_DATA | {"matrices": None}], "residual_on_data.0.matrices"),
    ],
)
def test_anything_else_is_refused_with_its_place(path: str, value: Any, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        Diagnosis.from_json(changed(path, value), where="report.json")


def test_agreement_is_optional_and_comes_back() -> None:
    data = changed("agreement", [AGREEMENT]) | {"residual_on_data": [ON_DATA]}
    found = Diagnosis.from_json(data)
    assert found.residual_on_data == (DataResidual(**ON_DATA),)
    assert found.agreement == (AgreementRow(**AGREEMENT),)
    average = RivalAnswers(5, 2, 1, accuracy=0.5)
    row = AgreementRow(**AGREEMENT, low=0.5, high=0.875, average=average, accuracy=0.75)
    data = found.to_json() | {"agreement": [dataclasses.asdict(row)]}
    assert Diagnosis.from_json(json.dumps(data)).agreement == (row,)
    assert Diagnosis.from_json(changed("agreement", KeyError)).agreement is None


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_are_finite(number: str, tmp_path: Path) -> None:
    text = json.dumps(a_diagnosis(measures=(a_measure(merged_norm=123.5),)).to_json())
    (tmp_path / "report.json").write_text(text.replace("123.5", number))
    with pytest.raises(CheckpointError, match="merged_norm"):
        read_diagnosis(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        write_diagnosis(a_diagnosis(measures=(a_measure(merged_norm=float(number)),)), tmp_path)


def test_all_problems_come_in_one_message() -> None:
    data = changed("measures.0.norms", [1.0]) | {"agreement": [AGREEMENT, AGREEMENT]}
    with pytest.raises(CheckpointError) as caught:
        Diagnosis.from_json(data)
    assert len(caught.value.problems) == 2


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_noise_is_an_error_of_the_tree(noise: bytes) -> None:
    with pytest.raises(MergeError):
        Diagnosis.from_json(noise)


def test_issues_are_what_was_found_and_is_no_tip() -> None:
    from tests.helpers.diagnoses import some_facts

    from actmat.diagnostics.checks import run_checks

    facts = some_facts(of_records={"AM402": "it is far", "AM403": "the merged delta exploded"})
    findings = run_checks(**facts, mute=["AM202"])
    assert [f.code for f in a_diagnosis(findings=findings).issues] == ["AM403"]
