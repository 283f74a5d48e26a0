"""A worker: opens a session once and merges the units that its driver sends. Runs in a Ray actor, and anywhere else."""

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

from actmat.engine.devices import check_device
from actmat.engine.session import Session, SessionSpec
from actmat.engine.survey import SurveyKey
from actmat.engine.units import Unit
from actmat.errors import MergeError
from actmat.extras.ray.shared import input_problems, storage_problems
from actmat.planning.build import versions_of


@dataclass(frozen=True)
class Opening:
    """Everything besides the spec that a worker needs to open its session; small.

    Args:
        key: names the spec: a worker that has opened it does not open it again.
        tokens: folder of an output -> the text of the token file beside it.
        directory: working directory of the driver, to which relative paths belong.
        synchronous: writes wait for the storage.
        room: bytes that the worker may use for a unit.
        device: this worker has the accelerator that the spec names.
    """

    key: str
    tokens: Mapping[Path, str]
    directory: str
    synchronous: bool
    room: int
    device: bool


@dataclass
class Answer:
    """Return value of a worker's call; picklable.

    Args:
        where: name of the node.
        results: what is done: results of units, or one state of a survey.
        error: ended the call.
        processor: vector instructions that torch uses, on which last bits may depend.
    """

    where: str
    results: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    processor: str = ""


class Worker:
    """One session, for one caller at a time; only `stop` may be called meanwhile.

    Args:
        name: gives the name of the node that it is called on, for messages and progress.
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
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver raises it
            return Answer(self.where, error=_portable(error, self.where))
        return Answer(self.where, processor=torch.backends.cpu.get_cpu_capability())

    def use(self, surveys: Mapping[SurveyKey, Any]) -> None:
        """Take the results of surveys."""
        session = self._opened
        session.spec = dataclasses.replace(session.spec, surveys=surveys)

    def merge(self, units: Sequence[Unit], *, inspect_only: bool = False) -> Answer:
        """Merge units, in this order, until one fails or `stop` is called; `inspect_only`: see `Session`."""
        session, answer = self._opened, Answer(self.where)
        session.inspect_only = inspect_only
        torch.set_num_threads(1)  # of this thread: results would depend on their number
        for unit, following in zip_longest(units, units[1:]):
            if self._stopped.is_set():
                break
            try:
                if following is not None:
                    session.prefetch(following)
                result = session.merge(unit)
            except Exception as error:  # noqa: BLE001 - whatever it is, the driver raises it
                self._stopped.set()
                answer.error = _portable(error, self.where)
                break
            session.inspect_only |= result.findings.fatal
            answer.results.append(dataclasses.replace(result, where=self.where))
        return answer

    def observe(self, units: Sequence[Unit], state: Any) -> Answer:
        """Give the items of units to a copy of an empty state of a survey; it is the only result."""
        session, answer = self._opened, Answer(self.where)
        torch.set_num_threads(1)
        mine = copy.deepcopy(state)  # what Ray hands out is shared, and may not be written to
        try:
            for unit in units:
                if self._stopped.is_set():
                    return answer
                for (p, n), *_ in unit.groups:
                    session.observe(session.spec.plans[p].items[n], mine)
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver raises it
            answer.error = _portable(error, self.where)
            return answer
        answer.results.append(mine)
        return answer

    def stop(self) -> None:
        """Begin no further unit; may be called from another thread."""
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
        with contextlib.suppress(OSError):  # a relative path that is missing then is told below
            os.chdir(opening.directory)
        if problems := storage_problems(opening.tokens, self.where):
            raise MergeError(_UNSHARED, problems)
        _check_versions(spec, self.where)
        if opening.device:
            check_device(spec.device)
        spec = dataclasses.replace(spec, room=opening.room, device=spec.device if opening.device else "cpu")
        try:
            session = self._stack.enter_context(Session.open(spec, synchronous=opening.synchronous))
        except MergeError as error:
            raise MergeError(_UNSHARED, [f"node {self.where}: {p}" for p in error.problems]) from error
        if problems := input_problems(spec, session.inputs, self.where):
            raise MergeError(_UNSHARED, problems)
        self._session, self._key = session, opening.key


_UNSHARED = (
    "A worker does not see the files of its driver. Every node needs the inputs and the output under the same paths: "
    "put them on storage that all nodes mount (NFS, Lustre, a volume of the pods), and give absolute paths. Copies of "
    "inputs keep size and times (rsync -a)."
)


def _check_versions(spec: SessionSpec, node: str) -> None:
    """Refuse other software than the driver's, which might give other bytes.

    Raises:
        MergeError: lists what differs.
    """
    expected = dict(spec.plans[0].versions)
    found = versions_of(spec.plans[0].items)
    problems = [
        f"node {node} has {name} {found.get(name, 'of no version')}, the driver {version}"
        for name, version in expected.items()
        if found.get(name) != version
    ]
    if problems:
        raise MergeError(
            "A worker runs other software than its driver, which may give other bytes. Fix: the same environment or "
            "image on all nodes.",
            problems,
        )


def _portable(error: Exception, node: str) -> Exception:
    """The error as it can be sent; one that is none of ours gets its traceback as a note."""
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, MergeError):
        error.add_note(f"on node {node}:\n{text}")
    error.__cause__ = error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - a foreign error may refuse in any way
        return MergeError(f"A worker on node {node} failed: {' '.join(text.split())[-1000:]}")
    return error
