"""Format plans, results and errors as HTML; all text is escaped, because names come from foreign files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from markupsafe import Markup

from actmat.diagnostics.answers import RIVALS, kept_words, verdict
from actmat.foreign import html, html_table
from actmat.report import words

if TYPE_CHECKING:
    from actmat.api.pushing import PushReport
    from actmat.extras.pages.comparison import MergeComparison
    from actmat.planning import MergePlan
    from actmat.run import MergeReport


def plan_html(plan: MergePlan) -> Markup:
    """Format a plan: method with its reason, actions per tensor, cost, notes, and the recipe."""
    from actmat.recipe.load import recipe_yaml
    from actmat.system import usable_cores

    groups = words.item_groups(plan.items, plan.kept)
    rows = [(g.count, g.action, Markup("{}<br><small>{}</small>").format(html(g.reason), html(g.patterns[0])))
            for g in groups]  # fmt: skip
    table = html_table("Tensors", ("tensors", "action", "why, and which"), rows)
    over = words.plural(len(plan.experts), "expert")
    said = Markup("<p><b>{}</b> over {}</p>").format(html(plan.recipe.method), over)
    why = _list(plan.recipe.notes)
    notes = _list(str(note) for note in plan.notes if note.text not in plan.recipe.notes)
    cost = _list([words.action_counts(plan), words.plan_traffic(plan), words.plan_time(plan, usable_cores())])
    recipe = Markup("<details><summary>Recipe</summary><pre>{}</pre></details>").format(html(recipe_yaml(plan.recipe)))
    return _section(said, why, cost, table, notes, recipe)


def merged_html(report: MergeReport) -> Markup:
    """Format a finished merge: answers kept, warnings, findings and notes."""
    how = "already complete and intact" if report.was_finished else f"finished in {report.seconds:.1f} s"
    checks = () if report.diagnosis is None else report.diagnosis.checks
    found = [f"{c.severity} {c.code}: {c.title}. {c.message}." for c in checks if c.verdict == "found"]
    found += map(str, (*words.warnings_of(report.totals, report.plan), *report.plan.notes))
    said = Markup("<p><b>{}</b> by {} {}</p>").format(html(report.out), html(report.plan.recipe.method), how)
    return _section(said, _is_good(report), _list(found))


def _is_good(report: MergeReport) -> Markup:
    """Format the answers kept, or how they are measured."""
    if not report.answers:
        how = "" if report.diagnosis is None else words.measure_answers(report.diagnosis)
        said = Markup("<p><b>Is it good?</b> Not measured: give inputs of each expert, or later <code>{}</code></p>")
        return said.format(html(how)) if how else Markup("")
    rows = [
        (
            r.expert,
            *(kept_words(m, r.inputs) for m in (r, r.without, r.average)),
            f"{r.inputs}{', measured' * r.measured}",
        )
        for r in report.answers
    ]
    return html_table(verdict(report.answers), ("expert", "kept", *RIVALS.values(), "inputs"), rows)


def lines_html(lines: Iterable[str]) -> Markup:
    """Format lines of a terminal."""
    return _section(Markup("<pre>{}</pre>").format(html("\n".join(lines))))


def compared_html(found: MergeComparison) -> Markup:
    """Format a comparison: what differs, as tables."""
    return _section(Markup(found._repr_html_()))


def pushed_html(pushed: PushReport) -> Markup:
    """Format a finished push, with its commit's address."""
    url = html(pushed.url)
    if pushed.url.startswith(("https://", "http://")):
        url = Markup('<a href="{}" target="_blank" rel="noopener noreferrer">{}</a>').format(url, url)
    said = Markup("<p><b>Pushed</b> to {} ({}): {}</p>").format(
        html(pushed.repo_id), "private" if pushed.private else "public", url
    )
    return _section(said, _list(pushed.notes))


def error_html(text: str) -> Markup:
    """Format the text of an error.

    >>> print(error_html("<b>"))
    <pre class="am-error" role="alert">&lt;b&gt;</pre>
    """
    return Markup('<pre class="am-error" role="alert">{}</pre>').format(html(text))


def frame_html(page: str) -> Markup:
    """Embed a page in a sandboxed frame, whose scripts cannot access this page."""
    return Markup('<iframe class="am-page" sandbox="allow-scripts" title="Report" srcdoc="{}"></iframe>').format(page)


def _section(*parts: Markup) -> Markup:
    return Markup('<section class="am">{}</section>').format(Markup("").join(parts))


def _list(notes: Iterable[str]) -> Markup:
    items = Markup("").join(Markup("<li>{}</li>").format(html(n)) for n in notes)
    return Markup("<ul>{}</ul>").format(items) if items else items
