"""The `Executor` contract."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

from actmat.engine.inputs import Inputs
from actmat.engine.observer import Writer
from actmat.engine.resources import Resources
from actmat.engine.session import SessionSpec, UnitResult
from actmat.engine.survey import SurveyKey
from actmat.engine.units import Unit


class Executor(Protocol):
    """Runs units somewhere and returns their results; a class that is constructed like `ExecutorFactory`.

    Optional attributes of the class:

        elsewhere = True                            units run on other machines, which have devices of their own
        device_problem(device) -> str | None        static: why it cannot use these devices; ends the sentence "The
                                                    executor 'NAME' ..."
        at(address) -> ExecutorFactory              class method: a run may name `NAME=ADDRESS`; "" for `NAME`

    The driver keeps the journal, decides what is fatal, and commits; an executor may run units in any order, anywhere,
    and the bytes are the same. `tests/helpers/executor_suite.py` checks it.

    A worker merges with a `Session` of its own: in this process with the open inputs and output files, in another one
    with `Session.open(spec)`; specs, items, states of surveys, units and results pickle. Torch uses one thread inside a
    worker (`resources.one_thread`): results would otherwise depend on their number.
    """

    def survey(self, spec: SessionSpec) -> Mapping[SurveyKey, Any]:
        """Results of the surveys that the methods of the plans need, see `run_surveys`; empty without any."""

    def run(self, spec: SessionSpec, units: Sequence[Unit]) -> Generator[UnitResult, None, None]:
        """Yield one result per unit, in order of completion; yielded results are not kept.

        After fatal findings the remaining units are still run, so that the driver can list all problems; sessions may
        then be told to `inspect_only`. An error of a unit is raised. After an error, and when the generator is closed,
        no unit starts, and those that run end before the generator does.
        """


ExecutorFactory = Callable[[Inputs, Sequence[Writer | None], Resources], Executor]
"""Makes an executor for the open inputs of a run, the open output of every plan, and the limits of this machine."""
