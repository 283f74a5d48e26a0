"""Documentation is true: every python, bash and console block runs, every internal link leads somewhere."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.docs_run import Run, agrees, run_page, steps
from tests.helpers.repository import ROOT, tracked_files

LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)[^)]*\)")
HEADING = re.compile(r"^#+ +(.*)$")


def pages() -> list[Path]:
    """Every Markdown page of the repository."""
    return sorted(p for p in tracked_files() if p.suffix == ".md")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


LONG = re.compile(
    r"docs/(?:commands/(?:analyze|diagnose|extract|inspect|merge|plan|statistics|try|tune|verify)"
    r"|analyses/drift|averaging|formats/(?:quantized|recipe|training)|inputs|remote|start|vocabularies)[.]md"
)
"""Pages of 4 to 33 seconds: slow tests. What they show is tested elsewhere, too; the README runs in every test run."""


def page_case(page: Path) -> object:
    """A page as a case of a test, slow if it takes long."""
    return pytest.param(page, id=name(page), marks=[pytest.mark.slow] if LONG.fullmatch(name(page)) else [])


@pytest.mark.parametrize("page", [page_case(p) for p in pages() if steps(p.read_text())])
def test_blocks_run(page: Path, models: Path, tmp_path: Path) -> None:
    directory = tmp_path / "page"
    shutil.copytree(models, directory)
    done = run_page(name(page), page.read_text(), directory)
    assert done.returncode == 0, done.log[-8000:]
    assert not (stale := done.differences(page.read_text())), "run python -m docs.record\n" + "\n".join(stale)


# Links


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines outside fenced blocks."""
    inside = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip().startswith("```"):
            inside = not inside
        elif not inside:
            yield number, line


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for _, line in prose(text):
        if heading := HEADING.match(line):
            words = re.sub(r"[^\w\- ]", "", heading[1].lower()).strip()
            found.add(words.replace(" ", "-"))
    return found


def broken_links(page: Path) -> list[str]:
    found = []
    for number, line in prose(page.read_text()):
        for link in LINK.finditer(re.sub(r"`[^`]*`", "", line)):
            place, _, anchor = link["target"].partition("#")
            if re.match(r"\w+:", place):
                continue  # another site
            target = (page.parent / place).resolve() if place else page
            if not target.exists():
                found.append(f"line {number}: there is no {place}")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
                found.append(f"line {number}: {target.name} has no heading #{anchor}")
    return found


def test_links_lead_somewhere() -> None:
    assert not {name(page): found for page in pages() if (found := broken_links(page))}


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `name`, and more\n[a](page.md) [b](#a-name-and-more) [c](https://a.org/x) `[d](code)`\n"
        "[e](gone.md)\n[f](page.md#gone)\n```text\n[g](gone.md)\n```\n"
    )
    assert broken_links(page) == ["line 3: there is no gone.md", "line 4: page.md has no heading #gone"]


# The runner itself


def run_in(folder: Path, page: str) -> Run:
    folder.mkdir()
    return run_page("page.md", page, folder)


@pytest.mark.parametrize(
    ("page", "where"),
    [("a\n```bash\nfalse\ntrue\n```\n", "page.md:3"), ("```python\nx = 1\nassert x == 2\n```\n", '"page.md", line 3')],
)
def test_a_failing_block_fails_the_page(page: str, where: str, tmp_path: Path) -> None:
    done = run_in(tmp_path / "page", page)
    assert done.returncode != 0
    assert where in done.log


@pytest.mark.parametrize(
    ("shown", "real", "same"),
    [
        (("a", "b"), ["a", "b", ""], True),
        (("a", "...", "d"), ["a", "b", "c", "d"], True),
        (("...", "d"), ["d"], True),
        (("in 0.1 s",), ["in 12.5 s"], True),
        (("hash " + "0" * 32,), ["hash " + "f" * 32], True),
        (("a",), ["a", "b"], False),
        (("3 tensors",), ["4 tensors"], False),
        (("a.b",), ["axb"], False),
    ],
)
def test_shown_output_is_compared(shown: tuple[str, ...], real: list[str], same: bool) -> None:
    assert agrees(shown, real) is same


def test_a_page_that_shows_other_output_is_found(tmp_path: Path) -> None:
    page = "```console\n$ echo one\none\n$ echo 1 >&2\n2\n$ echo unseen\n```\n"
    done = run_in(tmp_path / "page", page)
    assert done.outputs == {2: ["one"], 4: ["1"], 6: ["unseen"]}
    assert done.differences(page) == ["line 4: $ echo 1 >&2\n1"]
