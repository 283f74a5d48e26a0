"""A rule from a user's own file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers.open_merges import merge_tensors, output

import actmat
from actmat.errors import RecipeError
from actmat.methods import get_method

RULE = """
from actmat.methods import Merged, MergeMethod


def merge(deltas, *, factor: float = 2.0):
    return Merged(deltas[0] * factor)


FIRST = MergeMethod("first", merge, "elementwise", "the first expert", "D* = a D_1", "none")
"""


@pytest.fixture
def rule(tmp_path: Path) -> Path:
    path = tmp_path / "my_rule.py"
    path.write_text(RULE)
    return path


def tensors(seed: int) -> dict[str, torch.Tensor]:
    return {"a.q_proj.weight": torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))}


def test_a_users_rule_merges_checkpoints(rule: Path, tmp_path: Path) -> None:
    base, expert, other = tensors(0), tensors(1), tensors(2)
    name = f"{rule}:FIRST"
    report = merge_tensors(base, [expert, other], tmp_path / "m", method=name, options={"factor": 0.5})
    want = base["a.q_proj.weight"] + 0.5 * (expert["a.q_proj.weight"] - base["a.q_proj.weight"])
    torch.testing.assert_close(output(report)["a.q_proj.weight"], want)
    assert len(report.manifest["versions"][name]) == 64
    assert actmat.merge_matrices(name, [torch.ones(2, 2)]).equal(2 * torch.ones(2, 2))


def test_an_edited_rule_is_another_merge(rule: Path, tmp_path: Path) -> None:
    def fingerprint(folder: str) -> str:
        return merge_tensors(tensors(0), [tensors(1)], tmp_path / folder, method=f"{rule}:FIRST").plan.fingerprint()

    before = fingerprint("a")
    rule.write_text(RULE.replace("2.0", "3.0"))
    assert fingerprint("a2") != before
    assert get_method(f"{rule}:FIRST").options["factor"].default == 3.0


@pytest.mark.parametrize(
    ("edit", "attribute", "says"),
    [
        ("", "FIRTS", "Did you mean 'FIRST'"),
        ("1 / 0", "FIRST", "cannot be imported: ZeroDivisionError"),
        (None, "FIRST", "there is none"),
    ],
)
def test_what_is_wrong_is_told(rule: Path, edit: str | None, attribute: str, says: str) -> None:
    if edit is None:
        rule.unlink()
    else:
        rule.write_text(edit + RULE)
    with pytest.raises(RecipeError, match=says):
        get_method(f"{rule}:{attribute}")
