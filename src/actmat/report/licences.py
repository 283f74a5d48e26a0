"""The licence of a merged model, from those that the cards of its inputs state. Names are compared: no legal advice."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import yaml

from actmat.bounds import read_bytes
from actmat.checkpoints.resolve import find_source, hub_id_of
from actmat.errors import MergeError
from actmat.foreign import in_one_line, markdown, terminal
from actmat.planning.model import InputSummary

MAX_TEXT = 1 << 20
"""Bytes of a card."""

PERMISSIVE = frozenset(
    (
        *("apache-2.0", "mit", "bsd", "bsd-2-clause", "bsd-3-clause", "bsd-3-clause-clear", "isc", "zlib", "unlicense"),
        *("wtfpl", "cc0-1.0", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "afl-3.0", "artistic-2.0"),
        *("bsl-1.0", "ncsa", "postgresql", "ms-pl", "odc-by", "pddl"),
    )
)
"""Identifiers of licences, as the hub has them, that let a derived work have another licence, notices kept."""


@dataclass(frozen=True, slots=True)
class Card:
    """The parts of a model card that a merge uses.

    Args:
        licences: identifiers, in the order of the card; the name of one that is called `other`.
        link: of a licence that is called `other`.
        notes: conflicts of a merged model, as its card states them.
    """

    licences: tuple[str, ...] = ()
    link: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Origin:
    """An input of a merge: its label, its id on the hub (empty elsewhere), and its licences (none: unknown)."""

    label: str
    hub_id: str = ""
    licences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CombinedLicence:
    """The licence of a merged model.

    Args:
        head: lines of the card's head; none where it must be decided by a person.
        text: sentences for the card.
        conflict: the sentence that names licences which do not go together; empty if they do.
    """

    head: Mapping[str, str | list[str]]
    text: str
    conflict: str = ""


def read_card(text: str) -> Card:
    r"""Licences of a model card; those of a damaged one are unknown.

    >>> read_card("---\nlicense: other\nlicense_name: my-terms\n---\n# Model").licences
    ('my-terms',)
    """
    head = re.match(r"\s*---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    data: object = None
    with contextlib.suppress(yaml.YAMLError, RecursionError, ValueError):
        data = yaml.safe_load(head[1]) if head else None
    if not isinstance(data, dict):
        return Card()
    given = data.get("license")
    listed = [x for x in (given if isinstance(given, list) else [given]) if isinstance(x, str) and x.strip()]
    name, link = data.get("license_name"), data.get("license_link")
    named = [str(name) if x == "other" and isinstance(name, str) else x for x in listed if x != "unknown"]
    notes = re.findall(r"^\*\*Conflict\*\*: (.*)$", text, re.MULTILINE)
    return Card(tuple(terminal(x.strip().lower())[:80] for x in named), link if isinstance(link, str) else "",
                tuple(f"the card names a conflict: {n}" for n in notes))  # fmt: skip


def origins_of(inputs: Iterable[InputSummary]) -> list[Origin]:
    """Origins of the inputs, and their licences; cards on the hub are fetched at the commit that was merged."""
    found = []
    for given in inputs:
        for place in given.models or (given.location,):
            hub_id = hub_id_of(place)
            name = place.partition("@")[0] if hub_id else place
            pinned = f"{name}@{given.commit}" if hub_id and given.commit and not given.models else place
            found.append(Origin(given.label + (f" ({name})" if given.models else ""), hub_id, _licences(pinned)))
    return found


def _licences(location: str) -> tuple[str, ...]:
    """Licences that the card of an input states; none without a card."""
    with contextlib.suppress(MergeError, OSError):  # an input that was read, whose card cannot be: unknown
        source = find_source(location)
        if "README.md" in source.names:
            return read_card(read_bytes(source.fetch("README.md"), most=MAX_TEXT).decode("utf-8", "replace")).licences
    return ()


def combine(origins: Sequence[Origin]) -> CombinedLicence:
    """The licence of a model that is made of all inputs.

    One that all share is its own. Of permissive ones all are listed. One that is not permissive holds for all, with the
    notices of the others. Two of these conflict: neither allows terms beyond its own, so a person must decide. With an
    input whose licence is unknown nothing is stated.

    >>> combine([Origin("base", "", ("llama3.1",)), Origin("math", "", ("apache-2.0",))]).head
    {'license': 'llama3.1'}
    """
    by_licence: dict[str, list[str]] = {}
    for origin in origins:
        for licence in origin.licences:
            by_licence.setdefault(licence, []).append(origin.label)
    unknown = [o.label for o in origins if not o.licences]
    strict = [name for name in by_licence if name not in PERMISSIVE]
    stated = "; ".join(f"`{_plain(n)}`: {', '.join(map(markdown, labels))}" for n, labels in by_licence.items())
    text = f"Licences that the inputs state: {stated or 'none'}."
    if unknown:
        text += f" None was found for {', '.join(map(markdown, unknown))}."
    if len(strict) > 1:
        pairs = " and ".join(f"{n} ({', '.join(by_licence[n])})" for n in strict)
        conflict = f"{pairs} are not one licence, and neither is permissive. Ask their owners, or leave one out."
        head: dict[str, str | list[str]] = {"license": "other", "license_name": "conflict"}
        return CombinedLicence(head, f"{text}\n\n**Conflict**: {markdown(conflict)}", in_one_line(conflict))
    if unknown:
        return CombinedLicence({}, f"{text} The licence of this model is not stated here: find out, and add it.")
    chosen = strict or list(by_licence)
    others = [n for n in by_licence if n not in chosen]
    text += f" That of this model: {', '.join(f'`{_plain(n)}`' for n in chosen)}."
    if others:
        text += f" The notices of {', '.join(f'`{_plain(n)}`' for n in others)} must be kept."
    return CombinedLicence({"license": chosen[0] if len(chosen) == 1 else chosen}, text)


def _plain(name: str) -> str:
    """A name inside a code span."""
    return terminal(name).replace("`", "'").replace("|", "/")
