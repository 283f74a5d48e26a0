"""The `Executor` contract, and the passes of surveys in one session, which executors may share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from actmat.engine.session import Session, SessionSpec, SurveyKey, UnitResult
from actmat.engine.survey import run_surveys
from actmat.engine.units import Unit
from actmat.methods import Survey
from actmat.plan.model import Item

__all__ = ["Executor", "survey_in"]


class Executor(Protocol):
    """Runs units somewhere and returns their results.

    The driver keeps the journal, decides what is fatal, and commits; an executor may run units in any order, anywhere,
    and the bytes are the same.
    """

    def survey(self, spec: SessionSpec) -> Mapping[SurveyKey, Any]:
        """Results of the surveys that the methods of the plans want; empty where none does."""

    def run(self, spec: SessionSpec, units: Sequence[Unit]) -> Iterator[UnitResult]:
        """One result per unit, in any order, as they are done. An error of a unit is raised; no new unit starts."""


def survey_in(session: Session) -> Mapping[SurveyKey, Any]:
    """All surveys in one session, item by item."""

    def observe(survey: Survey, state: Any, items: Sequence[Item]) -> None:
        for item in items:
            assert item.call is not None
            for deltas in session.survey_deltas(item):
                survey.observe(state, deltas, item.call.options)

    return run_surveys(session.spec, observe)
