"""Generated parts of the documentation are up to date; the site builds, and the tutorial runs."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from docs import generate
from docs.markdown import PLACE, filled, pages
from docs.record import NOTEBOOK, run
from docs.site import DOCS, build, places
from tests.helpers.docs_fixture import write_models
from tests.helpers.repository import ROOT, SOURCES

from actmat.methods import all_methods

# Generated parts of the documentation are up to date, and no method is without a page.


PAGES = [p for p in pages() if p.exists()]


def test_generated_parts_are_up_to_date() -> None:
    texts = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in PAGES}
    stale = [page for page, text in texts.items() if filled(text, generate.KINDS) != text]
    assert stale == [], "run python -m docs.generate"


def test_generated_files_are_up_to_date() -> None:
    stale = [f.name for f, text in generate.WRITTEN.items() if f.read_text(encoding="utf-8") != text()]
    assert stale == [], "run python -m docs.generate"


def test_every_kind_is_used_and_every_part_has_its_kind() -> None:
    used = {m["kind"] for p in PAGES for m in PLACE.finditer(p.read_text(encoding="utf-8"))}
    assert used == generate.KINDS.keys()


def test_no_page_is_left_of_a_method_that_is_gone() -> None:
    listed = {p.stem for p in (ROOT / "docs" / "methods").glob("*.md")} - {"README"}
    assert listed == {m.name for m in all_methods()}


# The generator itself


def test_a_stale_part_is_replaced_and_the_rest_kept() -> None:
    before = "above\n<!-- generated: method ties -->\nSTALE\n<!-- end generated -->\nbelow\n"
    after = filled(before, generate.KINDS)
    assert after.startswith("above\n<!-- generated: method ties -->\n")
    assert after.endswith("<!-- end generated -->\nbelow\n")
    assert "STALE" not in after
    assert filled(after, generate.KINDS) == after
    assert filled(before, {}) == before, "of no kind that is asked for"


# The documentation builds as a site: every link leads somewhere, every page is in the navigation.


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("site")
    (root / "work").mkdir()
    build(root / "out", root / "work")
    return root / "out"


def test_the_site_builds_without_a_warning(site: Path) -> None:
    out = site
    assert (out / "index.html").is_file()
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix(".html")
        assert (out / {"README.html": "pages.html"}.get(str(name), name.with_name(
            "index.html" if name.stem == "README" else name.name))).is_file(), name  # fmt: skip
    assert all((out / "methods" / f"{m.name}.html").is_file() for m in all_methods())


def test_the_guide_can_be_read_in_an_afternoon() -> None:
    """Words outside of code blocks, tables included."""
    guide = str(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"][0])
    pages = [path.read_text() for path, place in places().items() if f"'{place}'" in guide and path.suffix == ".md"]
    assert 15 < len(pages) <= 30
    assert sum(len(re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.M).split()) for text in pages) <= 20_000


def test_the_example_of_a_method_is_the_one_that_its_page_runs() -> None:
    assert (ROOT / "examples" / "my_method.py").read_text() in (DOCS / "own-method.md").read_text()


# The tutorial runs in a kernel, shows what it is stored with, and what its text claims is so.


STORED = nbformat.read(NOTEBOOK, as_version=4)


def execute(notebook: Path, folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ":".join(map(str, SOURCES)))
        patch.setenv("OMP_NUM_THREADS", "1")
        return run(nbformat.read(notebook, as_version=4), folder)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return execute(NOTEBOOK, tmp_path_factory.mktemp("tutorial"))


def kinds(notebook: Any) -> list[list[str]]:
    """Per cell, the types of its outputs: what two runs have in common."""
    return [
        [",".join(sorted(o.get("data", {}))) or o.output_type for o in cell.get("outputs", [])]
        for cell in notebook.cells
    ]


def accuracies(notebook: Any) -> dict[str, dict[str, float]]:
    text = next(o.text for c in notebook.cells for o in c.get("outputs", []) if o.get("name") == "stdout")
    return {
        line.split()[0]: {n: float(v) for n, v in re.findall(r"(parity|large) (\d\.\d+)", line)}
        for line in text.splitlines()
    }


def test_the_tutorial_shows_what_is_stored(executed: Any) -> None:
    assert kinds(executed) == kinds(STORED), "run python -m docs.record docs/tutorial.ipynb"


def test_its_claims_hold(executed: Any) -> None:
    for notebook in (executed, STORED):
        found = accuracies(notebook)
        assert found.keys() == {"base", "experts/parity", "experts/large", "merged"}
        assert all(found["merged"][task] > found["base"][task] for task in ("parity", "large"))
        assert max(found, key=lambda name: found[name]["parity"]) == "experts/parity"
        assert max(found, key=lambda name: found[name]["large"]) == "experts/large"


def test_the_example_merges_models_in_memory_compares_and_saves(tmp_path: Path) -> None:
    write_models(tmp_path)
    cells = execute(ROOT / "examples" / "two_models.ipynb", tmp_path).cells
    printed = "".join(o.text for c in cells for o in c.get("outputs", []) if o.get("name") == "stdout")
    assert [line.split()[0] for line in printed.splitlines()[:3]] == ["average", "ties", "actmat"]
    assert len(re.findall(r"^(by prompts|ties) +(math|code) +kept \d+%, 4 inputs$", printed, re.MULTILINE)) == 4
    assert "intact; 21 tensors, 5 files" in cells[-1].outputs[-1].data["text/plain"]
