"""Answers taken out of texts, against answers read by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmat_experiments.reasoning.marks import aime_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{33}.", 33),
        (r"\boxed{033}", 33),
        (r"\boxed{000}", 0),
        (r"\boxed{999}", 999),
        (r"\boxed{ 7 }", 7),
        (r"$\boxed{\text{204}}$", 204),
        (r"\boxed{\mathbf{12}}", 12),
        (r"\boxed{x = 25}", 25),
        (r"\boxed{25.}", 25),
        (r"\boxed 7", 7),
        (r"\fbox{81}", 81),
        (r"first \boxed{1}, no: \boxed{2}", 2),
        (r"\boxed{2} and then \boxed{none}", 2),
        (r"\boxed{\boxed{5}}", 5),
        (r"\boxed{60^\circ}", 60),
        (r"$\boxed{60^{\circ}}$", 60),
        ("\\boxed{70°}", 70),
        (r"\boxed{12\text{ cm}}", 12),
        (r"\boxed{25\,\text{cm}^2}", 25),
        (r"\boxed{12\ \mathrm{cm}^{3}}", 12),
        (r"\boxed{204 minutes}", 204),
        (r"\boxed{204\%}", 204),
        (r"\boxed{\$25}", 25),
        (r"\boxed{25.0}", 25),
        (r"\boxed{AB = 60.00\text{ units}}", 60),
        ("The answer is 42.", 42),
        ("The final answer is: **042**", 42),
        ("Answer: $17$", 17),
        ("The answer is 3. Wait. The answer is 4", 4),
        (r"The answer is 3, but \boxed{4}", 4),
    ],
)
def test_an_answer_is_found(text: str, answer: int) -> None:
    assert aime_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "",
        "there are 12 cases, and 13 more",
        r"\boxed{1000}",
        r"\boxed{-1}",
        r"\boxed{3.5}",
        r"\boxed{\frac{1}{2}}",
        r"\boxed{",
        r"\boxed{12",
        r"\boxed{n^2}",
        r"\boxed{12n}",
        r"\boxed{12\pi}",
        r"\boxed{3\sqrt{2}}",
        r"\boxed{2 or 3 solutions}",
        r"\boxed{12.5\text{ cm}}",
        r"\boxed{1000^\circ}",
        "The answer is 1000",
    ],
)
def test_no_answer_is_invented(text: str) -> None:
    assert aime_answer(text) is None


@given(st.integers(0, 999), st.text(alphabet="abc {}$\\.\n0123456789", max_size=40))
def test_every_boxed_integer_is_read_whatever_stands_before(number: int, before: str) -> None:
    assert aime_answer(f"{before} \\boxed{{{number:03d}}}") == number


@given(st.text(max_size=80))
def test_any_text_is_read_without_an_error(text: str) -> None:
    found = aime_answer(text)
    assert found is None or 0 <= found <= 999
