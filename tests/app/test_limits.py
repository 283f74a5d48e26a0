"""The form, and guards of a page that is served to others: places, fields, limits."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tests.app.conftest import HOSTILE
from tests.helpers.repository import ROOT

from actmat.errors import MergeError, RecipeError
from actmat_app.form import recipe_fields
from actmat_app.limits import Limits, repository_of


def test_the_form_makes_the_arguments_of_a_merge(tmp_path: Path) -> None:
    found = recipe_fields(" base ", "a/b -1e-2\n\nc=d e\n", "ties", 0.5, 4, "seed: 3\nmethod: average")
    assert found["experts"] == [{"path": "a/b", "weight": -0.01}, {"path": "d e", "name": "c"}]
    assert (found["base"], found["method"], found["scale"], found["seed"]) == ("base", "average", 0.5, 3)
    assert found["output"] == {"kind": "extracted", "rank": 4}
    assert recipe_fields("", "a", "auto", 1.0, 4, "")["output"] == {"kind": "adapter", "rank": 4}
    for more, words in (("a: [", "not valid YAML"), ("[1]", "found list"), ("a" * 20_001, "too long")):
        with pytest.raises(RecipeError, match=words):
            recipe_fields("", "a", "auto", 1.0, 0, more)


@pytest.mark.parametrize(
    "place",
    ["/etc/passwd", "../a", "a/../b", "org/a@../b", "math", "org/a/b", "s3://org/a", "https://elsewhere.org/org/a",
     "a[0:1] + b", "org/a+org/b", HOSTILE, "org/a\x00", "ôrg/a", "", None, 5],
)  # fmt: skip
def test_visitors_name_repositories_of_the_hub_only(place: object) -> None:
    with pytest.raises(RecipeError, match="expected a hub repository"):
        repository_of(place)
    with pytest.raises(MergeError, match="expected a hub repository"):
        Limits().pinned({"experts": [place]})


@pytest.mark.parametrize(
    ("text", "found"),
    [("org/math", None), ("hf://a.b/c_d@refs/pr/1", "refs/pr/1"), ("https://huggingface.co/org/code@v2", "v2")],
)
def test_repositories_have_revisions(text: str, found: str | None) -> None:
    assert repository_of(text)[1] == found


def test_visitors_set_no_field_that_names_a_place_or_a_setting_of_the_run() -> None:
    with pytest.raises(RecipeError) as caught:
        Limits().pinned({"experts": [{"path": "a", "statistics": "/etc"}], "out": "/x", "overwrite": True})
    words = "\n".join(caught.value.problems)
    assert all(f"{name}: visitors" in words for name in ("out", "overwrite", "statistics"))
    for experts in ([], ["org/a"] * 9, "org/a", None):
        with pytest.raises(RecipeError, match="Expected 1 to 8 experts"):
            Limits().pinned({"experts": experts})


def test_limits_come_from_the_environment() -> None:
    given = {"ACTMAT_APP_MAX_BYTES": "3GiB", "ACTMAT_APP_SECONDS": "60", "X": "1"}
    assert Limits.from_environment(given) == Limits(max_bytes=3 << 30, seconds=60)
    with pytest.raises(RecipeError) as caught:
        Limits.from_environment({"ACTMAT_APP_SECONDS": "soon", "ACTMAT_APP_KEEP": "-1", "ACTMAT_APP_BYTES": "1"})
    assert len(caught.value.problems) == 3


def test_the_readmes_name_the_limits_and_the_file_of_the_space() -> None:
    folder = ROOT / "packages" / "actmat-app"
    head = yaml.safe_load((folder / "space" / "README.md").read_text().split("---\n")[1])
    assert (head["sdk"], head["hf_oauth"]) == ("gradio", True)
    assert (folder / "space" / head["app_file"]).is_file()
    for name in Limits.__slots__:
        assert f"`ACTMAT_APP_{name.upper()}`" in (folder / "README.md").read_text()
