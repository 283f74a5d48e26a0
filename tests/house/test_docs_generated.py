"""Generated parts of the documentation say what the declarations say, and every method and command has its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs.generate import KINDS, WRITTEN, filled, flags, group_flags, method, pages, recipe, table
from docs.quoted import MARK, NUMBERS
from docs.record import recorded
from tests.helpers.docs_run import Run
from tests.helpers.repository import ROOT

from actmat.cli.listing import COMMANDS as CORE
from actmat.cli.listing import plugged_in
from actmat.methods import all_methods
from actmat.methods.post import STEPS

PAGES = [p for p in pages() if p.exists()]
SECTIONS = ["When to use it", "Trap", "Other implementations", "Ill-posed cases", "Example", "Reference"]
COMMANDS = [
    name for name in [*CORE, *plugged_in()] if name not in ("statistics", "analyze", "experiment")
]  # groups, whose commands have sections of their pages


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert filled(text) == text, "run python -m docs.generate"


@pytest.mark.parametrize("name", [m.name for m in all_methods()])
def test_every_method_has_its_page(name: str) -> None:
    text = (ROOT / "docs" / "methods" / f"{name}.md").read_text()
    assert text.startswith(f"# {name}\n")
    assert f"<!-- generated: method {name} -->" in text
    headings = [h.replace("Traps", "Trap") for h in re.findall(r"^## (.*)$", text, re.MULTILINE)]
    assert headings == SECTIONS


@pytest.mark.parametrize("name", STEPS)
def test_every_step_has_its_page(name: str) -> None:
    text = (ROOT / "docs" / "post" / f"{name}.md").read_text()
    assert text.startswith(f"# {name}\n")
    assert f"<!-- generated: step {name} -->" in text
    assert [h.replace("Traps", "Trap") for h in re.findall(r"^## (.*)$", text, re.MULTILINE)] == SECTIONS
    assert f"({name}.md)" in (ROOT / "docs" / "post" / "README.md").read_text()


LONGEST_PAGE, LONGEST_OVERVIEW = 400, 600
"""Words of prose of the page of a method or a step, and of the overviews: without tables, formulas and code."""


def prose_words(page: str) -> int:
    """Words of a page outside generated parts, code, tables and formulas."""
    text = re.sub(r"<!-- generated.*?<!-- end generated -->|^ *```.*?^ *```", "", page, flags=re.DOTALL | re.MULTILINE)
    return len(re.sub(r"^(?:    |\|).*$", "", text, flags=re.MULTILINE).split())


@pytest.mark.parametrize("folder", ["methods", "post"])
def test_pages_of_methods_are_short(folder: str) -> None:
    long = {}
    for page in (ROOT / "docs" / folder).glob("*.md"):
        found = prose_words(page.read_text())
        if found > (LONGEST_OVERVIEW if page.stem == "README" else LONGEST_PAGE):
            long[page.name] = found
    assert not long


def test_words_of_prose_are_counted_without_code_tables_and_formulas() -> None:
    page = "# A b\n\n    x = y\n\n| a |\n<!-- generated: x -->\na b\n<!-- end generated -->\n```python\nz = 1\n```\nc\n"
    assert prose_words(page) == 4


def test_no_page_is_left_of_a_method_that_is_gone() -> None:
    listed = {p.stem for p in (ROOT / "docs" / "methods").glob("*.md")} - {"README"}
    assert listed == {m.name for m in all_methods()}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_page(name: str) -> None:
    text = (ROOT / "docs" / "commands" / f"{name}.md").read_text()
    assert f"<!-- generated: flags {name} -->" in text


def test_shown_console_output_fits_80_columns() -> None:
    wide = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in PAGES
        for block in re.findall(r"^```(?:console|text)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        if len(line) > 80
    ]
    assert wide == []


# The generator itself


def test_a_stale_part_is_replaced_and_the_rest_kept() -> None:
    before = "above\n<!-- generated: method ties -->\nSTALE\n<!-- end generated -->\nbelow\n"
    after = filled(before)
    assert after.startswith("above\n<!-- generated: method ties -->\n")
    assert after.endswith("<!-- end generated -->\nbelow\n")
    assert "STALE" not in after
    assert filled(after) == after


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(KeyError):
        filled("<!-- generated: nonsense -->\n<!-- end generated -->")


def test_all_kinds_are_used_somewhere() -> None:
    text = "".join(p.read_text() for p in PAGES)
    assert [k for k in KINDS if f"<!-- generated: {k} " not in text] == []


def test_method_tables_show_options_needs_and_bounds() -> None:
    text = method("dare")
    assert '| `rule` | `"task_arithmetic" \\| "average" \\| "linear" \\| "ties"` | `"task_arithmetic"` |' in text
    assert "| random | yes, seeded by the tensor's name |" in text
    assert "`float \\| list`, in [0, 1]" in text
    assert "| experts | at most 2 |" in method("slerp")
    assert "`float`, > 0" in method("nearswap")


def test_flags_show_spellings_defaults_and_repetition() -> None:
    text = flags("merge")
    assert re.search(r"\| `--expert`, `-e` text \| +\| .* Repeatable\. \|", text)
    assert "| `--threads` number | `all cores` |" in text
    assert "| `--fsync`, `--no-fsync` | `--fsync` |" in text
    assert "| `OUT` |" in flags("verify")


def test_flags_that_are_those_of_another_command_are_named_only() -> None:
    table, _, shared = flags("plan").partition("These flags are the same as for [`merge`](merge.md#flags): ")
    assert "| `--full`, `--all` |" in table
    assert "| `--expert`, `-e` text |" in table, "the first flags of --help stay"
    assert "--scope" not in table
    assert "`--scope`" in shared.split(", ")
    diagnose = flags("diagnose")
    assert "| `--dtype` text | `float32` | Dtype of the model while it runs. |" in diagnose, "another meaning"


def test_flags_of_a_group_are_described_once_with_their_commands() -> None:
    text = group_flags("statistics")
    assert text.count("| `--batch-size` number |") == 1
    assert "| `--batch-size` number | `8` | Samples in one forward pass. | collect, staged |" in text
    assert "Print JSON instead of text. | all |" in text


def test_recipe_tables_show_types_and_requirements() -> None:
    text = recipe("Recipe")
    assert "| `experts` | `list of ExpertRef` | `[]` |" in text
    assert "| `value` | `anything` | required |" in recipe("Entry")
    assert '| `scope` | `"linear" \\| "paper" \\| "all"` | `linear` |' in text
    assert "| `blocks` | `mapping` | `{}` |" in recipe("RoleRule")
    assert all(row.count(" |") == 4 for row in text.splitlines())


def test_bars_in_cells_are_escaped() -> None:
    assert table(["a"], [["||D||"]]) == "| a |\n| --- |\n| \\|\\|D\\|\\| |\n"


def test_recorded_output_replaces_what_disagrees() -> None:
    page = "a\n```console\n$ one\nold\n$ two\n$ three\n...\nend\n```\nb\n"
    run = Run(0, "", {3: ["new", "er"], 5: ["unasked"], 6: ["x", "end"]})
    assert recorded(page, run) == "a\n```console\n$ one\nnew\ner\n$ two\n$ three\n...\nend\n```\nb\n"
    assert recorded(page, Run(0, "", {3: ["old"], 5: [], 6: ["y"]})).splitlines()[5:7] == ["$ three", "y"]


def test_the_catalogue_of_methods_is_up_to_date() -> None:
    for file, made in WRITTEN.items():
        assert file.read_text() == made(), "run python -m docs.generate"


def test_numbers_in_sentences_come_from_results() -> None:
    before = "at most <!-- n: choice-most-regret -->2<!-- /n --> of <!-- n: choice-rows --><!-- /n --> rows"
    after = filled(before)
    most, rows = NUMBERS["choice-most-regret"](), NUMBERS["choice-rows"]()
    assert float(most) > 0
    assert int(rows) > 20
    assert (
        after
        == f"at most <!-- n: choice-most-regret -->{most}<!-- /n --> of <!-- n: choice-rows -->{rows}<!-- /n --> rows"
    )
    assert filled(after) == after
    with pytest.raises(KeyError):
        filled("<!-- n: nonsense -->1<!-- /n -->")


def test_every_named_number_is_quoted_somewhere() -> None:
    text = "".join(p.read_text() for p in PAGES)
    assert [name for name in NUMBERS if f"<!-- n: {name} -->" not in text] == []
    assert text.count("<!-- n: ") == len(MARK.findall(text)), "a mark without an end"
