"""The license of a merged model, from those that the cards of its inputs state. Names are compared: no legal advice."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from actmat.bounds import read_bytes
from actmat.checkpoints.source import Source
from actmat.engine.inputs import Inputs
from actmat.errors import MergeError
from actmat.foreign import markdown, terminal

MAX_TEXT = 1 << 20
"""Most bytes of a card."""

PERMISSIVE = frozenset(
    (
        *("apache-2.0", "mit", "bsd", "bsd-2-clause", "bsd-3-clause", "bsd-3-clause-clear", "isc", "zlib", "unlicense"),
        *("wtfpl", "cc0-1.0", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "afl-3.0", "artistic-2.0"),
        *("bsl-1.0", "ncsa", "postgresql", "ms-pl", "odc-by", "pddl"),
    )
)
"""Identifiers of licenses, as the hub has them, that let a derived work have another license, notices kept."""


@dataclass(frozen=True, slots=True)
class Card:
    """The parts of a model card that a merge uses.

    Args:
        licenses: identifiers, in the order of the card; of `other`, its name.
        notes: conflicts of a merged model, as its card states them.
    """

    licenses: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LicensedInput:
    """An input of a merge: its label, its id on the hub (empty elsewhere), and its licenses (none: unknown)."""

    label: str
    hub_id: str = ""
    licenses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CombinedLicense:
    """The license of a merged model.

    Args:
        head: lines of the card's head; empty if a person must decide it.
        text: sentences for the card.
    """

    head: Mapping[str, str | list[str]]
    text: str


def read_card(text: str) -> Card:
    r"""Licenses of a model card; those of a damaged one are unknown.

    >>> read_card("---\nlicense: other\nlicense_name: my-terms\n---\n# Model").licenses
    ('my-terms',)
    """
    head = re.match(r"\s*---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    data: object = None
    with contextlib.suppress(yaml.YAMLError, RecursionError, ValueError):
        data = yaml.safe_load(head[1]) if head else None
    if not isinstance(data, dict):
        return Card()
    stated = data.get("license")
    listed = [x for x in (stated if isinstance(stated, list) else [stated]) if isinstance(x, str) and x.strip()]
    name = data.get("license_name")
    known = [str(name) if x == "other" and isinstance(name, str) else x for x in listed if x != "unknown"]
    notes = re.findall(r"^\*\*Conflict\*\*: (.*)$", text, re.MULTILINE)
    named = tuple(terminal(x.strip().lower())[:80] for x in known)
    return Card(named, tuple(f"the card names a conflict: {n}" for n in notes))


def origins_of(inputs: Inputs) -> list[LicensedInput]:
    """Origins of the inputs, and their licenses; cards on the hub are fetched at the commit that was merged."""
    folders = {"base": inputs.base.folder} if inputs.base is not None else {}
    folders |= {label: e.model.folder for label, e in zip(inputs.labels, inputs.experts, strict=True)}
    origins = []
    for label, folder in folders.items():
        sources = {source.hub_id or source.location: source for source in folder.files}
        origins += [
            LicensedInput(f"{label} ({name})" if len(sources) > 1 else label, source.hub_id, _licenses(source))
            for name, source in sources.items()
        ] or [LicensedInput(label)]
    return origins


def _licenses(source: Source) -> tuple[str, ...]:
    """Licenses that the card of an input states; empty without a card."""
    with contextlib.suppress(MergeError, OSError):  # an input that was read, whose card cannot be: unknown
        if "README.md" in source.names:
            return read_card(read_bytes(source.fetch("README.md"), most=MAX_TEXT).decode("utf-8", "replace")).licenses
    return ()


def combine(origins: Sequence[LicensedInput]) -> CombinedLicense:
    """The license of a model that is made of all inputs.

    A license that all share is kept. Permissive ones are all listed. One that is not permissive holds for all, with the
    notices of the others. Two of these conflict: neither allows terms beyond its own, so a person must decide. If the
    license of an input is unknown, nothing is stated.

    >>> combine([LicensedInput("base", "", ("llama3.1",)), LicensedInput("math", "", ("apache-2.0",))]).head
    {'license': 'llama3.1'}
    """
    by_license: dict[str, list[str]] = {}
    for origin in origins:
        for license in origin.licenses:
            by_license.setdefault(license, []).append(origin.label)
    unknown = [o.label for o in origins if not o.licenses]
    strict = [name for name in by_license if name not in PERMISSIVE]
    stated = "; ".join(f"`{_plain(n)}`: {', '.join(map(markdown, labels))}" for n, labels in by_license.items())
    text = f"Licenses that the inputs state: {stated or 'none'}."
    if unknown:
        text += f" None was found for {', '.join(map(markdown, unknown))}."
    if len(strict) > 1:
        pairs = " and ".join(f"{n} ({', '.join(by_license[n])})" for n in strict)
        conflict = f"{pairs} are not one license, and neither is permissive. Ask their owners, or leave one out."
        head: dict[str, str | list[str]] = {"license": "other", "license_name": "conflict"}
        return CombinedLicense(head, f"{text}\n\n**Conflict**: {markdown(conflict)}")
    if unknown:
        return CombinedLicense({}, f"{text} The license of this model is not stated here: find out, and add it.")
    chosen = strict or list(by_license)
    others = [n for n in by_license if n not in chosen]
    text += f" License of this model: {', '.join(f'`{_plain(n)}`' for n in chosen)}."
    if others:
        text += f" The notices of {', '.join(f'`{_plain(n)}`' for n in others)} must be kept."
    return CombinedLicense({"license": chosen[0] if len(chosen) == 1 else chosen}, text)


def _plain(name: str) -> str:
    """A name inside a code span."""
    return terminal(name).replace("`", "'").replace("|", "/")
