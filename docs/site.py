"""Build the documentation as a site.

    python -m docs.site                 # build/site/index.html; any broken link is an error

The pages are copied to build/pages first: README.md becomes the home page, pages from elsewhere in the repository come
in, the notebook becomes a page, and a link to a file outside of the site becomes its path as text. In the navigation of
mkdocs.yml, `...: FOLDER` stands for the pages of a folder that are not named.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import yaml
from docs.equations import typeset
from docs.markdown import ROOT

DOCS = ROOT / "docs"
ELSEWHERE = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "CODE_OF_CONDUCT.md": "project/conduct.md",
    "SECURITY.md": "project/security.md",
    "evidence/benchmarks/README.md": "project/benchmarks.md",
    "docs/tutorial.ipynb": "tutorial.md",
    "examples/two_models.ipynb": "two-models.md",
}
"""Path in the repository -> path in the site, for what does not keep its place below docs/."""
AS_IS = (".png", ".svg", ".css", ".js", ".json")
"""Files that are copied."""
CODE_OR_LINK = re.compile(
    r"(?P<code>^ *```.*?^ *```|`[^`\n]*`)"
    r"|(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)
"""What begins first counts: code inside the text of a link belongs to the link, a link inside of code to the code."""
NOT_MARKS = re.compile(r"^<!-- (?:not run|file|(?:end )?generated|(?:end )?evidence)\b.*?-->\n", re.MULTILINE)
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
        if match["code"]:
            return match[0]
        place, mark, anchor = match["target"].partition("#")
        if re.match(r"\w+:", place) or not place:
            return match[0]
        target = (page.parent / place).resolve()
        if target in sites:
            return f"{match['text']}({os.path.relpath(sites[target], here)}{mark}{anchor})"
        inside = target.relative_to(ROOT) if target.is_relative_to(ROOT) else place
        return f"{match['text'][1:-1]} (`{inside}`)"

    return CODE_OR_LINK.sub(link, text)


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


def navigation(entries: Iterable[Any], pages: Collection[str]) -> list[Any]:
    """The navigation with the pages that it does not name in place of `...: FOLDER`."""
    entries = list(entries)
    others = [page for page in sorted(pages) if f"'{page}'" not in str(entries)]

    def filled(items: Iterable[Any]) -> list[Any]:
        out: list[Any] = []
        for item in items:
            if isinstance(item, str):
                out.append(item)
            elif "..." in item:
                out += [page for page in others if os.path.dirname(page) == item["..."]]
            else:
                out += [{title: filled(inner) if isinstance(inner, list) else inner} for title, inner in item.items()]
        return out

    return filled(entries)


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
        if path.parent.name in ("methods", "post", "analyses") or path.stem == "spaces":
            text = typeset(text)  # their indented blocks are equations
        target.write_text(relinked(unescaped(NOT_MARKS.sub("", text)), path, sites), encoding="utf-8")
        pages.append(place)
    return pages


def build(out: Path, work: Path) -> None:
    """Stage the pages and build the site.

    Args:
        out: folder of the site.
        work: folder for the pages and the configuration.

    Raises:
        mkdocs.exceptions.Abort: something is wrong, such as links that lead nowhere; each has a line in the log.
    """
    from mkdocs.commands.build import build as build_site
    from mkdocs.config import load_config

    pages = stage(work / "pages")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    config |= {"docs_dir": "pages", "site_dir": str(out.resolve()), "nav": navigation(config["nav"], pages)}
    if repository := os.environ.get("GITHUB_REPOSITORY"):  # the workflow that publishes the site knows its address
        config["repo_url"] = f"{os.environ['GITHUB_SERVER_URL']}/{repository}"
    (work / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    build_site(load_config(str(work / "mkdocs.yml"), strict=True))


def main() -> None:
    """Build the site; exit status 1 when something is wrong with it."""
    out, work = ROOT / "build" / "site", ROOT / "build" / "docs"
    work.mkdir(parents=True, exist_ok=True)
    build(out, work)
    print(out / "index.html")


if __name__ == "__main__":
    main()
