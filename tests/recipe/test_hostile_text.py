"""Texts of recipes and options that are made to hurt, or are damaged: a recipe, or an error that names the line."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actmat.checkpoints.writing.shards import parse_size
from actmat.errors import RecipeError
from actmat.recipe import Recipe, load_recipe, parse_option
from actmat.recipe.load import MAX_BYTES, recipe_yaml
from actmat.recipe.text import MAX_DEPTH

MINIMAL = "base: org/base\nexperts: [org/one, org/two]\n"
SECONDS = 5.0
"""Longest time of one text; each takes a hundredth of it on a machine that does nothing else."""

REFUSED = {
    "int": "!!int x",
    "empty int": "!!int ''",
    "binary int": "!!int 0b2",
    "bool": "!!bool x",
    "float": "!!float x",
    "empty float": "!!float ''",
    "no digits": "0x_",
    "time": "!!timestamp x",
    "no time": "!!timestamp 2020-99-99",
    "bytes": "!!binary YQ==",
    "set": "!!set {a}",
    "pairs": "!!omap [a: 1]",
    "object": "!!python/name:os.system ''",
    "digits": "9" * 5000,
    "bits": "0x" + "f" * 5000,
    "many bits": "9" * 400,
    "base 60": "1:" * 3000 + "1",
    "brackets": "[" * 5000,
    "closed brackets": "[" * 900 + "]" * 900,
    "braces": "{a: " * 900 + "}" * 900,
    "itself": "&a [*a]",
    "merge of itself": "&a {<<: *a}",
    "merge": "<<",
    "value": "=",
    "list as key": "{? [1] : 2}",
    "true as key": "{true: 2}",
    "NUL": '"\\0"',
    "surrogate": '"\\ud800"',
    "escape": "\x1b[2K",
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED.keys())
def test_a_value_that_cannot_be_read_is_named_with_its_line(tmp_path: Path, value: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{MINIMAL}options:\n  rtol: {value}\n")
    started = time.perf_counter()
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert all(p.startswith(f"{path}:4: ") for p in caught.value.problems)
    assert len(str(caught.value)) < 500
    with pytest.raises(RecipeError, match="option 'rtol' cannot be read") as caught:
        parse_option(f"rtol={value}")
    assert len(str(caught.value)) < 500
    assert time.perf_counter() - started < SECONDS


@pytest.mark.parametrize(
    ("content", "line"), [(b"scale: \xff1\n", 3), (b"\n\nscale: \x001\n", 5), (b"\xed\xa0\x80", 3)]
)
def test_bytes_that_are_no_text(tmp_path: Path, content: bytes, line: int) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(MINIMAL.encode() + content)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert caught.value.problems[0].startswith(f"{path}:{line}: ")


def test_a_file_that_is_no_recipe_by_its_size(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(bytes(MAX_BYTES + 1))
    with pytest.raises(RecipeError, match="is this the right file"):
        load_recipe(tmp_path / "model.bin")


def test_a_path_that_the_system_cannot_look_up_is_left_to_the_one_who_opens_it(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"base: {'b' * 5000}\nexperts: [{'e/' * 3000}]\n")
    assert load_recipe(path).base == "b" * 5000


def test_the_depth_that_is_allowed(tmp_path: Path) -> None:
    depth = MAX_DEPTH - 2  # below the recipe and its options
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{MINIMAL}options: {{x: {'[' * depth}{']' * depth}}}\n")
    value = load_recipe(path).options["x"]
    for _ in range(depth - 1):
        (value,) = value
    assert value == []


def test_a_date_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("base: b\nexperts:\n- {path: a, name: 2024-05-01}\n")
    assert load_recipe(path).labels == ("2024-05-01",)


@pytest.mark.parametrize(
    "text",
    ["9" * 400, "9" * 400 + "GB", "9" * 5000, "1." + "1" * 400, "9" * 19, "-1", "\N{SUPERSCRIPT TWO}GB", 10**5000],
    ids=range(8),
)
def test_sizes_that_no_machine_has(text: str | int) -> None:
    with pytest.raises(RecipeError, match="A size looks like") as caught:
        parse_size(text)
    assert len(str(caught.value)) < 150


FIELDS = sorted(Recipe.model_fields)
SIGNS = st.text(
    "[]{}&*!|>%@`'\"#-?:,=<~. \n\t\\019aexnul_+\x00\x1b\u202e\ud800\N{GREEK SMALL LETTER ALPHA}", max_size=12
)
TAGS = st.sampled_from(["int", "bool", "float", "null", "str", "timestamp", "binary", "set", "omap", "seq", "map", "x"])
TAGGED = st.builds(lambda tag, text: f"!!{tag} {text}", TAGS, SIGNS)
LONG = st.builds(
    lambda sign, n: sign * n, st.sampled_from(["9", "[", "{a: ", "- ", "1:", "0x", "&a ", "? "]), st.integers(1, 6000)
)
VALUES = st.one_of(SIGNS, TAGGED, LONG, st.text(max_size=30), st.sampled_from(sorted(REFUSED.values())))
LINES = st.one_of(
    st.builds("{}: {}".format, st.sampled_from(FIELDS), VALUES),
    st.builds("{}: [{}, {}]".format, st.sampled_from(FIELDS), VALUES, VALUES),
    st.builds("{}: {{{}: {}}}".format, st.sampled_from(FIELDS), VALUES, VALUES),
    VALUES,
)


def outcome(function: Callable[[], Any], *, most: int) -> Any:
    """The result, or None where the text is refused in at most `most` characters; both in bounded time."""
    started = time.perf_counter()
    try:
        result = function()
    except RecipeError as error:
        result, said = None, str(error)
    else:
        said = ""
    assert len(said) <= most
    assert time.perf_counter() - started < SECONDS
    return result


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(LINES, min_size=1, max_size=6), st.booleans())
def test_any_text_is_a_recipe_or_a_recipe_error(tmp_path: Path, lines: list[str], complete: bool) -> None:
    path, again = tmp_path / "recipe.yaml", tmp_path / "again.yaml"
    path.write_bytes(((MINIMAL if complete else "") + "\n".join(lines)).encode("utf-8", "surrogatepass"))
    recipe = outcome(lambda: load_recipe(path), most=100_000)
    if recipe is not None:
        again.write_text(recipe_yaml(recipe), encoding="utf-8")
        assert load_recipe(again).labels == recipe.labels


@settings(max_examples=500)
@given(st.one_of(VALUES, st.builds("x={}".format, VALUES), st.builds("x=[{}".format, VALUES)))
def test_any_option_is_read_or_refused(text: str) -> None:
    read = outcome(lambda: parse_option(text), most=1000)
    assert read is None or (read[0] and read[1])


@given(st.one_of(SIGNS, LONG, st.from_regex(r"\s*\d+(\.\d+)?\s*[kMGTi]*B?", fullmatch=True)))
def test_any_size_is_positive_or_refused(text: str) -> None:
    size = outcome(lambda: parse_size(text), most=500)
    assert size is None or 0 < size < 2**63
