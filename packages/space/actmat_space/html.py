"""Plans, results and errors as HTML; every text in it is escaped, because names come from files of others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from actmat.errors import SHOWN_PROBLEMS, MergeError
from actmat.foreign import html
from actmat.report.words import plural

REASON = "auto: "
"""Beginning of the note that says why `auto` took a method."""
WARNING = "warning: "
PATTERNS = 4
"""Patterns of names shown of one group."""


def error_html(error: MergeError) -> Markup:
    """An error with all its problems.

    >>> print(error_html(MergeError("<b>", ["x", "y"])))
    <div class="am-error" role="alert"><p><b>&lt;b&gt;</b></p><ul><li>x</li><li>y</li></ul></div>
    """
    problems = () if error.problems == (error.headline,) else error.problems
    listed = [Markup("<li>{}</li>").format(html(p)) for p in problems[:SHOWN_PROBLEMS]]
    if len(problems) > SHOWN_PROBLEMS:
        listed.append(Markup("<li>... and {} more</li>").format(len(problems) - SHOWN_PROBLEMS))
    items = Markup("<ul>{}</ul>").format(Markup("").join(listed)) if listed else Markup("")
    return Markup('<div class="am-error" role="alert"><p><b>{}</b></p>{}</div>').format(html(error.headline), items)


def plan_html(plan: Mapping[str, Any], title: str = "Plan") -> Markup:
    """A plan: the method and why, adapters, sizes, what happens to which modules, notes."""
    notes = list(plan["notes"])
    reason = next((n.removeprefix(REASON) for n in notes if n.startswith(REASON)), "")
    options = ", ".join(f"{k}={v}" for k, v in plan["options"].items())
    method = f"{plan['method']} ({options})" if options else plan["method"]
    ranks = ", ".join(f"{rank} ({plural(count, 'module')})" for rank, count in plan["ranks"])
    written = f"{plural(plan['modules'], 'module')}, {plural(plan['full'], 'full tensor')}"
    facts = [
        ("Method", method),
        *([("Why", reason)] if reason else []),
        *([("Base", plan["base"])] if plan["base"] else []),
        ("Ranks", f"{ranks or 'none'}; exact would be up to {plan['exact_rank']}"),
        ("Size", f"{plan['size']} to write; {written}"),
        ("Cost", f"{plan['traffic']}; {plan['time']}"),
    ]
    adapters = [(e["location"], e["commit"][:8], f"{e['weight']:g}", e["size"], e["tensors"]) for e in plan["experts"]]
    groups = [(g["count"], g["action"], _group(g)) for g in plan["groups"]]
    rest = [n for n in notes if not n.startswith(REASON)]
    warnings = [n for n in rest if n.startswith(WARNING)]
    return Markup("").join(
        (
            Markup('<section class="am"><h3>{}</h3>').format(html(title)),
            _list(warnings, "am-warning"),
            _facts(facts),
            _table(("adapter", "commit", "weight", "size", "tensors"), adapters),
            _table(("modules", "action", "why, and which"), groups),
            _list([f"note: {n}" for n in rest if n not in warnings], "am-notes"),
            Markup("</section>"),
        )
    )


def result_html(plan: Mapping[str, Any], result: Mapping[str, Any]) -> Markup:
    """A merge that is done: how exact it is, its size, findings of the checks; then its plan."""
    error = result["error"]
    exact = "exact: nothing was truncated" if not error or error < 1e-5 else f"truncated: relative error {error:.2g}"
    facts = [("Result", f"{exact}; {result['seconds']:.1f} s")]
    facts += [("Change", result["size"])] if result["size"] else []
    facts += [("Checks", "; ".join(result["findings"]) or "nothing found")]
    return Markup('<section class="am"><h3>Merged</h3>{}{}</section>{}').format(
        _list(result["warnings"], "am-warning"), _facts(facts), plan_html(plan, "What was done")
    )


def pushed_html(pushed: Mapping[str, Any]) -> Markup:
    """A push that is done, with the address of its commit."""
    seen = "private" if pushed["private"] else "public"
    url = str(pushed["url"])
    link = Markup('<a href="{}" target="_blank" rel="noopener noreferrer">{}</a>').format(html(url), html(url))
    text = Markup("<p><b>Pushed</b> to {} ({}): {}</p>").format(
        html(pushed["repo_id"]), seen, link if url.startswith(("https://", "http://")) else html(url)
    )
    return Markup('<section class="am">{}{}</section>').format(text, _list(pushed["notes"], "am-notes"))


def report_html(page: str) -> Markup:
    """Our report in a frame of its own: its scripts run there, and reach nothing of this page."""
    return Markup('<iframe class="am-report" sandbox="allow-scripts" title="Report" srcdoc="{}"></iframe>').format(page)


def _group(group: Mapping[str, Any]) -> Markup:
    shown = [Markup("<code>{}</code>").format(html(p)) for p in group["patterns"][:PATTERNS]]
    if len(group["patterns"]) > PATTERNS:
        shown.append(Markup("and {} more patterns").format(len(group["patterns"]) - PATTERNS))
    return Markup("{}<br>{}").format(html(group["reason"]), Markup("<br>").join(shown))


def _facts(rows: Iterable[tuple[str, str]]) -> Markup:
    cells = [Markup("<dt>{}</dt><dd>{}</dd>").format(html(k), html(v)) for k, v in rows]
    return Markup("<dl>{}</dl>").format(Markup("").join(cells))


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    heads = Markup("").join(Markup("<th>{}</th>").format(html(h)) for h in head)
    lines = [Markup("").join(Markup("<td>{}</td>").format(html(c)) for c in row) for row in rows]
    body = Markup("").join(Markup("<tr>{}</tr>").format(line) for line in lines)
    return Markup('<div class="am-wide"><table><tr>{}</tr>{}</table></div>').format(heads, body)


def _list(items: Sequence[str], style: str) -> Markup:
    listed = Markup("").join(Markup("<li>{}</li>").format(html(i)) for i in items)
    return Markup('<ul class="{}">{}</ul>').format(style, listed) if items else Markup("")
