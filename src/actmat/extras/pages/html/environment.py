"""Environment of the page templates, formatting of texts, and writing of documents.

Templates escape all text and unprintable characters; only `Markup` is inserted unchanged. A document is one file that
opens from disk, runs no script and loads nothing from a network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from actmat.diagnostics.model import write_whole
from actmat.errors import OutputError, format_size
from actmat.extras.pages.html import scales
from actmat.foreign import html
from actmat.report.words import plural
from actmat.version import __version__

OWN = "actmat.extras.pages.html"


@cache
def environment(package: str = OWN) -> Environment:
    """Jinja environment of a package's folder `templates`, whose templates can extend and import those here."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in dict.fromkeys((package, OWN))]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: "" if value is None else html(value),
    )
    made.filters |= {f.__name__: f for f in (scales.number, scales.percent, plural, listed, dotted)}
    made.filters |= {"rho": scales.residual_text, "level": scales.residual_level}
    made.filters |= {"size": format_size, "commas": "{:,}".format, "in_svg": "{:.4f}".format}
    made.filters |= {"at": lambda share: f"{100 * share:.2f}%"}
    made.filters |= {"bar": lambda share: f"{100 * min(1.0, max(0.0, share)):.2f}"}
    made.globals |= {
        "style": Markup(files(OWN).joinpath("style.css").read_text(encoding="utf-8")),
        "policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
        "version": __version__,
    }
    return made


def render(template: str, package: str = OWN, **values: Any) -> str:
    """Render a whole document; equal values give equal documents."""
    return environment(package).get_template(template).render(values)


def listed(words: Sequence[str], most: int = 8) -> str:
    """Join words as `a, b and c`; words beyond `most` are counted."""
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


LONG_WORD = 20
"""Number of characters without a break that fit a narrow column."""


def dotted(name: str) -> Markup:
    """Name with line break opportunities after dots and slashes, in long words also after underscores."""
    pieces = [
        piece
        for word in re.split(r"(?<=[./])(?=[^._/\d])", name)
        for piece in (re.split(r"(?<=_)(?=[^_\d])", word) if len(word) > LONG_WORD else [word])
    ]
    return Markup("<wbr>").join(map(html, pieces))


def write_document(text: str, path: str | Path) -> Path:
    """Write a document to a file atomically; lone surrogates become `?`, and a directory is refused."""
    file = Path(path)
    if os.path.isdir(file):
        raise OutputError(f"{file} is a directory; the page needs a file: add a name such as x.html.")
    return write_whole(file, [text.encode("utf-8", "replace")])
