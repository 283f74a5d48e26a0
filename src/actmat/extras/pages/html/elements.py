"""HTML by construction: every text that is not `Markup` is escaped, every element is closed; and the whole document.

`el("p", "a < b", class_="x")` gives `<p class="x">a &lt; b</p>`, as `Markup`, which other elements take as it is. A
document is one file that opens from disk and loads nothing from a network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup as Markup

from actmat.diagnostics.model import write_whole
from actmat.errors import OutputError
from actmat.foreign import html, terminal
from actmat.version import __version__

Child = str | int | Markup | None

_VOID = frozenset({"meta", "rect", "path", "line", "input", "wbr"})
_IN_SCRIPT = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


def el(tag: str, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """One element with children: texts (escaped), elements, or None for nothing.

    Attributes lose an underscore at the end, others turn into dashes; None and False leave one out, True has no value.
    """
    opening = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Markup(f"<{tag}{opening}>" if tag in {"meta", "input", "wbr"} else f"<{tag}{opening}/>")
    return Markup(f"<{tag}{opening}>{join(children)}</{tag}>")


def _attribute(name: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html(value)}"'


def join(children: Iterable[Child]) -> Markup:
    """Several children as one; texts are escaped."""
    return Markup("").join(html(c) for c in children if c is not None)


def data_block(name: str, data: Any) -> Markup:
    """Data for the script, in an element that no browser executes and no string can end.

    `<`, `>` and `&` are written as JSON escapes, so that `</script>` or `<!--` in a name stays part of a string.
    """
    text = json.dumps(_printable(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(f'<script type="application/json" id="{html(name)}">{text.translate(_IN_SCRIPT)}</script>')


def _printable(data: Any) -> Any:
    """Data with the texts that elements show for the same texts, so that the script finds one by the other."""
    if isinstance(data, str):
        return terminal(data, keep="\n\t")
    if isinstance(data, Mapping):
        return {_printable(k): _printable(v) for k, v in data.items()}
    return [_printable(v) for v in data] if isinstance(data, list | tuple) else data


CAVEAT = (
    "The residual ρ checks the solution: whether the merged weights do what the rule asked of them on each expert's "
    "own directions. It is not a forecast of quality. A small ρ does not promise a good model, nor does a large one "
    "forbid it; only an evaluation on your tasks can tell."
)
"""Every table and figure of residuals shows it."""


def caveat(role: str | None = None) -> Markup:
    """The caveat as a paragraph."""
    return el("p", CAVEAT, class_="caveat", role=role)


def listed(words: Sequence[str], most: int = 8) -> str:
    """`a, b and c`; words beyond `most` are counted."""
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def shape_text(shape: Sequence[int]) -> str:
    """`64×32`, or `scalar`."""
    return "×".join(map(str, shape)) or "scalar"


def section(name: str, title: str, *children: Child, lead: Child = None) -> Markup:
    """A part of the page with an anchor, a title and an introductory sentence."""
    heading = el("h2", title, id=f"{name}-title")
    intro = el("p", lead, class_="lead") if lead is not None else None
    return el("section", heading, intro, *children, id=name, aria_labelledby=f"{name}-title")


def bullets(sentences: Iterable[Child]) -> Markup:
    """A list of sentences."""
    return el("ul", *(el("li", s) for s in sentences), class_="plain")


def tiles(entries: Iterable[tuple[str, str, str]]) -> Markup:
    """Headline numbers: (value, meaning, class)."""
    return el("ul", *(el("li", el("b", v), el("span", w), class_=c or None) for v, w, c in entries), class_="tiles")


def table(head: Child, rows: Iterable[Child], *, caption: str, seen: bool = False, class_: str | None = None) -> Markup:
    """A table of a head row and body rows; its caption is for screen readers unless `seen`."""
    title = el("caption", caption, class_=None if seen else "unseen")
    return el("table", title, el("thead", head), el("tbody", *rows), class_=class_)


def head_row(titles: Iterable[Child]) -> Markup:
    """The headings of columns."""
    return el("tr", *(el("th", t, scope="col") for t in titles))


def long_part(title: str, *children: Child) -> Markup:
    """A long part of a section: open on a wide screen, where scripts run, and behind its title elsewhere."""
    return el("details", el("summary", title), *children, class_="long")


def scrollable(inner: Markup, label: str) -> Markup:
    """A region that scrolls sideways where the page is too narrow for a table."""
    return el("div", inner, class_="scroll", tabindex="0", role="region", aria_label=label)


def columns_table(head: Iterable[Child], rows: Iterable[Iterable[Child]], *, caption: str) -> Markup:
    """A plain table that scrolls sideways; the first cell of each row is its heading."""
    body = (el("tr", el("th", first, scope="row"), *(el("td", c) for c in rest)) for first, *rest in map(list, rows))
    return scrollable(table(head_row(head), body, caption=caption, seen=True), caption)


def stacked_table(head: Sequence[str], rows: Iterable[Sequence[Child]], *, caption: str) -> Markup:
    """A table whose rows become cards on a narrow screen; the first cell of each row is its heading."""
    body = []
    for first, *rest in rows:
        cells = (el("td", el("div", c), data_label=h) for h, c in zip(head[1:], rest, strict=True))
        body.append(el("tr", el("th", first, scope="row"), *cells))
    return table(head_row(head), body, caption=caption, class_="stack")


def tensor_link(name: str, shown: str | None = None) -> Markup:
    """A link that looks the tensor up in the table of tensors."""
    return el("a", el("code", *dotted(shown or name)), href="#tensors", data_find=name, class_="find")


LONG_WORD = 20
"""Characters of a name without a dot that a narrow column still holds."""


def dotted(name: str) -> list[Child]:
    """A name that a narrow page breaks after a dot or a slash; in long words also after an underscore."""
    words = [
        piece
        for word in re.split(r"(?<=[./])(?=[^._/\d])", name)
        for piece in (re.split(r"(?<=_)(?=[^_\d])", word) if len(word) > LONG_WORD else [word])
    ]
    return [c for w in words[:-1] for c in (w, el("wbr"))] + [words[-1]]


def code_block(text: str) -> Markup:
    """Text to copy, with a button if scripts run."""
    button = el("button", "Copy", type="button", class_="copy", hidden=True)
    return el("div", el("pre", el("code", text), tabindex="0"), button, class_="code")


def document(title: str, subtitle: Child, sections: Sequence[tuple[str, str, Markup | None]], *, made: str) -> str:
    """A whole document of sections: anchor, short name for the navigation, content; those without one are left out.

    The content security policy allows one script, by its hash, even if a text escaped its element.
    """
    style, script = _asset("style.css"), _asset("script.js")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{allowed}'; style-src 'unsafe-inline'; base-uri 'none'; "
        "form-action 'none'"
    )
    shown = [(name, short, content) for name, short, content in sections if content is not None]
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="generator", content=f"actmat {__version__}"),
        el("title", title),
        Markup(f"<style>{style}</style>"),
    )
    links = el("ul", *(el("li", el("a", short, href=f"#{name}")) for name, short, _ in shown))
    body = el(
        "body",
        el("a", "To the content", href="#content", class_="skip"),
        el("header", el("h1", title), el("p", subtitle)),
        el("nav", el("button", "Sections", type="button", class_="menu", hidden=True), links, aria_label="Sections"),
        el("main", *(content for _, _, content in shown), id="content"),
        el("footer", el("p", made)),
        el("div", id="tip", role="tooltip", hidden=True),
        Markup(f"<script>{script}</script>"),
    )
    return f"<!DOCTYPE html>\n{el('html', head, body, lang='en')}\n"


def _asset(name: str) -> str:
    return files("actmat.extras.pages.html").joinpath(name).read_text(encoding="utf-8")


def write_document(text: str, path: str | Path) -> Path:
    """Write a document to a file, whole or not at all; halves of surrogate pairs become `?`, a directory is refused."""
    file = Path(path)
    if os.path.isdir(file):
        raise OutputError(
            f"Expected a file to write the page to, found the directory {file}: add a name such as x.html."
        )
    return write_whole(file, text.encode("utf-8", "replace"))
