"""The paper's numbered things: found in its LaTeX source, and the table of docs/paper.md that says where each is here.

    python -m docs.labels PAPER.tex         # every numbered or labelled thing, as lines of JSON

`paper.json` keeps the list (label, kind, number) with a few words, the place here and the difference. A test
compares it with the page, and with the source where the environment variable ACTMAT_PAPER names one.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("paper.json")
Table = Callable[[list[str], list[list[str]]], str]

TOKEN = re.compile(
    r"\\(?P<name>appendix|section|subsection|paragraph|caption|notag)(?![a-z*])|\\captionof\{(?P<kind>\w+)\}"
    r"|\\(?P<edge>begin|end)\{(?P<environment>[\w*]+)\}(?:\[[^]]*\]\{(?P<restated>\w+)\})?"
    r"|\\label\{(?P<label>[^}]*)\}|(?P<row>\\\\)"
)
STATEMENTS = ("theorem", "lemma", "proposition")
"""They share a counter within a section; the source declares none for propositions."""
EQUATIONS = ("equation", "multline", "align")
"""Each is one number, and every row of `align` without a `notag`."""
FLOATS = ("figure", "table")


@dataclass
class Item:
    """One numbered thing; `label` is empty where the source gives none."""

    label: str
    kind: str
    number: str


def labelled(source: str) -> list[Item]:
    """Everything that LaTeX numbers in the source, and labels of paragraphs, in its order."""
    body = re.sub(r"(?<!\\)%.*", "", source).partition(r"\begin{document}")[2].partition(r"\end{document}")[0]
    reader = _Reader()
    for match in TOKEN.finditer(body):
        reader.take(match)
    return reader.items


class _Reader:
    """LaTeX's counters, as far as this source uses them."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._counts: Counter[str] = Counter()
        self._appendix = False
        self._open: list[str] = []
        self._current: Item | None = None
        self._silent = False

    def take(self, match: re.Match[str]) -> None:
        """One token."""
        if match["edge"]:
            self._edge(match["edge"], match["environment"], match["restated"] or match["environment"])
        elif match["label"] is not None:
            self._label(match["label"])
        elif match["row"]:
            if self._open and self._open[-1] == "align":
                self._end_row()
                self._new("equation", self._next("equation"))
        elif match["kind"]:
            self._new(match["kind"], self._next(match["kind"]))
        else:
            self._named(match["name"])

    def _named(self, name: str) -> None:
        if name == "appendix":
            self._appendix, self._counts["section"] = True, 0
        elif name == "section":
            self._next("section")
            self._counts["subsection"] = self._counts["statement"] = 0
            self._new("section", self._section())
        elif name == "subsection":
            self._new("section", f"{self._section()}.{self._next('subsection')}")
        elif name == "paragraph":
            self._current = Item("", "paragraph", self._section())
        elif name == "notag":
            self._silent = True
        elif name == "caption":
            kind = next(e.rstrip("*") for e in reversed(self._open) if e.rstrip("*").endswith(FLOATS))
            if kind == "subfigure":
                letter = "abc"[int(self._next("subfigure")) - 1]
                self._new("figure", f"{self._counts['figure'] + 1}{letter}")
            else:
                self._new(kind, self._next(kind))

    def _edge(self, edge: str, environment: str, kind: str) -> None:
        """Begin or end of an environment; `kind` is the statement that a `restatable` holds."""
        if edge == "end":
            assert self._open.pop() == environment, environment
            if environment == "align":
                self._end_row()
            return
        self._open.append(environment)
        if kind in STATEMENTS:
            self._new(kind, f"{self._section()}.{self._next('statement')}")
        elif kind in EQUATIONS:
            self._new("equation", self._next("equation"))
        elif kind == "figure":
            self._counts["subfigure"] = 0

    def _end_row(self) -> None:
        """Take the number back from a row of `align` that has none."""
        if self._silent:
            self.items.pop()
            self._counts["equation"] -= 1
            self._silent = False

    def _label(self, label: str) -> None:
        assert self._current is not None, label
        if self._current.kind == "paragraph":
            self.items.append(self._current)
        self._current.label = label

    def _next(self, counter: str) -> str:
        self._counts[counter] += 1
        return str(self._counts[counter])

    def _section(self) -> str:
        count = self._counts["section"]
        return "ABCDEFGH"[count - 1] if self._appendix else str(count)

    def _new(self, kind: str, number: str) -> None:
        self._current = Item("", kind, number)
        self.items.append(self._current)


def paper_table(table: Table) -> str:
    """The list of `paper.json` as a table; things without words of their own stand with the one before them."""
    groups: list[list[dict[str, Any]]] = []
    for entry in json.loads(FILE.read_text(encoding="utf-8")):
        if "words" in entry:
            groups.append([])
        groups[-1].append(entry)
    return table(["item", "label", "in a few words", "here", "differs"], [_line(group) for group in groups])


def _line(group: list[dict[str, Any]]) -> list[str]:
    first = group[0]
    numbers = "-".join(_shown(entry) for entry in (group if len(group) == 1 else (first, group[-1])))
    labels = ", ".join(f"`{entry['label']}`" for entry in group if entry["label"])
    return [numbers, labels, first["words"], first.get("here", ""), first.get("differs", "")]


def _shown(entry: dict[str, Any]) -> str:
    if entry["kind"] == "equation":
        return f"({entry['number']})"
    kind = "section" if entry["kind"] == "paragraph" else entry["kind"]
    return f"{kind.capitalize()} {entry['number']}"


if __name__ == "__main__":
    for item in labelled(Path(sys.argv[1]).read_text(encoding="utf-8")):
        print(json.dumps(vars(item)))
