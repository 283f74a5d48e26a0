"""Questions of the page and their answers: each a function of plain data that gives plain data."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.bounds import local_path
from actmat.errors import MergeError, RecipeError, format_size
from actmat.extras.ui.form import RECIPE_FILE, command_of, groups_in, recipe_of, settings_of, tune_command
from actmat.extras.ui.jobs import Jobs
from actmat.extras.ui.places import cached_models, folder_of, found_on_hub
from actmat.planning import MergePlan
from actmat.recipe.load import load_recipe, printable_yaml, recipe_yaml
from actmat.report.words import action_counts, item_groups, plan_traffic
from actmat.run import plan_recipe
from actmat.run.automatic import TABLE
from actmat.version import __version__

Data = Mapping[str, Any]
MOST_PATTERNS = 6


class Questions:
    """Answers to the page.

    Args:
        methods: declarations of the methods, as `actmat methods --json` prints them.
        jobs: who merges.
    """

    def __init__(self, methods: Sequence[Data], jobs: Jobs) -> None:
        self._methods = list(methods)
        self.jobs = jobs
        self._known: dict[str, Callable[[Data], Any]] = {
            "start": lambda data: self._start(),
            "folder": lambda data: folder_of(str(data.get("path", ""))),
            "cache": lambda data: cached_models(),
            "hub": lambda data: found_on_hub(str(data["words"])),
            "plan": lambda data: _plan(data["form"]),
            "groups": lambda data: groups_in(data["form"]),
            "load": lambda data: _load(str(data["path"])),
            "save": lambda data: _save(str(data["path"]), data["form"]),
            "run": self._run,
            "job": lambda data: self.jobs.state(),
            "stop": lambda data: self.jobs.stop(),
        }

    def answer(self, question: str, data: Data) -> dict[str, Any]:
        """`{"ok": true, "answer": ...}`, or `{"ok": false, "headline": ..., "problems": [...]}`.

        Raises:
            LookupError: no such question.
        """
        found = self._known[question]
        try:
            return {"ok": True, "answer": found(data)}
        except MergeError as error:
            return {"ok": False, "headline": error.headline, "problems": list(error.problems)}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            return {"ok": False, "headline": f"The page asked '{question}' wrongly: {error!r}.", "problems": []}

    def _start(self) -> dict[str, Any]:
        recommended = list(dict.fromkeys(choice.method for choice in TABLE.values()))
        said = {"version": __version__, "cwd": str(Path.cwd())}
        return {"methods": self._methods, "recommended": recommended, **said}

    def _run(self, data: Data) -> dict[str, Any]:
        if data["do"] not in ("merge", "diagnose", "compare"):
            raise RecipeError(f"There is no job {str(data['do'])[:40]!r}.")
        if data["do"] == "merge" and not data["form"].get("out"):
            raise RecipeError("Say where the merged model goes: the field 'Output'.")
        wanted = ("first", "second") if data["do"] == "compare" else ("form",)
        return self.jobs.start({"do": data["do"], **{name: data[name] for name in wanted}})


def _plan(form: Data) -> dict[str, Any]:
    """The plan, the recipe and the command of a form."""
    recipe, settings = recipe_of(form), settings_of(form)
    command, file = command_of(recipe, settings)
    said = {"yaml": recipe_yaml(recipe), "command": command, "file": RECIPE_FILE if file else ""}
    said |= {"tune": tune_command(recipe)}
    try:
        plan = plan_recipe(recipe, device=settings.device)
    except MergeError as error:  # the recipe and the command are right all the same
        return said | {"headline": error.headline, "problems": list(error.problems)}
    return said | _shown(plan)


def _shown(plan: MergePlan) -> dict[str, Any]:
    rows = [
        {"action": group.action, "reason": group.reason, "count": group.count, "patterns": names[:MOST_PATTERNS]}
        | {"more": max(0, len(names) - MOST_PATTERNS)}
        for group in item_groups(plan.items, plan.kept)
        if (names := list(group.patterns))
    ]
    return {
        "rows": rows,
        "counts": action_counts(plan),
        "traffic": plan_traffic(plan),
        "write": format_size(plan.write_bytes),
        "notes": list(plan.notes),
        "output": plan.output,
        "labels": list(plan.recipe.labels),
        "method": plan.recipe.method,
    }


def _load(path: str) -> dict[str, Any]:
    """A recipe file, of actmat or of mergekit, as fields of the form."""
    recipe = load_recipe(Path(path))
    fields = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"out"})
    return {"recipe": fields, "out": recipe.out or ""}


def _save(path: str, form: Data) -> dict[str, Any]:
    """Write the recipe of a form to a file; an existing file is not replaced."""
    recipe = recipe_of(form)
    file = local_path(path, error=RecipeError)
    fields = recipe.model_dump(mode="json", exclude_defaults=True)
    for entry, key in ((fields, "base"), (fields, "out"), *((e, "path") for e in fields["experts"])):
        if key in entry and os.path.exists(entry[key]):  # paths in a file are relative to its folder
            entry[key] = str(Path(entry[key]).absolute())
    try:
        with open(file, "x", encoding="utf-8") as opened:
            opened.write(printable_yaml(fields))
    except OSError as error:
        raise RecipeError(f"The recipe cannot be written to {file}: {error.strerror}.") from None
    return {"path": str(file.absolute())}
