"""The process that does one job: reads it from stdin, tells what happens in lines of JSON on stdout.

A process of its own has its own token, cache and memory, and can be stopped at any time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actmat.planning import MergePlan
    from actmat.run import MergeReport
    from actmat_space.asking import Form, Found
    from actmat_space.limits import Limits

INTERVAL_S = 0.2
"""Shortest time between two lines about progress."""
Tell = Callable[..., None]


class _Telling:
    """Tells the progress of a merge; implements `actmat.progress.Progress`."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._done, self._total, self._told = tell, 0, 1, 0.0

    def started(self, plans: Sequence[MergePlan], resumed: int, workers: int) -> None:
        """Note how much there is to do."""
        self._total = len(plans[0].items)

    def tensor(self, name: str, nbytes: int) -> None:
        """Count a tensor; called from any thread, and a lost count is no harm."""
        self._done += 1
        if time.monotonic() - self._told > INTERVAL_S:
            self._told = time.monotonic()
            self._tell("progress", done=min(self._done, self._total), total=self._total)

    def node(self, name: str, nbytes: int) -> None:
        """Do nothing: `tensor` was called."""

    def note(self, text: str) -> None:
        """Do nothing: notes of one machine are in the plan."""

    def finishing(self) -> None:
        """Tell that all tensors are merged."""
        self._tell("progress", done=self._total, total=self._total)


def _asked(job: Mapping[str, Any]) -> tuple[Form, list[Found], Limits]:
    from actmat_space.asking import form_of, look_up, parse_adapters
    from actmat_space.limits import Limits

    form, limits = form_of(job["form"]), Limits(**job["limits"])
    return form, look_up(parse_adapters(form.adapters, limits), limits), limits


def _plan(job: Mapping[str, Any], tell: Tell) -> None:
    import actmat
    from actmat_space.asking import recipe_fields

    form, found, limits = _asked(job)
    plan = actmat.plan(**recipe_fields(form, found))
    _check_output(plan, limits)
    tell("done", plan=plan_data(plan, found))


def _merge(job: Mapping[str, Any], tell: Tell) -> None:
    import actmat
    from actmat_space.asking import recipe_fields

    form, found, limits = _asked(job)
    fields = recipe_fields(form, found)
    _check_output(actmat.plan(**fields), limits)
    settings: dict[str, Any] = {"max_memory": limits.max_memory} if limits.max_memory else {}
    report = actmat.merge(**fields, **settings, out=job["out"], diagnose=True, progress=_Telling(tell))
    tell("done", plan=plan_data(report.plan, found), result=result_data(report))


def _push(job: Mapping[str, Any], tell: Tell) -> None:
    import actmat

    sent = actmat.push(job["out"], job["repo_id"], public=job["public"])
    tell("done", repo_id=sent.repo_id, url=sent.url, private=sent.private, nbytes=sent.nbytes, notes=list(sent.notes))


JOBS = {"plan": _plan, "merge": _merge, "push": _push}


def _check_output(plan: MergePlan, limits: Limits) -> None:
    """Refuse a merge whose output is too large: adapters may agree in no module.

    Raises:
        RecipeError: it is.
    """
    from actmat.errors import RecipeError, format_size

    if plan.write_bytes > limits.max_bytes:
        raise RecipeError(
            f"The merged adapter would have {format_size(plan.write_bytes)}, more than this space writes, "
            f"{format_size(limits.max_bytes)}. Fix: a rank."
        )


def plan_data(plan: MergePlan, found: Sequence[Found]) -> dict[str, Any]:
    """A plan as the page shows it; all texts in it may come from the adapters' files."""
    from actmat.errors import format_size
    from actmat.report.words import item_groups, plan_time, plan_traffic
    from actmat.system import usable_cores

    ranks = Counter(m.pair.rank for m in plan.modules)
    return {
        "method": plan.recipe.method,
        "options": {k: repr(v) for k, v in plan.recipe.options.items()},
        "base": str((plan.adapter_config or {}).get("base_model_name_or_path") or ""),
        "experts": [
            {
                "label": e.label,
                "location": f.named.text,
                "commit": f.commit,
                "weight": f.named.weight,
                "tensors": f.tensors,
                "size": format_size(f.nbytes),
            }
            for e, f in zip(plan.experts, found, strict=True)
        ],
        "modules": len(plan.modules),
        "full": len(plan.items) - len(plan.modules),
        "ranks": [[rank, count] for rank, count in sorted(ranks.items())],
        "exact_rank": max((m.pair.exact_rank for m in plan.modules), default=0),
        "size": format_size(plan.write_bytes),
        "traffic": plan_traffic(plan),
        "time": plan_time(plan, usable_cores()),
        "groups": [dataclasses.asdict(g) for g in item_groups(plan.items, plan.kept)],
        "notes": list(plan.notes),
    }


def result_data(report: MergeReport) -> dict[str, Any]:
    """A merge as the page shows it."""
    from actmat.report.words import size_words, warnings_of

    found = report.diagnosis
    return {
        "seconds": report.seconds,
        "error": report.totals.relative_error,
        "size": size_words(report.totals.norms),
        "warnings": [f"{code}: {words}" for code, words in warnings_of(report.totals, report.plan.recipe.mute)],
        "findings": [] if found is None else [f"{c.code}: {c.title}" for c in found.checks if c.verdict == "found"],
    }


def main() -> None:
    """Do the job on stdin."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints does not get between the lines
    job = json.load(sys.stdin)
    token = job.pop("token", "")
    if token:
        os.environ["HF_TOKEN"] = token  # of this process only
    else:
        os.environ["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"

    def tell(event: str, **fields: Any) -> None:
        text = json.dumps({"event": event, **fields})
        lines.write((text.replace(token, "***") if token else text) + "\n")

    from actmat.errors import MergeError

    try:
        JOBS[job["do"]](job, tell)
    except MergeError as error:
        problems = [] if error.problems == (error.headline,) else list(error.problems)
        tell("failed", headline=error.headline, problems=problems)


if __name__ == "__main__":
    main()
