"""Made-up experts for tests of merge rules: deltas of a chosen spectrum, with base and statistics that fit them.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` rank; leading batch axes as given.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from tests.helpers.survey import call, run_survey
from torch import Tensor

from actmat.methods import MergeMethod


@dataclass(frozen=True)
class Experts:
    """Deltas, base and statistics of one tensor."""

    deltas: list[Tensor]
    base: Tensor
    statistics: dict[str, list[Tensor]]

    @classmethod
    def random(
        cls,
        n_experts: int,
        shape: Sequence[int],
        *,
        rank: int | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        statistics: bool = True,
    ) -> Experts:
        """Gaussian deltas a tenth of the base's size, of full rank unless a `rank` is given."""
        rng = torch.Generator().manual_seed(1000 * seed + 7)

        def gaussian(*size: int) -> Tensor:
            return torch.randn(size, generator=rng, dtype=torch.float64)

        def delta() -> Tensor:
            if rank is None or len(shape) < 2:
                return 0.1 * gaussian(*shape)
            left, right = gaussian(*shape[:-1], rank), gaussian(*shape[:-2], rank, shape[-1])
            return 0.1 * left @ right / math.sqrt(rank)

        deltas, base = [delta().to(dtype) for _ in range(n_experts)], gaussian(*shape).to(dtype)
        if not statistics:
            return cls(deltas, base, {})
        inputs = [gaussian(*shape[:-2], shape[-1] + 5, shape[-1]) for _ in range(n_experts)]
        grams = [(x.mT @ x / x.shape[-2]).to(dtype) for x in inputs]
        fishers = [gaussian(*shape).square().to(dtype) for _ in range(n_experts)]
        return cls(deltas, base, {"gram": grams, "fisher": fishers})

    def given(self, method: MergeMethod, options: Mapping[str, Any]) -> dict[str, Any]:
        """Everything but deltas that the method may need, the survey of a model of this one tensor included."""
        survey = run_survey(method, {"weight": self.deltas}, options)
        return {"base": self.base, "statistics": self.statistics, "survey": survey}

    def with_deltas(self, deltas: Sequence[Tensor]) -> Experts:
        """Same base, other deltas; statistics cut or repeated to their number."""
        count = len(deltas)
        return replace(
            self,
            deltas=list(deltas),
            statistics={k: [v[t % len(v)] for t in range(count)] for k, v in self.statistics.items()},
        )

    def map(self, change: Any) -> Experts:
        """`change` applied to every tensor, statistics included."""
        return Experts(
            [change(d) for d in self.deltas],
            change(self.base),
            {kind: [change(v) for v in values] for kind, values in self.statistics.items()},
        )

    def to(self, dtype: torch.dtype) -> Experts:
        """Everything in another dtype."""
        return self.map(lambda x: x.to(dtype))

    def permuted(self, order: Sequence[int]) -> Experts:
        """The experts in another order."""
        return Experts(
            [self.deltas[t] for t in order],
            self.base,
            {kind: [values[t] for t in order] for kind, values in self.statistics.items()},
        )

    def rotated(self, left_OO: Tensor, right_II: Tensor) -> Experts:
        """Weights `Q W P` and Grams `P^T G P`: the same maps seen in other orthonormal bases."""
        return Experts(
            [left_OO @ d @ right_II for d in self.deltas],
            left_OO @ self.base @ right_II,
            {**self.statistics, "gram": [right_II.mT @ g @ right_II for g in self.statistics["gram"]]},
        )

    def all_tensors(self) -> list[Tensor]:
        """Everything that a rule may look at."""
        return [*self.deltas, self.base, *(v for values in self.statistics.values() for v in values)]


class _Buffer(bytearray):
    """Memory whose release can be observed."""

    __hash__ = object.__hash__


class LazyDeltas(Sequence[Tensor]):
    """Deltas made on demand that count how often each is read and how many are alive at once."""

    def __init__(self, deltas: Sequence[Tensor]) -> None:
        self._source = deltas
        self._alive: WeakSet[_Buffer] = WeakSet()
        self.reads = [0] * len(deltas)
        self.alive_before_read = 0

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        source = self._source[index]
        self.alive_before_read = max(self.alive_before_read, len(self._alive))
        self.reads[index] += 1
        buffer = _Buffer(source.numel() * source.element_size())
        self._alive.add(buffer)
        return torch.frombuffer(buffer, dtype=source.dtype).reshape(source.shape).copy_(source)

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(len(self)):
            yield self[index]


class Overlaid(Sequence[Tensor]):
    """Deltas that lie over one another, as an engine reads them: asking for one destroys the one before it."""

    def __init__(self, deltas: Sequence[Tensor]) -> None:
        self._source = deltas
        self._buffer = torch.empty_like(deltas[0])

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Any:
        return self._buffer.copy_(self._source[index])


def usable_experts(method: MergeMethod, wanted: int) -> int:
    """`wanted`, or fewer where the rule is defined for fewer."""
    return wanted if method.max_experts is None else min(wanted, method.max_experts)


def variants(method: MergeMethod) -> list[dict[str, Any]]:
    """The defaults; then each value of a `Literal` option, and each flag, by itself."""
    found: list[dict[str, Any]] = [{}]
    for name, option in method.options.items():
        if typing.get_origin(option.type) is typing.Literal:
            found += [{name: value} for value in typing.get_args(option.type)]
        elif option.type is bool:
            found += [{name: not option.default}]
    return found


def merged(method: MergeMethod, experts: Experts, *, seed: int = 0, **options: Any) -> Tensor:
    """Value of the rule on these experts, surveyed as a model of one tensor; no more experts than it takes."""
    experts = experts.with_deltas(experts.deltas[: usable_experts(method, len(experts.deltas))])
    resolved = method.resolve_options(options)
    return call(method, experts.deltas, resolved, **experts.given(method, resolved), seed=seed).value
