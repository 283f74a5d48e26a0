"""Elements that sections are made of: headings, lists, tables, links, text to copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actmat.report.html.markup import Child, Markup, el

__all__ = [
    "bullets",
    "code_block",
    "columns_table",
    "head_row",
    "scrollable",
    "section",
    "stacked_table",
    "table",
    "tensor_link",
    "tiles",
]


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
    words = (shown or name).split(".")
    breakable = [c for w in words[:-1] for c in (w + ".", el("wbr"))]
    return el("a", el("code", *breakable, words[-1]), href="#tensors", data_find=name, class_="find")


def code_block(text: str) -> Markup:
    """Text to copy, with a button if scripts run."""
    button = el("button", "Copy", type="button", class_="copy", hidden=True)
    return el("div", el("pre", el("code", text), tabindex="0"), button, class_="code")
