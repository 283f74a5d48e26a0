"""A worker: opens a session once and merges the units sent by its driver. Runs in a Ray actor or any process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import pickle
import socket
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from actmat.engine.session import Session, SessionSpec
from actmat.engine.survey import SurveyKey
from actmat.engine.units import Unit
from actmat.errors import MergeError
from actmat.extras.ray.shared import input_problems, storage_problems
from actmat.planning.plan import versions_of


@dataclass(frozen=True)
class Opening:
    """Data other than the spec that a worker needs to open its session.

    Args:
        key: key of the spec; a worker does not open the same spec again.
        tokens: output folder -> text of its token file.
        directory: working directory of the driver, the base of relative paths.
        synchronous: whether writes wait for the storage.
        room: memory for a unit, in bytes.
    """

    key: str
    tokens: Mapping[Path, str]
    directory: str
    synchronous: bool
    room: int


@dataclass
class Answer:
    """Return value of a worker's call; picklable.

    Args:
        where: name of the node.
        results: results of finished units, or one state of a survey.
        error: error that ended the call.
        processor: vector instructions used by torch, which can affect last bits.
    """

    where: str
    results: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    processor: str = ""


class Worker:
    """One session for one caller at a time; only `stop` may be called concurrently.

    Args:
        name: function that returns the node's name, for messages and progress.
    """

    def __init__(self, name: Callable[[], str] = socket.gethostname) -> None:
        self.where = name()
        self._stack = contextlib.ExitStack()
        self._session: Session | None = None
        self._key = ""
        self._stopped = threading.Event()

    def open(self, opening: Opening, spec: SessionSpec) -> Answer:
        """Open the session, or keep the one with this key; the answer has no results."""
        self._stopped.clear()
        try:
            if self._key != opening.key:
                self._open(opening, spec)
        except Exception as error:  # noqa: BLE001 - the driver raises it
            return Answer(self.where, error=_portable(error, self.where))
        return Answer(self.where, processor=torch.backends.cpu.get_cpu_capability())

    def use(self, surveys: Mapping[SurveyKey, Any]) -> None:
        """Set the results of surveys."""
        session = self._opened
        session.spec = dataclasses.replace(session.spec, surveys=surveys)

    def merge(self, units: Sequence[Unit], *, inspect_only: bool = False) -> Answer:
        """Merge units in order until one fails or `stop` is called; `inspect_only`: see `Session`."""
        session, answer = self._opened, Answer(self.where)
        session.inspect_only = inspect_only
        torch.set_num_threads(1)  # results would depend on the number of threads
        for unit, following in zip_longest(units, units[1:]):
            if self._stopped.is_set():
                break
            try:
                if following is not None:
                    session.prefetch(following)
                result = session.merge(unit)
            except Exception as error:  # noqa: BLE001 - the driver raises it
                self._stopped.set()
                answer.error = _portable(error, self.where)
                break
            session.inspect_only |= result.findings.fatal
            answer.results.append(result)
        return answer

    def observe(self, units: Sequence[Unit], state: Any) -> Answer:
        """Observe the items of units with a copy of an empty survey state, which is the only result."""
        session, answer = self._opened, Answer(self.where)
        torch.set_num_threads(1)
        mine = copy.deepcopy(state)  # Ray's objects are shared and read-only
        try:
            for unit in units:
                if self._stopped.is_set():
                    return answer
                for p, n in unit.members[:1]:
                    session.observe(session.spec.plans[p].items[n], mine)
        except Exception as error:  # noqa: BLE001 - the driver raises it
            answer.error = _portable(error, self.where)
            return answer
        answer.results.append(mine)
        return answer

    def stop(self) -> None:
        """Start no further unit; may be called from another thread."""
        self._stopped.set()

    def close(self) -> None:
        """Close the session's files."""
        self._session, self._key = None, ""
        self._stack.close()

    @property
    def _opened(self) -> Session:
        assert self._session is not None, "a worker is opened before it merges"
        return self._session

    def _open(self, opening: Opening, spec: SessionSpec) -> None:
        self.close()
        with contextlib.suppress(OSError):  # a missing relative path is reported below
            os.chdir(opening.directory)
        if problems := storage_problems(opening.tokens, self.where):
            raise MergeError(_UNSHARED, problems)
        _check_versions(spec, self.where)
        spec = dataclasses.replace(spec, room=opening.room)
        try:
            session = self._stack.enter_context(Session.open(spec, synchronous=opening.synchronous))
        except MergeError as error:
            raise MergeError(_UNSHARED, [f"node {self.where}: {p}" for p in error.problems]) from error
        if problems := input_problems(spec, session.inputs, self.where):
            raise MergeError(_UNSHARED, problems)
        self._session, self._key = session, opening.key


_UNSHARED = (
    "A worker does not see the files of its driver. Every node needs the inputs and the output under the same paths. "
    "Fix: put them on storage that all nodes mount (NFS, Lustre, a volume of the pods), and use absolute paths. Copies "
    "of inputs must keep size and times (rsync -a)."
)


def _check_versions(spec: SessionSpec, node: str) -> None:
    """Raise if the software differs from the driver's, because the bytes could differ.

    Raises:
        MergeError: lists the differences.
    """
    expected = dict(spec.plans[0].versions)
    versions = versions_of(spec.plans[0].items)
    problems = [
        f"node {node} has {name} {versions.get(name, 'of no version')}, the driver {version}"
        for name, version in expected.items()
        if versions.get(name) != version
    ]
    if problems:
        raise MergeError(
            "A worker's software differs from its driver's, which can change the bytes. Fix: the same environment or "
            "image on all nodes.",
            problems,
        )


def _portable(error: Exception, node: str) -> Exception:
    """A picklable form of an error; an unexpected error gets its traceback as a note."""
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, MergeError):
        error.add_note(f"on node {node}:\n{text}")
    error.__cause__ = error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling can fail in any way
        return MergeError(f"A worker on node {node} failed: {' '.join(text.split())[-1000:]}")
    return error
