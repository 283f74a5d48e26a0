"""Sums over matrices, for figures of layers.

`T` experts; every vector has `T` entries. Norms add in squares, since matrices are blocks of one long vector.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from actmat.diagnostics.model import Matrix, Measure, Vector


@dataclass(frozen=True, slots=True)
class Layer:
    """The measured matrices at one depth; `depth` is None for those outside the stack of layers."""

    depth: int | None
    measures: tuple[Measure, ...]

    @property
    def label(self) -> str:
        """Short name for an axis."""
        return "other" if self.depth is None else str(self.depth)

    @property
    def title(self) -> str:
        """Name for a sentence."""
        return "outside the layers" if self.depth is None else f"layer {self.depth}"


def layers_of(measures: Iterable[Measure]) -> list[Layer]:
    """Layers by depth; matrices without a depth come last."""
    found: dict[int | None, list[Measure]] = {}
    for m in measures:
        found.setdefault(m.layer, []).append(m)
    depths: list[int | None] = [*sorted(d for d in found if d is not None), *([None] if None in found else [])]
    return [Layer(d, tuple(found[d])) for d in depths]


def residual_over(measures: Sequence[Measure], expert: int) -> float | None:
    """`sqrt(sum_m ||D_t||^2 rho_t^2 / sum_m ||D_t||^2)`: energy-weighted rms; None where nothing changed."""
    energy = math.fsum(m.norms[expert] ** 2 for m in measures)
    if energy == 0:
        return None
    return math.sqrt(math.fsum((m.residual[expert] * m.norms[expert]) ** 2 for m in measures) / energy)


def root_sum(norms: Iterable[float]) -> float:
    """Norm of all matrices together, from the norm of each."""
    return math.sqrt(math.fsum(n**2 for n in norms))


def overall_cosine(measures: Sequence[Measure]) -> Matrix:
    """Cosine between whole experts: `sum_m <D_s, D_t> / (||D_s|| ||D_t||)` over all measured matrices; 0 for a zero."""
    size = len(measures[0].norms)
    norms = [root_sum(m.norms[t] for m in measures) for t in range(size)]

    def cosine(s: int, t: int) -> float:
        inner = math.fsum(m.cosine[s][t] * m.norms[s] * m.norms[t] for m in measures)
        return inner / (norms[s] * norms[t]) if norms[s] and norms[t] else 0.0

    return tuple(tuple(cosine(s, t) for t in range(size)) for s in range(size))


def overall_share(measures: Sequence[Measure], share: Callable[[Measure], Matrix | float | None]) -> Matrix | None:
    """Mean of a `T x T` share over matrices, by their number of entries; None where no matrix has it."""
    found = [(m.shape[0] * m.shape[1], v) for m in measures if isinstance(v := share(m), tuple)]
    if not found:
        return None
    total = sum(n for n, _ in found)
    size = len(found[0][1])

    def mean(s: int) -> Vector:
        return tuple(math.fsum(n * v[s][t] for n, v in found) / total for t in range(size))

    return tuple(mean(s) for s in range(size))


def kind_of(measure: Measure) -> str:
    """Name of a matrix without its layer: `kind_of_name`, and its part.

    `model.layers.3.self_attn.q_proj.weight` -> `self_attn.q_proj`; `h.2.attn.c_attn.weight`, q -> `attn.c_attn [q]`.
    """
    part = re.sub(r"\d+", "*", measure.part)
    return kind_of_name(measure.name) + (f" [{part}]" if part else "")


def kind_of_name(name: str) -> str:
    """The last two words of a tensor's name, without numbers."""
    return ".".join([w for w in name.removesuffix(".weight").split(".") if not w.isdigit()][-2:])


def kinds(measures: Sequence[Measure], most: int) -> list[tuple[str, list[Measure]]]:
    """The kinds that hold most of the energy, in the order of the model."""
    found: dict[str, list[Measure]] = {}
    for m in measures:
        found.setdefault(kind_of(m), []).append(m)
    energy = {k: sum(n * n for m in ms for n in m.norms) for k, ms in found.items()}
    kept = set(sorted(energy, key=lambda k: (-energy[k], k))[:most])
    return [(k, ms) for k, ms in found.items() if k in kept]
