"""Several units in lockstep, so that decompositions of matrices of one shape become one batched call.

A device is fast on many small matrices at once, and slow on one after the other. Each unit of a batch runs in a thread
of its own, of which one at a time is awake: it runs until it wants a decomposition, then the next one does. When all
wait, matrices of one shape and dtype are stacked and decomposed together. Methods need not know of it.

A library may take another routine for a stack, which rounds differently: on a GPU the last bits depend on the batch.
On a CPU a stack is decomposed matrix by matrix, in places that are not aligned: nothing is gained and bits change, so
each matrix is decomposed alone there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actmat.linalg.lapack import Attempt, decomposed_by

STACKED_ON = ("cuda",)
"""Kinds of devices on which stacks are decomposed."""


def in_lockstep(works: Sequence[Callable[[], None]]) -> None:
    """Run all works, decompositions batched; they must not share state that a thread owns.

    Raises:
        BaseException: of the first work, in their order, that raised one; all have ended then.
    """
    if len(works) == 1:
        works[0]()
        return
    step = Lockstep(len(works))
    threads = [threading.Thread(target=step.run, args=(work,), name="actmat-lockstep") for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for work in works:
        if work in step.errors:
            raise step.errors[work]


@dataclass(eq=False)
class _Wish:
    """A decomposition that a work waits for."""

    attempt: Attempt
    matrix: Tensor
    found: list[Tensor] | None = None
    error: Exception | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Wishes with the same key can be stacked."""
        return self.attempt, self.matrix.shape, self.matrix.dtype, self.matrix.device, self.matrix.stride()

    @property
    def is_open(self) -> bool:
        return self.found is None and self.error is None


@dataclass(eq=False)
class Lockstep:
    """So many works, of which one at a time is awake.

    Attributes:
        running: works that neither wait nor have ended.
        errors: by work.
        sizes: number of matrices of every group of one shape so far.
    """

    running: int
    errors: dict[Any, BaseException] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    _turn: threading.Condition = field(default_factory=threading.Condition)
    _wishes: list[_Wish] = field(default_factory=list)

    def run(self, work: Callable[[], None]) -> None:
        """One work, in its thread."""
        with self._turn:  # whoever holds it is awake; waiting gives it away
            try:
                with decomposed_by(self.decompose):
                    work()
            except BaseException as error:  # noqa: BLE001 - raised again when all works have ended
                self.errors[work] = error
            finally:
                self.running -= 1
                self._decompose_if_all_wait()

    def decompose(self, attempt: Attempt, matrix: Tensor) -> Sequence[Tensor]:
        """See `lapack.decomposed_by`."""
        wish = _Wish(attempt, matrix)
        self._wishes.append(wish)
        self.running -= 1
        self._decompose_if_all_wait()
        self._turn.wait_for(lambda: not wish.is_open)
        if wish.error is not None:
            raise wish.error
        assert wish.found is not None
        return wish.found

    def _decompose_if_all_wait(self) -> None:
        if self.running or not self._wishes:
            return
        groups: dict[Any, list[_Wish]] = {}
        for wish in self._wishes:
            groups.setdefault(wish.key, []).append(wish)
        self.running, self._wishes = len(self._wishes), []
        for group in groups.values():
            self.sizes.append(len(group))
            with contextlib.suppress(RuntimeError):  # one does not converge, or all are too large: each alone then
                if len(group) > 1 and group[0].matrix.device.type in STACKED_ON:
                    _together(group)
            for wish in group:
                if wish.is_open:
                    _alone(wish)
        self._turn.notify_all()


def _together(group: Sequence[_Wish]) -> None:
    stacked = torch.stack([wish.matrix for wish in group])
    found = group[0].attempt(stacked)
    factors = [found] if isinstance(found, Tensor) else list(found)
    for k, wish in enumerate(group):
        wish.found = [factor[k].clone() for factor in factors]  # aligned, as those of one matrix are


def _alone(wish: _Wish) -> None:
    try:
        found = wish.attempt(wish.matrix)
    except Exception as error:  # noqa: BLE001 - raised where the matrix is wanted
        wish.error = error
    else:
        wish.found = [found] if isinstance(found, Tensor) else list(found)
