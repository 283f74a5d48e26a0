"""A rule from a user's own file."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.helpers.merging import actmat as run
from tests.helpers.open_merges import merge_tensors, output

import actmat
from actmat import plugins
from actmat.errors import MergeError, RecipeError
from actmat.methods import all_methods, get_method
from actmat.recipe import make_recipe, variants

RULE = """
from actmat.methods import Merged, MergeMethod


def merge(deltas, *, factor: float = 2.0):
    "the first expert"
    return Merged(deltas[0] * factor)


FIRST = MergeMethod("first", merge, "elementwise")
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
        ("", "none", "no function or MergeMethod called 'none'.* It holds: merge, FIRST"),
        ("1 / 0", "FIRST", "cannot be imported: ZeroDivisionError"),
        (None, "FIRST", "does not exist"),
        (
            "from actmat.methods import MergeMethod\nMergeMethod('x', 1, 'matrices')",
            "FIRST",
            "'acts_on' expects",
        ),
    ],
)
def test_what_is_wrong_is_told(rule: Path, edit: str | None, attribute: str, says: str) -> None:
    if edit is None:
        rule.unlink()
    else:
        rule.write_text(edit + RULE)
    with pytest.raises(RecipeError, match=says):
        get_method(f"{rule}:{attribute}")


def test_errors_of_a_users_function_are_the_users(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def product(deltas):\n    return deltas[0] @ deltas[1]\n")
    with pytest.raises(RecipeError, match=r"mine\.py:product' raised RuntimeError in line 2, given 2 deltas of 6x5"):
        merge_tensors(tensors(0), [tensors(1), tensors(2)], tmp_path / "m", method=f"{tmp_path / 'mine.py'}:product")
    for name in ("mine.py", "mine:product"):
        with pytest.raises(RecipeError, match=r"named with its file: FILE\.py:NAME"):
            get_method(name)


def test_a_declaration_takes_the_place_of_a_name() -> None:
    average = get_method("average")
    assert get_method(average) is average
    assert actmat.merge_matrices(average, [torch.ones(2, 2)]).equal(torch.ones(2, 2))
    with pytest.raises(RecipeError, match=r"given by its name, .* got 3"):
        get_method(3)


def test_the_command_shows_a_users_rule(rule: Path) -> None:
    shown = run(["methods", f"{rule}:FIRST"], code=0).out
    assert "the first expert" in shown
    assert "source: none" in shown
    assert "\n\n\n" not in shown, "gaps for an equation and a source that it has not"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A distribution outside the repository with two methods, one of which cannot be imported."""
    (tmp_path / "halves.py").write_text(RULE.replace('"first"', '"halved"').replace("2.0", "0.5"))
    about = tmp_path / "halves-1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: halves\nVersion: 1.2\n")
    (about / "entry_points.txt").write_text("[actmat.methods]\nhalved = halves:FIRST\nlost = halves_lost:RULE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for cached in (plugins.entries, plugins._loaded):
        cached.cache_clear()
    yield about
    for cached in (plugins.entries, plugins._loaded):
        cached.cache_clear()
    sys.modules.pop("halves", None)


def test_a_distribution_adds_a_method_by_its_entry_point(installed: Path, tmp_path: Path) -> None:
    assert actmat.merge_matrices("halved", [torch.ones(2, 2)]).equal(torch.full((2, 2), 0.5))
    report = merge_tensors(tensors(0), [tensors(1)], tmp_path / "m", method="halved")
    assert report.manifest["versions"]["halved"] == "halves 1.2"
    with pytest.raises(RecipeError, match="Did you mean 'halved'"):
        get_method("halve")


def test_a_broken_entry_point_is_an_error_that_names_the_distribution(installed: Path) -> None:
    with pytest.raises(MergeError, match=r"'lost' of halves cannot be imported .*halves_lost:RULE.*: ModuleNot"):
        get_method("lost")
    with pytest.raises(MergeError, match="of halves"):
        all_methods()
    run(["methods", "average"], code=0)
    (installed / "entry_points.txt").write_text("[actmat.methods]\nhalved = halves:FIRST\n")
    plugins.entries.cache_clear()
    assert [m.name for m in all_methods()][-1] == "halved"
    assert '"halved"' in run(["methods", "--json"]).out
    (installed / "entry_points.txt").write_text("[actmat.methods]\nhalf = halves:FIRST\n")
    plugins.entries.cache_clear()
    with pytest.raises(RecipeError, match="expected a MergeMethod called 'half', got <MergeMethod halved"):
        get_method("half")


def test_outputs_of_a_users_rule_are_in_folders_with_plain_names(rule: Path) -> None:
    recipe = make_recipe({"base": "b", "experts": ["e"], "out": "grid"})
    found = variants(recipe, ["average", f"{rule}:FIRST"], {"factor": [2, 3]})
    assert [r.out for r in found] == ["grid/average", "grid/my_rule-FIRST,factor=2", "grid/my_rule-FIRST,factor=3"]
