"""Every check: one constructed case that fires, one that stays clear, one to which it does not apply."""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from tests.helpers.diagnoses import a_measure, a_row, a_sample, some_facts, table
from tests.helpers.repository import ROOT

from actmat.diagnostics.checks import CHECKS, Facts, check_codes, run_checks
from actmat.errors import RecipeError


def measured(n: int = 2, **fields: object) -> Facts:
    """Facts whose matrices all differ from the unremarkable one in these fields."""
    return some_facts(n, measures=[a_measure(m.name, n, **fields) for m in some_facts(n).measures])


def sampled(**fields: object) -> Facts:
    return some_facts(samples={name: a_sample(**fields) for name in some_facts().samples})


def low_rank(**fields: object) -> Facts:
    return measured(numerical_rank=(4, 4), subspace_overlap=table(2, 1.0, 0.03), **fields)


def by_inputs(**fields: object) -> Facts:
    return dataclasses.replace(measured(**fields), by_inputs=True)


def truncated(error: float) -> Facts:
    return some_facts(tensors=[a_row(name, stats={"norm": 2.0, "error_norm": 2.0 * error}) for name in ("q", "v")])


def with_table(change: float) -> Facts:
    stats = {"norms": [0.1, change], "base_norm": 10.0, "merged_norm": 0.05}
    return some_facts(tensors=[a_row("embed", role="embedding", action="average", stats=stats)])


def with_twins(second: str) -> Facts:
    rows = [a_row("embed", role="embedding", action="average", method="average"), a_row("lm_head", method=second)]
    rows[1] = dataclasses.replace(rows[1], action="average" if second == "average" else "merge")
    return some_facts(tensors=rows, twins=[("embed", "lm_head")])


@dataclass(frozen=True)
class Case:
    """One check and three situations; `clear` defaults to the unremarkable one."""

    code: str
    fires: Callable[[], Facts]
    says: str
    not_applicable: Callable[[], Facts] | None
    clear: Callable[[], Facts] = some_facts


CASES = (
    Case("AM101", lambda: measured(snr=(30.0, 0.4)), r"'code' in 2 of 2 .*0\.4 half ulps", lambda: measured(snr=None)),
    Case(
        "AM104",
        lambda: sampled(group_levels=[60.0, 15.5]),
        "'code' in 2 of 2",
        lambda: sampled(base_group_levels=None),
    ),
    Case("AM104", lambda: sampled(levels=[255, 1200]), "'math' in 2 of 2", lambda: sampled(base_group_levels=None)),
    Case(
        "AM203",
        lambda: measured(relative_norms=(0.02, 1.4)),
        r"'code' by 1\.4",
        lambda: measured(relative_norms=None),
    ),
    Case("AM204", lambda: measured(cosine=table(2, 1.0, 0.9)), r"\(0\.90\)", lambda: measured(1)),
    Case(
        "AM401",
        lambda: low_rank(merged_norm=1.42),
        "In 2 of 2 matrices",
        some_facts,
        lambda: low_rank(merged_norm=0.72),
    ),
    Case("AM402", lambda: measured(merged_norm=3.5), r"3\.5 times the mean", lambda: measured(norms=(0.0, 0.0))),
    Case("AM402", lambda: measured(merged_norm=3.5), r"3\.5 times the mean", lambda: by_inputs(merged_norm=3.5)),
    Case("AM403", lambda: measured(merged_norm=0.01), "below 0.1 times", lambda: some_facts(measures=[])),
    Case("AM403", lambda: measured(merged_norm=11.0), "above 10 times", lambda: some_facts(measures=[])),
    Case("AM404", lambda: truncated(0.43), r"its relative error is 0\.43", some_facts, lambda: truncated(0.2)),
    Case("AM501", lambda: with_table(2.0), r"'code' changes embed by 0\.2", lambda: some_facts(tensors=[])),
    Case("AM502", lambda: with_twins("actmat"), "embed and lm_head", some_facts, lambda: with_twins("average")),
)
CASES += tuple(
    Case(code, lambda code=code: some_facts(identity={code: "'code' is"}), "'code' is", None)
    for code in ("AM201", "AM202", "AM205", "AM301")
)
BY_CODE = {c.code: c for c in CHECKS}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.code)
def test_it_fires(case: Case) -> None:
    outcome = BY_CODE[case.code].judge(case.fires())
    assert outcome.verdict == "found"
    assert re.search(case.says, outcome.message), outcome.message


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.code)
def test_it_stays_clear(case: Case) -> None:
    outcome = BY_CODE[case.code].judge(case.clear())
    assert outcome.verdict == "clear", outcome.message


@pytest.mark.parametrize("case", [c for c in CASES if c.not_applicable], ids=lambda c: c.code)
def test_it_does_not_apply(case: Case) -> None:
    assert case.not_applicable is not None
    outcome = BY_CODE[case.code].judge(case.not_applicable())
    assert outcome.verdict == "not_applicable", outcome.message


def test_every_check_has_a_case_and_nothing_is_wrong_with_unremarkable_experts() -> None:
    assert {c.code for c in CASES} == set(BY_CODE)
    assert not [c for c in run_checks(some_facts()) if c.verdict == "found"]


def test_checks_survive_no_matrices_and_no_tensors() -> None:
    empty = Facts(labels=["math", "code"], tensors=[], measures=[])
    found = [c.code for c in run_checks(empty) if c.verdict == "found"]
    assert not found


def test_what_fires_names_its_tensors_at_most_twenty() -> None:
    many = some_facts(measures=[a_measure(f"m{i}", snr=(0.1, 9.0)) for i in range(30)])
    result = BY_CODE["AM101"].result(many, muted=False)
    assert (len(result.tensors), result.count) == (20, 30)


def test_muted_is_not_found_and_clear_stays_clear() -> None:
    results = {c.code: c.verdict for c in run_checks(measured(merged_norm=3.5), mute=["AM402", "AM403"])}
    assert results["AM402"] == "muted"
    assert results["AM403"] == "clear"


def test_unknown_codes_are_all_named() -> None:
    check_codes(["AM101", "AM502"])
    with pytest.raises(RecipeError, match=r"there is no check 'AM109'\. Did you mean 'AM10") as caught:
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
