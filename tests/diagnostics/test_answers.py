"""The verdict on answers: what is said of rows whose quality is known."""

import pytest
from tests.helpers.diagnoses import a_diagnosis

from actmat.diagnostics.answers import kept_words, verdict, with_answers
from actmat.diagnostics.model import AgreementRow, Finding, RivalAnswers


def a_row(
    name: str, inputs: int, kept: int, *rivals: tuple[int, int, int] | None, measured: bool = False
) -> AgreementRow:
    """A row; `rivals`: answers kept, gained and lost, without inputs and by the average."""
    found = dict(zip(("without", "average"), (r and RivalAnswers(*r) for r in rivals), strict=False))
    numbers = {"predictions": 9, "disagreement": 0.1, "divergence": 0.1, "measured": measured}
    return AgreementRow(name, "d", inputs, kept, **numbers, **found)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], ""),
        ([a_row("a", 4, 4, (0, 4, 0))], "too few inputs to say: give 8 a task (kept 4 of 4 answers, without inputs 0)"),
        ([a_row("a", 8, 8, (0, 8, 0), measured=True)],
         "too few inputs to say: give 8 a task (kept 8 of 8 answers, without inputs 0)"),
        ([a_row("a", 8, 8)], "kept 8 of 8 answers; compared with no other merge"),
        ([a_row("a", 8, 8, (2, 6, 0), (1, 7, 0)), a_row("b", 8, 5, (4, 2, 1), (3, 2, 0))],
         "better than without inputs: a 100>25; not shown: b 62~50 (8 inputs)"),
        ([a_row("a", 64, 50, None, (30, 25, 5)), a_row("b", 64, 20, None, (40, 2, 22))],
         "NOT BETTER than the average: a 78>47, b 31<62 (64 inputs)"),
        ([a_row("a", 64, 60, None, (30, 31, 1)), a_row("b", 64, 30, None, (40, 2, 12))],
         "better than the average: a 94>47; WORSE: b 47<62 (64 inputs)"),
        ([a_row("a", 8, 4, (4, 1, 1), (7, 0, 3))], "NOT BETTER than the average: a 50~88 (8 inputs)"),
        ([a_row("a", 8, 5, (4, 1, 0))],
         "too few inputs to say: give 16 a task (kept 5 of 8 answers, without inputs 4)"),
        ([a_row(n, 8, 7, (4, 3, 0)) for n in "ab"],
         "better than without inputs: all 88>50; not shown: a 88~50, b 88~50 (8 inputs)"),
    ],
)  # fmt: skip
def test_verdict(rows: list[AgreementRow], says: str) -> None:
    assert verdict(rows) == says


def test_accuracies_stand_in_brackets() -> None:
    assert kept_words(RivalAnswers(7, 0, 0, accuracy=0.75), 8) == "88% (75.0%)"
    assert kept_words(RivalAnswers(3, 0, 0), 4) == "3 of 4"
    assert kept_words(None, 8) == "-"


def test_checks_that_guess_are_silent_where_answers_were_measured() -> None:
    findings = [Finding(code, "t", "issue", "m", (), 0) for code in ("AM201", "AM402")]
    found = with_answers(a_diagnosis(findings=tuple(findings)), [a_row("a", 8, 8)])
    assert [f.muted for f in found.findings] == [False, True]
    assert found.findings[1].message == "answers were measured, and judge the merge", (
        "no advice against what was measured"
    )
    assert found.agreement is not None
