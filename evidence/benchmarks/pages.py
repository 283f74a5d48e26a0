"""Parts of pages that `benchmarks.table` fills.

They stand between `<!-- evidence: KIND [NAME] -->` and `<!-- end evidence -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.provenance import REPOSITORY

PART = re.compile(r"(<!-- evidence: (?P<kind>[\w-]+) ?(?P<name>[\w-]*) -->\n).*?(<!-- end evidence -->)", re.DOTALL)
Kinds = Mapping[str, Callable[[str], str]]
"""Kind of a part -> its text by name."""


def pages() -> dict[Path, str]:
    """Pages that may hold such parts, with their texts."""
    paths = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "evidence").rglob("*.md")]
    return {path: path.read_text(encoding="utf-8") for path in sorted(paths)}


def filled(page: str, kinds: Kinds) -> str:
    """The page with every part made anew.

    Raises:
        KeyError: a part is of no kind.
    """
    return PART.sub(lambda part: f"{part[1]}\n{kinds[part['kind']](part['name'])}\n{part[4]}", page)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; bars in cells, and stars outside code spans, are escaped."""
    lines = [header, ["---"] * len(header), *([_escaped(cell) for cell in row] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _escaped(cell: str) -> str:
    pieces = cell.replace("|", "\\|").split("`")
    return "`".join(p if i % 2 else p.replace("*", "\\*") for i, p in enumerate(pieces))
