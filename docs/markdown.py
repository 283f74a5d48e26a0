"""Generated parts of pages, between `<!-- generated: KIND [NAME] -->` and `<!-- end generated -->`.

`docs.generate` fills these parts, which follow from the code. Those between `<!-- evidence: ... -->` and
`<!-- end evidence -->` follow from result files; `evidence/benchmarks/table.py` fills them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"(<!-- generated: (?P<kind>[\w-]+) ?(?P<name>[\w-]*) -->\n).*?(<!-- end generated -->)", re.DOTALL)
Kinds = Mapping[str, Callable[[str], str]]
"""Kind of a generated part -> its text by name."""


def pages() -> list[Path]:
    """Pages that may hold generated parts."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; bars in cells, and stars outside code spans, are escaped."""
    lines = [header, ["---"] * len(header), *([_escaped(cell) for cell in row] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _escaped(cell: str) -> str:
    pieces = cell.replace("|", "\\|").split("`")
    return "`".join(p if i % 2 else p.replace("*", "\\*") for i, p in enumerate(pieces))


def filled(page: str, kinds: Kinds) -> str:
    """The page with every generated part of these kinds made anew; other text is kept."""

    def made(part: re.Match[str]) -> str:
        return f"{part[1]}\n{kinds[part['kind']](part['name'])}\n{part[4]}" if part["kind"] in kinds else part[0]

    return PLACE.sub(made, page)


def main(doc: str, kinds: Kinds, files: Mapping[Path, Callable[[], str]]) -> None:
    """Command line that writes the generated parts of these kinds, and whole files, anew."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 when something is old")
    given = parser.parse_args()
    made = {p: filled(p.read_text(encoding="utf-8"), kinds) for p in pages() if p.exists()}
    made |= {file: text() for file, text in files.items()}
    stale = [p for p, text in made.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'old' if given.check else 'written'}")
        if not given.check:
            path.write_text(made[path], encoding="utf-8")
    print(f"{len(stale)} of {len(made)} files were old")
    sys.exit(bool(stale and given.check))
