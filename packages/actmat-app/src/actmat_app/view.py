"""Format plans, results and errors as HTML; all text is escaped, because names come from foreign files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from actmat.diagnostics.answers import RIVALS, kept_words, verdict
from actmat.foreign import html, html_table
from actmat.report import words

if TYPE_CHECKING:
    from actmat.api.pushing import PushReport
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
    notes = _folded("Notes", [str(note) for note in plan.notes if note.text not in plan.recipe.notes])
    cost = _list([words.action_counts(plan), words.plan_traffic(plan), words.plan_time(plan, usable_cores())])
    recipe = Markup("<details><summary>Recipe</summary><pre>{}</pre></details>").format(html(recipe_yaml(plan.recipe)))
    return _section(said, why, cost, table, notes, recipe)


def progress_html(stage: str, done: int = 0, total: int = 0, left: float | None = None, spent: float = 0.0) -> Markup:
    """Format the stage of a running job with a bar.

    >>> print(progress_html("merging", 3, 4, 2.0, 6.0))
    <section class="am" role="status"><p><b>merging</b>, 3 of 4, about 2 s left (6 s so far)</p>\
<progress max="4" value="3"></progress></section>

    Args:
        stage: of the job.
        done, total: parts of the stage; `total` 0: unknown.
        left: seconds left of the stage; None: unknown.
        spent: seconds since the job began.
    """
    parts = [Markup("<b>{}</b>").format(stage), *([f"{done:,} of {total:,}"] if total else [])]
    if total and left is not None:
        parts += ["finishing" if done >= total else f"about {left:.0f} s left"]
    bar = Markup(' max="{}" value="{}"').format(total, done) if total else Markup("")
    said = Markup('<section class="am" role="status"><p>{}{}</p><progress{}></progress></section>')
    return said.format(Markup(", ").join(parts), f" ({spent:.0f} s so far)" if spent else "", bar)


def merged_html(report: MergeReport, seconds: float) -> Markup:
    """Format a finished merge: answers kept, output, warnings, and folded notes.

    Args:
        report: of the merge.
        seconds: of the whole job, the comparison of answers included.
    """
    how = "already complete" if report.was_finished else f"finished in {seconds:.1f} s"
    measured = () if report.diagnosis is None else report.diagnosis.findings
    findings = [f"{f.severity} {f.code}: {f.title}. {f.message}." for f in measured if not f.muted]
    findings += map(str, report.warnings)
    findings += [str(note) for note in report.plan.notes if note.severity == "warning"]
    notes = [note.text for note in report.plan.notes if note.severity != "warning"]
    said = Markup("<p><b>{}</b> by {}, {}</p>").format(html(report.out), html(report.plan.recipe.method), how)
    return _section(_is_good(report), said, _list(findings), _folded("Notes", notes))


def _is_good(report: MergeReport) -> Markup:
    """Format the answers kept, or how they are measured."""
    if not report.answers:
        if words.are_image_files(i.location for i in report.plan.inputs):
            return Markup("")
        return Markup("<p><b>Is it good?</b> Not measured: give each expert prompts of its task, best eight.</p>")
    rows = [
        (
            r.expert,
            *(kept_words(m, r.inputs) for m in (r, r.without, r.average)),
            f"{r.inputs}{', measured' * r.measured}",
        )
        for r in report.answers
    ]
    return html_table(verdict(report.answers), ("expert", "kept", *RIVALS.values(), "inputs"), rows)


def answers_html(answers: Mapping[str, str]) -> Markup:
    """Format the answers of several models to one prompt, side by side where there is room."""
    cards = [Markup("<article><b>{}</b><pre>{}</pre></article>").format(html(name), html(text or "(nothing)"))
             for name, text in answers.items()]  # fmt: skip
    return _section(Markup('<div class="am-answers">{}</div>').format(Markup("").join(cards)))


def lines_html(lines: Iterable[str]) -> Markup:
    """Format lines of a terminal."""
    return _section(Markup("<pre>{}</pre>").format(html("\n".join(lines))))


def notes_html(notes: Iterable[str]) -> Markup:
    """Format a list of sentences."""
    return _section(_list(notes))


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


def _folded(title: str, notes: Sequence[str]) -> Markup:
    if not notes:
        return Markup("")
    return Markup("<details><summary>{} ({})</summary>{}</details>").format(title, len(notes), _list(notes))
