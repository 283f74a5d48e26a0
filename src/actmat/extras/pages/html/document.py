"""The HTML document: one file with everything in it, that opens from disk and loads nothing from a network."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from actmat.diagnostics.model import write_whole
from actmat.errors import OutputError
from actmat.extras.pages.html.elements import Child, Markup, el
from actmat.version import __version__

__all__ = ["document", "write_document"]


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
