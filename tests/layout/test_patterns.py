import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmat.errors import RecipeError
from actmat.layout.patterns import compile_pattern


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*", ["", "a.b.c"], []),
        ("*.weight", ["a.weight", "a.b.weight"], ["weight", "a.weights", "a.weight.b"]),
        ("model.layers.?.mlp.*", ["model.layers.3.mlp.up_proj.weight"], ["model.layers.13.mlp.up_proj.weight"]),
        ("*.{up,gate}_proj.*", ["l.up_proj.weight", "l.gate_proj.bias"], ["l.down_proj.weight"]),
        ("{a,b{c,d}*}.x", ["a.x", "bc.x", "bd.e.x"], ["b.x", "ac.x"]),
        ("h.[0-3].w", ["h.0.w", "h.3.w"], ["h.4.w", "h.12.w"]),
        ("h.[!0-3].w", ["h.4.w"], ["h.0.w"]),
        ("a.b", ["a.b"], ["axb"]),
        ("a,b", ["a,b"], ["a", "b"]),
        (r"a\*b", ["a*b"], ["axb"]),
        (r"re:.*\.(1[0-9])\..*", ["l.12.w"], ["l.2.w", "l.12"]),
        ("re:a|b", ["a", "b"], ["ab", "ac"]),
    ],
)
def test_a_pattern_describes_the_whole_name(pattern: str, yes: list[str], no: list[str]) -> None:
    matches = compile_pattern(pattern)
    assert [name for name in yes if not matches(name)] == []
    assert [name for name in no if matches(name)] == []


@pytest.mark.parametrize("pattern", ["", "re:", "re:(", "{a,b", "a}", "[ab", "a{b{c}", "ends\\", "[b-a]"])
def test_bad_patterns_are_recipe_errors_that_quote_them(pattern: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(repr(pattern)) if pattern not in ("", "re:") else "Empty"):
        compile_pattern(pattern)


@given(st.text(alphabet="ab.*?[]{},\\!^$()+|&~-", max_size=12))
def test_a_glob_never_means_more_than_its_own_signs(text: str) -> None:
    escaped = re.sub(r"([*?\[\]{},\\])", r"\\\1", text)
    if not text:
        return
    assert compile_pattern(escaped if not text.startswith("re:") else text)(text)
