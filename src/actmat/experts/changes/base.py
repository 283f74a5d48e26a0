"""`Change`: the delta of one tensor of a model, formed from a few stored tensors and maybe from the base.

Shapes: `O` rows and `I` columns of the logical delta, a kernel flattened into `I`; `P` requested rows.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.keys import Keys
from actmat.linalg.lowrank import LowRank


@dataclass(frozen=True)
class Change(abc.ABC):
    """Delta of one tensor.

    Attributes:
        target: name of the tensor in the model in memory.
        stored: names of the stored tensors that it is made of.
        kind: what is changed, for `inspect`.
        rank: of a product of two factors, else 0.
        is_optional: the base may lack the tensor (a bias).
        is_turned: the base's tensor is the transpose of the delta (DoRA's tables of embeddings).
        only_straight: the base's tensor must not be the transpose.
    """

    target: str
    stored: tuple[str, ...]
    kind = "linear"
    rank = 0
    is_optional = False
    is_turned = False
    only_straight = False

    @property
    @abc.abstractmethod
    def reads_base(self) -> bool:
        """True if the delta depends on the base's own values."""

    @abc.abstractmethod
    def misfit(self, shape: tuple[int, int]) -> str:
        """Why a tensor of `O I` cannot be changed by it; empty if it can."""

    def rows(self, tensors: Mapping[str, Tensor], base_PI: Tensor, first: int, last: int) -> Tensor:
        """Rows `first:last` of the delta, `P I`.

        Args:
            tensors: by their stored names, in the requested dtype.
            base_PI: these rows of the base; no rows unless it `reads_base`.
        """
        raise NotImplementedError(f"{type(self).__name__} gives factors")

    def factors(self, tensors: Mapping[str, Tensor], base_OI: Tensor, shape: tuple[int, int]) -> LowRank:
        """The whole delta, of this shape `O I`, as a product; for changes with a rank."""
        raise NotImplementedError(f"{type(self).__name__} has no factors")


@dataclass(frozen=True)
class Content:
    """Everything that an adapter holds.

    Args:
        changes: deltas.
        extras: tensors trained in full: name in the model -> stored name.
        problems: one sentence each.
    """

    changes: Sequence[Change]
    extras: Mapping[str, str]
    problems: Sequence[str]


@dataclass(frozen=True)
class Reader:
    """One family of adapters of PEFT.

    Args:
        name: as users know it.
        claims: true for the config of such an adapter.
        read: its content, from the stored tensors' headers and the config.
        why_no_factors: why an adapter cannot be merged from it without a base, as the end of a sentence.
        keys: of its config; refused ones are problems, unknown ones remarks. None: `read` checks all of them.
    """

    name: str
    claims: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, TensorSpec], Mapping[str, Any]], Content]
    why_no_factors: str
    keys: Keys | None = None
