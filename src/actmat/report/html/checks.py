"""Section "Checks": findings first, the other checks folded."""

from __future__ import annotations

from actmat.diagnostics.model import CheckResult, Diagnosis
from actmat.report.html.elements import section, tensor_link
from actmat.report.html.markup import Markup, el
from actmat.report.html.words import plural

__all__ = ["check_card", "checks"]

_SIGNS = {"issue": "✕", "tip": "!", "clear": "✓", "not_applicable": "–", "muted": "–"}
UNFOLDED = 4
"""Tensors of a finding that are shown without a click."""


def checks(diagnosis: Diagnosis) -> Markup:
    """A card per finding; checks that found nothing are folded."""
    found = [c for c in diagnosis.checks if c.verdict == "found"]
    found.sort(key=lambda c: (c.severity != "issue", c.code))
    others = [c for c in diagnosis.checks if c.verdict != "found"]
    nothing = el("p", f"None of {plural(len(others), 'check')} found anything." if others else "No checks ran.")
    rest = el(
        "details",
        el("summary", f"{plural(len(others), 'check')} with nothing to report"),
        el("ul", *(_quiet(c) for c in others), class_="quiet"),
    )
    return section(
        "checks",
        "Checks",
        *([check_card(c) for c in found] if found else [nothing]),
        rest if others else None,
        lead="An issue should be looked at before the merged model is used; a tip may be worth a try.",
    )


def check_card(check: CheckResult) -> Markup:
    """A finding with its tensors."""
    items = [el("li", tensor_link(n)) for n in check.tensors]
    if (more := check.count - len(check.tensors)) > 0:
        items.append(el("li", f"and {more:,} more, in report.json"))
    shown = el("ul", *items, class_="places")
    if len(items) > UNFOLDED:
        shown = el("details", el("summary", plural(check.count, "tensor")), shown)
    head = el("h3", el("span", _SIGNS[check.severity], class_="sign", aria_hidden="true"), el("span", check.title))
    return el(
        "article",
        head,
        el("p", el("span", check.severity, class_="badge"), " ", el("code", check.code), " ", _docs(check.docs)),
        el("p", f"{check.message.rstrip('.')}."),
        shown if items else None,
        class_=f"check {check.severity}",
        id=f"check-{check.code}",
    )


def _quiet(check: CheckResult) -> Markup:
    sign = el("span", _SIGNS[check.verdict], class_="sign", aria_hidden="true")
    words = f"{check.title} ({check.verdict.replace('_', ' ')}). {check.message.rstrip('.')}."
    return el("li", sign, el("code", check.code), " ", words, class_=check.verdict)


def _docs(location: str) -> Markup:
    """A link if it is an address, else the page of the documentation that came with the package."""
    if location.startswith("https://"):
        return el("a", "what it means", href=location, rel="noreferrer")
    return el("span", f"what it means: {location}", class_="note")
