"""Texts of recipes and options that are made to hurt, or are damaged: a recipe, or an error that names the line."""

import time
from pathlib import Path

import pytest

from actmat.api.reading import read_recipe
from actmat.checkpoints.writing.shards import parse_size
from actmat.errors import RecipeError
from actmat.recipe import parse_option
from actmat.recipe.load import MAX_BYTES
from actmat.recipe.text import MAX_DEPTH

MINIMAL = "base: org/base\nexperts: [org/one, org/two]\n"
SECONDS = 5.0
"""Longest time of one text, of this process alone; each takes a hundredth of it."""

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
    started = time.process_time()
    with pytest.raises(RecipeError) as caught:
        read_recipe(path)
    assert all(p.startswith(f"{path}:4: ") for p in caught.value.problems)
    assert len(str(caught.value)) < 500
    with pytest.raises(RecipeError, match="option 'rtol' cannot be read") as caught:
        parse_option(f"rtol={value}")
    assert len(str(caught.value)) < 500
    assert time.process_time() - started < SECONDS


@pytest.mark.parametrize(
    ("content", "line"), [(b"scale: \xff1\n", 3), (b"\n\nscale: \x001\n", 5), (b"\xed\xa0\x80", 3)]
)
def test_bytes_that_are_no_text(tmp_path: Path, content: bytes, line: int) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(MINIMAL.encode() + content)
    with pytest.raises(RecipeError) as caught:
        read_recipe(path)
    assert caught.value.problems[0].startswith(f"{path}:{line}: ")


def test_a_file_that_is_no_recipe_by_its_size(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(bytes(MAX_BYTES + 1))
    with pytest.raises(RecipeError, match="is this the right file"):
        read_recipe(tmp_path / "model.bin")


def test_a_path_that_the_system_cannot_look_up_is_left_to_the_one_who_opens_it(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"base: {'b' * 5000}\nexperts: [{'e/' * 3000}]\n")
    assert read_recipe(path).base == "b" * 5000


def test_the_depth_that_is_allowed(tmp_path: Path) -> None:
    depth = MAX_DEPTH - 2  # below the recipe and its options
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{MINIMAL}options: {{x: {'[' * depth}{']' * depth}}}\n")
    value = read_recipe(path).options["x"]
    for _ in range(depth - 1):
        (value,) = value
    assert value == []


def test_a_date_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("base: b\nexperts:\n- {path: a, name: 2024-05-01}\n")
    assert read_recipe(path).labels == ("2024-05-01",)


@pytest.mark.parametrize(
    "text",
    [
        "9" * 400,
        "9" * 400 + "GB",
        "9" * 5000,
        "1." + "1" * 400,
        "9" * 19,
        "-1",
        "\N{SUPERSCRIPT TWO}GB",
        10**5000,
        "",
        "GB",
        "-1GB",
        "0",
        "5 GB free",
        "1e9",
        "5XB",
        "0.1",
    ],
    ids=range(16),
)
def test_what_is_no_size_of_any_machine(text: str | int) -> None:
    with pytest.raises(RecipeError, match="A size looks like") as caught:
        parse_size(text)
    assert len(str(caught.value)) < 150
