"""Findings of a diagnosis, from its measures and from what the records of its merge tell."""

import re
from typing import Any

import pytest
from tests.helpers.diagnoses import a_measure, some_facts
from tests.helpers.repository import ROOT

from actmat.diagnostics.checks import CHECKS, check_codes, run_checks
from actmat.errors import RecipeError


def measured(n: int = 2, **fields: object) -> dict[str, Any]:
    """Facts whose matrices all differ from the unremarkable one in these fields."""
    return some_facts(n, measures=[a_measure(m.name, n, **fields) for m in some_facts(n)["measures"]])


def test_deltas_below_the_rounding_of_their_storage_are_found() -> None:
    (finding,) = run_checks(**measured(snr=(30.0, 0.4)))
    assert finding.code == "AM101"
    assert re.search(r"'code' in 2 of 2 .*0\.4 half ulps", finding.message), finding.message
    assert run_checks(**measured(snr=None)) == run_checks(**some_facts()) == ()


def test_what_records_tell_is_found() -> None:
    codes = [check.code for check in CHECKS[1:]]
    findings = run_checks(**some_facts(of_records=dict.fromkeys(reversed(codes), "the merge is")))
    assert [(f.code, f.message, f.count) for f in findings] == [(code, "The merge is", 0) for code in codes]


def test_what_fires_names_its_tensors_at_most_twenty() -> None:
    many = some_facts(measures=[a_measure(f"m{i}", snr=(0.1, 9.0)) for i in range(30)])
    (found,) = run_checks(**many)
    assert (found.code, len(found.tensors), found.count) == ("AM101", 20, 30)


def test_findings_are_muted_by_the_recipe() -> None:
    facts = measured(snr=(0.1, 0.1)) | {"of_records": {"AM403": "the merged delta exploded"}}
    assert {f.code: f.muted for f in run_checks(**facts, mute=["AM402", "AM403"])} == {"AM101": False, "AM403": True}


def test_unknown_codes_are_all_named() -> None:
    check_codes(["AM101", "AM404"])
    with pytest.raises(RecipeError, match=r"there is no check 'AM109'\. Did you mean 'AM") as caught:
        check_codes(["AM109", "AM101", "AM777"])
    assert len(caught.value.problems) == 2


def test_codes_are_in_order_and_documented() -> None:
    codes = [c.code for c in CHECKS]
    assert codes == sorted(set(codes))
    page = (ROOT / "docs" / "checks.md").read_text()
    for check in CHECKS:
        assert f"### {check.code}\n" in page, f"docs/checks.md lacks a section for {check.code}"
        section = page.split(f"### {check.code}\n")[1].split("### ")[0]
        assert check.title in section
        assert f"*{check.severity}*" in section
