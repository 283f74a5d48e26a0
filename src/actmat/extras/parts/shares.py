"""Shares: the units of a merge divided over parts that run apart, by planned cost.

    part = Part.parse("3/16")
    mine = share_units(plan_units([plan], [()], None), part.of)[part.index]

A share follows from the plan and the number of parts: it does not depend on what is finished, on the machine, or on the
order in which parts run.
"""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actmat.engine.units import Unit, plan_units
from actmat.errors import RecipeError
from actmat.methods import get_method
from actmat.planning.cost import NOMINAL_BYTES, NOMINAL_FLOPS
from actmat.planning.model import MergePlan

FLOPS_PER_BYTE = round(NOMINAL_FLOPS / NOMINAL_BYTES)
"""Operations that take as long as one byte to or from storage."""

MOST_PARTS = 100_000


@dataclass(frozen=True, slots=True)
class Part:
    """One of several parts of a merge, counted from 1.

    >>> Part.parse("3/16").index, str(Part(3, 16))
    (2, '3/16')
    """

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """The part of a text such as `3/16`.

        Raises:
            RecipeError: another form, or a number that is not within 1 and the number of parts.
        """
        match = re.fullmatch(r"\s*(\d{1,9})/(\d{1,9})\s*", text, re.ASCII)
        number, of = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= number <= of <= MOST_PARTS:
            raise RecipeError(
                f"A part is written 3/16: the third of sixteen, counted from 1, at most {MOST_PARTS}. Got "
                f"{text[:40]!r}. Where a scheduler counts from 0, add 1 to its number."
            )
        return cls(number, of)

    @property
    def index(self) -> int:
        """Position of its share."""
        return self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def work_of(unit: Unit) -> int:
    """Planned cost of a unit, in bytes that take as long."""
    return unit.traffic + unit.flops // FLOPS_PER_BYTE


def share_units(units: Sequence[Unit], parts: int) -> list[tuple[Unit, ...]]:
    """Shares of about the same cost: each unit, the dearest first, goes to the part that has least so far.

    R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 1969: the largest share costs at
    most 4/3 of what is possible. Within a share units are in the order of the plan.

    Args:
        units: of the whole plan, whatever is finished.
        parts: number of shares; some are empty where there are fewer units.
    """
    order = sorted(range(len(units)), key=lambda n: (-work_of(units[n]), n))
    loads = [(0, part) for part in range(parts)]
    shares: list[list[int]] = [[] for _ in range(parts)]
    for n in order:
        load, part = loads[0]
        shares[part].append(n)
        heapq.heapreplace(loads, (load + work_of(units[n]), part))
    return [tuple(units[n] for n in sorted(share)) for share in shares]


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Share of one part of a merge.

    Args:
        part: which one.
        names: of its items, in the order of the plan.
        read_bytes, write_bytes, flops: of its items.
        survey_bytes: what one pass of the surveys of whole models reads; every part does all passes.
        work: its share of the planned cost of the merge, 1 for all of it; `largest`: that of the dearest part.
    """

    part: Part
    names: tuple[str, ...]
    read_bytes: int
    write_bytes: int
    flops: int
    survey_bytes: int
    work: float
    largest: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self) | {"part": str(self.part), "names": list(self.names)}


def plan_part(plan: MergePlan, part: Part) -> PartPlan:
    """The share of a part, and its cost."""
    shares = share_units(plan_units([plan], [()], None), part.of)
    work = [sum(map(work_of, share)) for share in shares]
    items = [plan.items[n] for unit in shares[part.index] for group in unit.groups for _, n in group]
    return PartPlan(
        part=part,
        names=tuple(i.name for i in items),
        read_bytes=sum(i.cost.read_bytes for i in items),
        write_bytes=sum(i.cost.write_bytes for i in items),
        flops=sum(i.cost.flops for i in items),
        survey_bytes=survey_bytes(plan),
        work=work[part.index] / max(1, sum(work)),
        largest=max(work) / max(1, sum(work)),
    )


def survey_bytes(plan: MergePlan) -> int:
    """Bytes that one pass of the surveys of whole models reads; every part does all passes."""
    total = 0
    for item in plan.items:
        if item.call is None:
            continue
        survey = get_method(item.call.method).survey
        wanted = survey is not None and survey.applies(item.call.options)
        if wanted or item.call.layer_call is not None:
            total += item.cost.read_bytes
    return total
