"""The templates of the pages: their environment, the texts they show, and whole documents as files.

Every text that a template shows is escaped, and signs that are not printable are written out; only `Markup` is taken as
it is. A document is one file that opens from disk and loads nothing from a network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from actmat.diagnostics.model import write_whole
from actmat.errors import OutputError, format_size
from actmat.extras.pages.html import scales
from actmat.foreign import html, terminal
from actmat.report.words import plural
from actmat.version import __version__

OWN = "actmat.extras.pages.html"
_IN_SCRIPT = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})

CAVEAT = (
    "The residual ρ checks the solution: whether the merged weights do what the rule asked of them on each expert's "
    "own directions. It is not a forecast of quality. A small ρ does not promise a good model, nor does a large one "
    "forbid it; only an evaluation on your tasks can tell."
)
"""Every table and figure of residuals shows it."""


@cache
def environment(package: str = OWN) -> Environment:
    """The environment of templates in the folder `templates` of a package, which may extend and import those here."""
    loaders = [PackageLoader(name) for name in dict.fromkeys((package, OWN))]
    made = Environment(
        loader=ChoiceLoader(loaders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: "" if value is None else html(value),
    )
    made.filters |= {f.__name__: f for f in (scales.number, scales.percent, plural, listed, dotted, spelled)}
    made.filters |= {"rho": scales.residual_text, "rho_sign": scales.residual_sign, "level": scales.residual_level}
    made.filters |= {"size": format_size, "commas": "{:,}".format, "in_svg": "{:.4f}".format}
    made.filters |= {"at": lambda share: f"{100 * share:.2f}%"}
    made.filters |= {"bar": lambda share: f"{100 * min(1.0, max(0.0, share)):.2f}"}
    style, script = (files(OWN).joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    made.globals |= {
        "caveat": CAVEAT,
        "data_block": data_block,
        "style": Markup(style),
        "script": Markup(script),
        # one script is allowed, by its hash, even if a text escaped its element
        "policy": f"default-src 'none'; script-src 'sha256-{allowed}'; style-src 'unsafe-inline'; base-uri 'none'; "
        "form-action 'none'",
        "version": __version__,
    }
    return made


def render(template: str, package: str = OWN, **values: Any) -> str:
    """A whole document; the same values give the same document."""
    return environment(package).get_template(template).render(values)


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


def listed(words: Sequence[str], most: int = 8) -> str:
    """`a, b and c`; words beyond `most` are counted."""
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def shape_text(shape: Sequence[int]) -> str:
    """`64×32`, or `scalar`."""
    return "×".join(map(str, shape)) or "scalar"


LONG_WORD = 20
"""Characters of a name without a dot that a narrow column still holds."""


def dotted(name: str) -> Markup:
    """A name that a narrow page breaks after a dot or a slash; in long words also after an underscore."""
    pieces = [
        piece
        for word in re.split(r"(?<=[./])(?=[^._/\d])", name)
        for piece in (re.split(r"(?<=_)(?=[^_\d])", word) if len(word) > LONG_WORD else [word])
    ]
    return Markup("<wbr>").join(map(html, pieces))


def spelled(text: str) -> Markup:
    """Text with what stands between backticks as code and between double stars as strong."""
    code = re.sub(r"`([^`]*)`", r"<code>\1</code>", str(html(text)))
    return Markup(re.sub(r"\*\*([^*]*)\*\*", r"<strong>\1</strong>", code))


def write_document(text: str, path: str | Path) -> Path:
    """Write a document to a file, whole or not at all; halves of surrogate pairs become `?`, a directory is refused."""
    file = Path(path)
    if os.path.isdir(file):
        raise OutputError(
            f"Expected a file to write the page to, found the directory {file}: add a name such as x.html."
        )
    return write_whole(file, text.encode("utf-8", "replace"))
