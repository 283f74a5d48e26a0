"""Patterns of others are matched in bounded time, or refused with the reason; they mean what `re` says."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.adapters import save_adapter
from tests.helpers.checkpoint_files import edit_json
from tests.helpers.located import open_adapter
from tests.helpers.merging import Family, actmat

from actmat.errors import RecipeError
from actmat.experts.lora.patterns import PatternTable
from actmat.layout.patterns import MatchError, Regex, compile_pattern

NAME = "base_model.model.model.layers.11.self_attn.q_proj" * 4
SLOW = [
    "(.*)*(.*)*(.*)*X",
    "(([a-z._0-9]+)+)+X",
    "(.*a.*)*(.*a.*)*X",
    "(a?){60}a{60}X",
    "(" * 300 + "a" + ")*" * 300 + "X",
    ".*" * 3000 + "X",
    "(?i)" + "[^x]*" * 100 + "[x]",
]
REFUSED = {
    "a{1000000}": "repeats",
    "((a{900}){900}){900}": "repeats",
    r"(a)\1": "backreference",
    "(?=a)b": "lookaround",
    "(?<!a)b": "lookaround",
    "(?P<x>a)(?P=x)": "lookaround",
    "(": "missing )",
    "[a": "missing ]",
    "[z-a]": "range",
    "a{,3}": "{0,n}",
    "[[:alpha:]]": "POSIX",
    "(" * 6000 + ")" * 6000: "characters",
    "(" * 4000 + "a{2}" + ")" * 4000: "",
    "\ud800": "surrogate",
    r"\p{L}{900}": "large",
}


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.process_time()  # other programs must not count
    yield
    assert time.process_time() - began < seconds


@pytest.mark.parametrize("pattern", SLOW, ids=lambda p: p[:20])
def test_nests_of_repeats_are_matched_in_time_linear_in_the_name(pattern: str) -> None:
    with within(1):
        assert not compile_pattern(f"re:{pattern}")(NAME)
        assert not compile_pattern(f"re:{pattern}")("a" * 10_000)
        assert PatternTable({pattern: 4}).of_module(NAME, 8) == 8


def test_nested_globs_are_matched_in_time_linear_in_the_name() -> None:
    with within(1):
        assert not compile_pattern("{*a*,{*b*,*c*}}" * 20 + "X")(NAME)
        assert not compile_pattern("*" * 200 + "X")("a" * 10_000)
        assert compile_pattern("*?" * 50)(NAME)


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda p: ascii(p[:20]))
def test_patterns_that_cannot_be_matched_are_refused_with_the_reason(pattern: str) -> None:
    with within(1):
        if not REFUSED[pattern]:
            Regex(pattern)  # deep, but harmless
            return
        with pytest.raises(MatchError, match=re.escape(REFUSED[pattern])):
            Regex(pattern)
        with pytest.raises(RecipeError, match=re.escape(REFUSED[pattern])):
            compile_pattern(f"re:{pattern}")
        with pytest.raises(MatchError, match="not a pattern"):
            PatternTable({pattern: 1})


def test_a_recipe_names_the_pattern_and_the_place(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    with within(10):
        outcome = actmat(family.argv("--keep", r"re:(.)\1", "--keep", "re:a{1000000}"), code=1)
    assert r"keep.0: Name pattern 're:(.)\\1' is not valid" in outcome.err
    assert "keep.1: Name pattern 're:a{1000000}' is not valid" in outcome.err


def peft_finds(patterns: dict[str, int], module: str) -> int:
    """As PEFT: `get_pattern_key`."""
    return next((r for p, r in patterns.items() if re.match(rf"(.*\.)?({p})$", module)), 8)


PARTS = st.sampled_from(
    ["q", "k_proj", "layers", "1", "11", r"\.", ".", ".*", r"\d+", "(q|k)", "[qk]", "^", "$", "|", "q?"]
)
MODULES = ["", "q", "k_proj", "layers.1.q", "layers.11.q", "layersX1.q", "a.layers.1.k_proj", "q.layers", "1.1", "x.q."]


@settings(max_examples=500)
@given(st.lists(st.lists(PARTS, min_size=1, max_size=5).map("".join), max_size=4))
def test_the_first_pattern_that_peft_would_take(texts: list[str]) -> None:
    patterns = {p: i for i, p in enumerate(texts)}
    try:
        table = PatternTable(patterns)
    except MatchError:
        return
    assert [table.of_module(m, 8) for m in MODULES] == [peft_finds(patterns, m) for m in MODULES]


def test_thousands_of_names_are_looked_up() -> None:
    modules = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(50) for j in range(200)]
    table = PatternTable({re.escape(m): i for i, m in enumerate(modules)})
    with within(2):
        assert [table.of_module(f"base.{m}", -1) for m in modules] == list(range(len(modules)))


def test_thousands_of_names_with_bare_dots_are_looked_up() -> None:
    modules = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(50) for j in range(100)]
    patterns = {m: i for i, m in enumerate(modules)}
    table = PatternTable(patterns)
    with within(2):
        assert [table.of_module(f"base.{m}", -1) for m in modules] == list(range(len(modules)))
    assert table.of_module("modelXlayersX1.mlp.experts.2-up_proj", -1) == 102
    assert table.of_module("model\nlayers.1.mlp.experts.2.up_proj", -1) == -1


MODULES_OF_A_MODEL = [f"base.model.layers.{i}.self_attn.{m}_proj" for i in range(800) for m in "qkvo"]


@pytest.mark.parametrize(
    ("count", "pattern"),
    [
        (1000, "(x*)*y{}.*"),
        (4000, ".*{}.{{900}}"),
        (20000, "a{}.*"),
        (4000, "[a-z]*{}.*"),
        (3000, "(.*){}(.*)(.*)(.*)"),
        (2000, "(a|e|o)*{}(a|.){{12}}"),
        (3000, ".{{90}}(?i:[^a]{{90}}){}"),
        (300_000, "x{}"),
    ],
)
def test_a_crafted_table_is_matched_or_refused_within_seconds(count: int, pattern: str) -> None:
    began, said = time.process_time(), ""
    try:
        table = PatternTable({pattern.format(i): i for i in range(count)})
        began = time.process_time()  # of the matching
        for module in MODULES_OF_A_MODEL:
            table.of_module(module, 8)
    except MatchError as error:
        said = str(error)
    assert time.process_time() - began < 3  # a second where nothing else runs
    assert not said or re.search(f"{count:,} (patterns.*too (long|large)|entries, more than 200,000)", said)


def test_names_with_dots_everywhere_are_refused() -> None:
    shapes = {"".join("." if i >> k & 1 else "a" for k in range(14)): i for i in range(1 << 14)}
    table = PatternTable(shapes)
    with within(3), pytest.raises(MatchError, match="they take too long"):
        [table.of_module("abcdefghijklmn", 8) for _ in range(1000)]


def test_an_adapter_with_a_hostile_config_is_read_at_once(tmp_path: Path) -> None:
    save_adapter(tmp_path, "llama", 0, r=2, target_modules=["q_proj", "v_proj"])
    config = tmp_path / "adapter_config.json"
    edit_json(config, rank_pattern={"(.*)*(.*)*(.*)*X": 4})
    with within(1), open_adapter(tmp_path) as adapter:
        assert adapter.problems == ()
        assert {m.rank for m in adapter.modules.values()} == {2}
    edit_json(config, rank_pattern={}, alpha_pattern={r"(q)\1": 4})
    with open_adapter(tmp_path) as adapter:
        (problem,) = adapter.problems
    assert "alpha_pattern of adapter_config.json has the entry" in problem
    assert "backreference" in problem
