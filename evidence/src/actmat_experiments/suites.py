"""The suites: one entry each in `suites.json`."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from actmat.errors import RecipeError, did_you_mean
from actmat_experiments.harness.request import RunRequest, TableRequest


@dataclass(frozen=True, slots=True)
class Suite:
    """A named set of experiments.

    Args:
        needs: data and machine.
        time: measured, with methods, machine and date.
        module: of its functions `run` and, if the tables are not the usual ones, `table`; imported when one is called.
        regimes: how experts are trained where a command does not say.
        paper: beginning of the names of its models in the paper's tables; empty for a suite of ours.
        notes: figures of the paper that cannot hold, or were measured on something else.
    """

    name: str
    summary: str
    needs: str
    module: str
    regimes: tuple[Literal["full", "lora"], ...]
    notes: tuple[str, ...]
    paper: str = ""
    time: str = "not measured here"

    def run(self, request: RunRequest) -> None:
        """Train, merge, evaluate; scores are written below the cache."""
        self._module.run(request)

    def table(self, request: TableRequest) -> None:
        """Show the scores of earlier runs."""
        own = getattr(self._module, "table", None)
        (own or importlib.import_module("actmat_experiments.harness.report").show)(request)

    @property
    def _module(self) -> Any:
        return importlib.import_module(f"actmat_experiments.{self.module}")


SUITES = tuple(
    Suite(**row | {"regimes": tuple(row.get("regimes", ["full"])), "notes": tuple(row.get("notes", []))})
    for row in json.loads(resources.files("actmat_experiments").joinpath("suites.json").read_text(encoding="utf-8"))
)


def get_suite(name: str) -> Suite:
    """The suite called `name`.

    Raises:
        RecipeError: the suite is unknown; offers the near name and lists all.
    """
    for suite in SUITES:
        if suite.name == name:
            return suite
    known = [s.name for s in SUITES]
    raise RecipeError(f"There is no suite '{name}'.{did_you_mean(name, known)} Suites: {', '.join(known)}")
