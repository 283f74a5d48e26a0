"""Every check: one constructed case that fires, and others in which it finds nothing."""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from tests.helpers.diagnoses import a_measure, some_facts
from tests.helpers.repository import ROOT

from actmat.diagnostics.checks import CHECKS, Facts, check_codes, run_checks
from actmat.errors import RecipeError


def measured(n: int = 2, **fields: object) -> Facts:
    """Facts whose matrices all differ from the unremarkable one in these fields."""
    return some_facts(n, measures=[a_measure(m.name, n, **fields) for m in some_facts(n).measures])


@dataclass(frozen=True)
class Case:
    """One check, a situation in which it fires, and others in which it does not, besides the unremarkable one."""

    code: str
    fires: Callable[[], Facts]
    says: str
    silent: tuple[Callable[[], Facts], ...] = ()


CASES = (
    Case(
        "AM101",
        lambda: measured(snr=(30.0, 0.4)),
        r"'code' in 2 of 2 .*0\.4 half ulps",
        (lambda: measured(snr=None),),
    ),
    Case(
        "AM203",
        lambda: measured(relative_norms=(0.02, 1.4)),
        r"'code' by 1\.4",
        (lambda: measured(relative_norms=None),),
    ),
)
CASES += tuple(
    Case(code, lambda code=code: some_facts(of_records={code: "'code' is"}), "'code' is")
    for code in ("AM201", "AM202", "AM205", "AM301", "AM402", "AM403", "AM404")
)
BY_CODE = {c.code: c for c in CHECKS}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.code)
def test_it_fires(case: Case) -> None:
    finding = BY_CODE[case.code].finding(case.fires(), muted=False)
    assert re.search(case.says, finding.message), finding.message


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.code)
def test_it_stays_silent(case: Case) -> None:
    assert [f for facts in case.silent if (f := BY_CODE[case.code].finding(facts(), muted=False))] == []


def test_every_check_has_a_case_and_nothing_is_wrong_with_unremarkable_experts() -> None:
    assert {c.code for c in CASES} == set(BY_CODE)
    assert run_checks(some_facts()) == ()


def test_what_fires_names_its_tensors_at_most_twenty() -> None:
    many = some_facts(measures=[a_measure(f"m{i}", snr=(0.1, 9.0)) for i in range(30)])
    (found,) = run_checks(many)
    assert (found.code, len(found.tensors), found.count) == ("AM101", 20, 30)


def test_findings_are_muted_by_the_recipe() -> None:
    facts = dataclasses.replace(measured(snr=(0.1, 0.1)), of_records={"AM403": "the merged delta exploded"})
    assert {f.code: f.muted for f in run_checks(facts, mute=["AM402", "AM403"])} == {"AM101": False, "AM403": True}


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
