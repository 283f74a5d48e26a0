"""The license of a merged model, from those that the cards of its inputs state. Names are compared: no legal advice."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from actmat.bounds import read_bytes
from actmat.checkpoints.source import Source
from actmat.engine.inputs import Inputs
from actmat.errors import MergeError
from actmat.foreign import markdown, terminal

MAX_TEXT = 1 << 20
"""Most bytes of a card."""


@dataclass(frozen=True, slots=True)
class LicensedInput:
    """An input of a merge: its label, its id on the hub (empty elsewhere), and its licenses (none: unknown)."""

    label: str
    hub_id: str = ""
    licenses: tuple[str, ...] = ()


def read_licenses(text: str) -> tuple[str, ...]:
    r"""Licenses that a model card states, of `other` its name; those of a damaged card are unknown.

    >>> read_licenses("---\nlicense: other\nlicense_name: my-terms\n---\n# Model")
    ('my-terms',)
    """
    head = re.match(r"\s*---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    data: object = None
    with contextlib.suppress(yaml.YAMLError, RecursionError, ValueError):
        data = yaml.safe_load(head[1]) if head else None
    if not isinstance(data, dict):
        return ()
    stated = data.get("license")
    listed = [x for x in (stated if isinstance(stated, list) else [stated]) if isinstance(x, str) and x.strip()]
    name = data.get("license_name")
    known = [name if x == "other" and isinstance(name, str) else x for x in listed if x != "unknown"]
    return tuple(terminal(x.strip().lower())[:80] for x in known)


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
            return read_licenses(read_bytes(source.fetch("README.md"), most=MAX_TEXT).decode("utf-8", "replace"))
    return ()


def shared_license(origins: Sequence[LicensedInput]) -> tuple[str | None, str]:
    """The license that all inputs state, if they do, and sentences for the card.

    >>> shared_license([LicensedInput("base", "", ("mit",)), LicensedInput("math", "", ("mit",))])[0]
    'mit'
    """
    by_license: dict[str, list[str]] = {}
    for origin in origins:
        for license in origin.licenses or ("not stated",):
            by_license.setdefault(license, []).append(origin.label)
    named = {license: terminal(license).replace("`", "'").replace("|", "/") for license in by_license}
    stated = "; ".join(f"`{named[n]}`: {', '.join(map(markdown, labels))}" for n, labels in by_license.items())
    text = f"Licenses that the inputs state: {stated}."
    if len(by_license) == 1 and "not stated" not in by_license:
        return next(iter(by_license)), text
    return (
        None,
        f"{text} The license of this model is not stated here: it must satisfy all of them. Find out, and add it.",
    )
