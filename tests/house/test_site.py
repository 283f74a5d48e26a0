"""The documentation builds as a site: every link leads somewhere, every page is in the navigation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from docs.site import DOCS, ROOT, _leaves, build, navigation, notebook_page, places, relinked, run_mkdocs, unescaped

from actmat.methods import all_methods


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    root = tmp_path_factory.mktemp("site")
    (root / "work").mkdir()
    return root / "out", build(root / "out", root / "work")


def test_the_site_builds_without_a_warning(site: tuple[Path, list[str]]) -> None:
    out, warnings = site
    assert warnings == []
    assert (out / "index.html").is_file()
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix(".html")
        assert (out / {"README.html": "pages.html"}.get(str(name), name.with_name(
            "index.html" if name.stem == "README" else name.name))).is_file(), name  # fmt: skip
    assert all((out / "methods" / f"{m.name}.html").is_file() for m in all_methods())


@pytest.mark.parametrize(
    ("page", "said"), [("[a](gone.md)", "gone.md"), ("[a](#gone)", "gone"), ("![a](gone.png)", "gone.png")]
)
def test_a_broken_link_is_a_warning(tmp_path: Path, page: str, said: str) -> None:
    given = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text(f"# Title\n{page}\n")
    config = {"site_name": "x", "docs_dir": "pages", "site_dir": str(tmp_path / "out"), "plugins": [],
              "theme": "mkdocs", "validation": given["validation"]}  # fmt: skip
    (warning,) = run_mkdocs(config, tmp_path)
    assert said in warning


def test_links_are_those_of_the_site() -> None:
    sites = places()
    page = ROOT / "README.md"
    text = (
        "[a](docs/methods/ties.md#trap) [`b`](docs/start.md) [c](CONTRIBUTING.md) [d](https://x.org) [e](#one)\n"
        "[code](src/actmat/run.py) `[f](docs/start.md)`\n```text\n[g](docs/start.md)\n```\n"
    )
    assert relinked(text, page, sites) == (
        "[a](methods/ties.md#trap) [`b`](start.md) [c](project/contributing.md) [d](https://x.org) [e](#one)\n"
        "code (`src/actmat/run.py`) `[f](docs/start.md)`\n```text\n[g](docs/start.md)\n```\n"
    )
    deep = relinked("[a](../README.md) [b](../../README.md)", DOCS / "methods" / "ties.md", sites)
    assert deep == "[a](../pages.md) [b](../index.md)"


def test_a_folder_stands_for_its_pages_that_are_not_named() -> None:
    nav = ["index.md", {"Methods": ["m/README.md", {"...": "m"}]}, {"M": "m/special.md"}, {"...": ""}]
    pages = ["index.md", "m/README.md", "m/b.md", "m/a.md", "m/special.md", "m/deep/c.md", "other.md"]
    assert navigation(nav, pages) == [
        "index.md",
        {"Methods": ["m/README.md", "m/a.md", "m/b.md"]},
        {"M": "m/special.md"},
        "other.md",
    ]


def test_code_in_tables_has_plain_bars() -> None:
    assert unescaped("| `a \\| b` \\| c |\n`d \\| e`\n") == "| `a | b` \\| c |\n`d \\| e`\n"


def test_cells_of_a_notebook() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# T\n", "x"]},
        {"cell_type": "code", "source": ["1"], "outputs": [{"output_type": "stream", "text": ["one\n"]}]},
        {"cell_type": "code", "source": ["2"], "outputs": [{"data": {"text/html": ["<b>", "2</b>"]}}]},
    ]
    assert notebook_page(json.loads(json.dumps({"cells": cells}))) == (
        "# T\nx\n\n```python\n1\n```\n\n```text\none\n```\n\n```python\n2\n```\n\n<b>2</b>\n"
    )


MOST_WORDS = 30_000
"""Of the guide: what a user reads, without the pages of methods and the tables that the code makes."""
GENERATED = re.compile(r"<!-- generated: .*?<!-- end generated -->", re.DOTALL)


def test_the_guide_is_short() -> None:
    (guide,) = (part["Guide"] for part in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"] if "Guide" in part)
    pages = [str(p.relative_to(DOCS)) for p in sorted(DOCS.rglob("*.md"))]
    results = [
        part["Results"] for part in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"] if "Results" in part
    ]
    named = set(_leaves(navigation([{"Guide": guide}, {"Results": results[0]}], pages)[0]))
    read = [p for p in named if (DOCS / p).is_file() and not p.startswith(("methods/", "post/", "project/"))]
    assert {"start.md", "commands/merge.md", "formats/recipe.md", "safety.md"} <= set(read)
    assert not {"evidence.md", "commands/analyze.md", "paper.md"} & set(read)
    words = sum(len(GENERATED.sub("", (DOCS / p).read_text(encoding="utf-8")).split()) for p in read)
    assert words <= MOST_WORDS, f"the guide has {words} words; {MOST_WORDS} at most"
