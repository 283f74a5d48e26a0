"""Build the documentation as a site.

    python -m docs.site                 # build/site/index.html; any broken link is an error

The pages are copied to build/pages first: README.md becomes the home page, pages from elsewhere in the repository come
in, the notebook becomes a page, and a link to a file that is no page of the site becomes its path as text. In the
navigation of mkdocs.yml, `...: FOLDER` stands for the pages of a folder that are not named, `...: PAGE` for a page if
it exists. `llms.txt` lists all pages with their first sentences, for programs that read.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ELSEWHERE = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "CODE_OF_CONDUCT.md": "project/conduct.md",
    "SECURITY.md": "project/security.md",
    "LICENSE": "project/licence.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "docs/tutorial.ipynb": "tutorial.md",
}
"""Path in the repository -> path in the site, for what does not keep its place below docs/."""
IMAGES = (".png", ".svg")
AS_IS = (*IMAGES, ".css", ".js", ".json")
"""Files that are copied."""
BOOSTS = {
    **dict.fromkeys(("start.md", "cookbook.md"), 5),
    "bake.md": 10,
    **dict.fromkeys(("analyses/", "experiments/", "data-free.md", "evidence.md", "paper.md", "tune-results.md"), 0.2),
    "project/changelog.md": 0.2,
}
"""Beginning of a place in the site -> factor of its score in searches: tasks come before research, first baking, whose
words are on many pages."""
LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s]+)\)")
NOT_MARKS = re.compile(
    r"^<!-- (?:not run|file|generated|end generated|table|end table)\b.*?-->\n|<!-- n: [\w-]+ -->|<!-- /n -->",
    re.MULTILINE,
)
CELL_CODE = re.compile(r"`[^`\n]*`")


def places() -> dict[Path, str]:
    """Files of the repository -> places in the site."""
    found = {ROOT / name: place for name, place in ELSEWHERE.items()}
    for path in sorted(DOCS.rglob("*")):
        published = path.suffix != ".json" or path.parent.name == "schemas"
        if path.suffix in (".md", *AS_IS) and published and path not in found:
            found[path] = path.relative_to(DOCS).as_posix()
    return found


def relinked(text: str, page: Path, sites: dict[Path, str]) -> str:
    """A page with its links as they are in the site; code is left as it is."""
    here = Path(sites[page]).parent

    def link(match: re.Match[str]) -> str:
        place, mark, anchor = match["target"].partition("#")
        if re.match(r"\w+:", place) or not place:
            return match[0]
        target = (page.parent / place).resolve()
        if target in sites:
            return f"{match['text']}({os.path.relpath(sites[target], here)}{mark}{anchor})"
        inside = target.relative_to(ROOT) if target.is_relative_to(ROOT) else place
        return f"{match['text'][1:-1]} (`{inside}`)"

    pieces = re.split(r"(^ *```.*?^ *```|`[^`\n]*`)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(p if i % 2 else LINK.sub(link, p) for i, p in enumerate(_with_code_links(pieces)))


def _with_code_links(pieces: list[str]) -> list[str]:
    """Pieces of text and code, where code inside the text of a link belongs to the text."""
    out: list[str] = [""]
    for i, piece in enumerate(pieces):
        in_link = i % 2 and not piece.lstrip().startswith("```") and out[-1].rpartition("[")[1] and _is_open(out[-1])
        if i % 2 == 0 or in_link:
            if len(out) % 2:
                out[-1] += piece
            else:
                out.append(piece)
        else:
            out += [piece] if len(out) % 2 else ["", piece]
    return out


def _is_open(text: str) -> bool:
    """True inside the text of a link."""
    return text.count("[") > text.count("]")


def notebook_page(notebook: dict[str, Any]) -> str:
    """A notebook as a page: cells, and what they showed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text/html" in data:
                parts.append("".join(data["text/html"]))
            else:
                text = "".join(output.get("text") or data.get("text/plain", ""))
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def navigation(entries: Iterable[Any], pages: Iterable[str]) -> list[Any]:
    """The navigation with pages in place of `...: FOLDER` and `...: PAGE`; a page stands once."""
    given = list(entries)
    listed = {*_pages_of(given), *_pages_of(given, elided=True)}
    pages = sorted(pages)

    def filled(items: Iterable[Any]) -> list[Any]:
        out: list[Any] = []
        for item in items:
            if isinstance(item, dict) and "..." in item:
                folder = item["..."]
                out += [p for p in pages if p == folder or (os.path.dirname(p) == folder and p not in listed)]
            elif isinstance(item, dict):
                ((title, inner),) = item.items()
                found = filled(inner) if isinstance(inner, list) else inner
                out += [{title: found}] if found else []
            else:
                out.append(item)
        return out

    return filled(given)


def _pages_of(items: Iterable[Any], *, elided: bool = False) -> list[str]:
    """Pages that are named; or, elided, folders and pages after `...`."""
    found: list[str] = []
    for item in items:
        if isinstance(item, str):
            found += [] if elided else [item]
        elif "..." in item:
            found += [item["..."]] if elided else []
        else:
            (inner,) = item.values()
            found += _pages_of(inner, elided=elided) if isinstance(inner, list) else [] if elided else [inner]
    return found


def llms(nav: Iterable[Any], pages: Path, name: str, summary: str) -> str:
    """`llms.txt`: title, summary, and a link with the first sentence of every page, by section of the navigation."""
    lines = [f"# {name}", "", f"> {summary}"]

    def add(items: Iterable[Any], heading: str) -> None:
        inner: list[tuple[str, list[Any]]] = []
        lines.extend(["", f"## {heading}", ""])
        for item in items:
            title, target = next(iter(item.items())) if isinstance(item, dict) else ("", item)
            if isinstance(target, list):
                inner.append((title, target))
            else:
                lines.append(_described((pages / target).read_text(encoding="utf-8"), target, title))
        for title, target in inner:
            add(target, f"{heading}: {title}")

    for item in nav:
        ((title, target),) = item.items()
        add(target, title)
    return re.sub(r"\n\n## [^\n]*\n(?=\n*(?:## |\Z))", "", "\n".join(lines)) + "\n"


def _described(text: str, place: str, title: str) -> str:
    """A line of `llms.txt`: title of a page, its place, its first sentence."""
    body = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    heading = re.search(r"^# (.*)$", body, re.MULTILINE)
    paragraphs = re.split(r"\n[ \t]*\n", NOT_MARKS.sub("", body).strip())
    first = next((p for p in paragraphs if not p.startswith(("#", "|", "```", "<", "!", ">", " ", "* ", "- "))), "")
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(first.split()))
    sentence = re.split(r"(?<=[.:;?!]) ", plain, maxsplit=1)[0].rstrip(".:; ")
    said = f": {sentence}" if sentence else ""
    return f"- [{title or (heading[1] if heading else place)}]({Path(place).with_suffix('.html').as_posix()}){said}"


def unescaped(text: str) -> str:
    """A page whose code in tables has plain bars: unlike GitHub, Python-Markdown shows a backslash before them."""

    def plain(line: str) -> str:
        return CELL_CODE.sub(lambda m: m[0].replace("\\|", "|"), line) if line.startswith("|") else line

    return "".join(map(plain, text.splitlines(keepends=True)))


def stage(folder: Path) -> list[str]:
    """Copy the pages, images and styles to a folder; returns the pages."""
    sites = places()
    shutil.rmtree(folder, ignore_errors=True)
    pages = []
    for path, place in sites.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in AS_IS:
            shutil.copyfile(path, target)
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            text = notebook_page(json.loads(text))
        elif path.name == "LICENSE":
            text = f"# Licence\n\n```text\n{text.rstrip()}\n```\n"
        boost = next((factor for start, factor in BOOSTS.items() if place.startswith(start)), 1)
        head = f"---\nsearch: {{boost: {boost}}}\n---\n" if boost != 1 else ""
        target.write_text(head + relinked(unescaped(NOT_MARKS.sub("", text)), path, sites), encoding="utf-8")
        pages.append(place)
    return pages


def build(out: Path, work: Path) -> list[str]:
    """Stage the pages and build the site; what is wrong with it, such as links that lead nowhere.

    Args:
        out: folder of the site.
        work: folder for the pages and the configuration.
    """
    pages = stage(work / "pages")
    given = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    given |= {"docs_dir": "pages", "site_dir": str(out.resolve()), "nav": navigation(given["nav"], pages)}
    text = llms(given["nav"], work / "pages", given["site_name"], given["site_description"])
    (work / "pages" / "llms.txt").write_text(text.replace("/README.html", "/index.html"), encoding="utf-8")
    return run_mkdocs(given, work)


def run_mkdocs(config: dict[str, Any], work: Path) -> list[str]:
    """Build a site in a folder; all warnings, for which `mkdocs build --strict` would stop."""
    from mkdocs.commands.build import build as build_site
    from mkdocs.config import load_config

    (work / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    warnings: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    logger, kept = logging.getLogger("mkdocs"), Kept(logging.WARNING)
    logger.addHandler(kept)
    try:
        build_site(load_config(str(work / "mkdocs.yml")))
    finally:
        logger.removeHandler(kept)
    return warnings


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site")
    given = parser.parse_args()
    work = ROOT / "build" / "docs"
    work.mkdir(parents=True, exist_ok=True)
    found = build(given.out, work)
    print("\n".join([*found, f"{given.out}: {len(found)} warnings"]))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
