"""Flags of `actmat analyze` for the user's own checkpoints, and parsers of lists."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from actmat.errors import RecipeError

if TYPE_CHECKING:
    from actmat_experiments.core import Statistics as StatisticsFile


@dataclass(frozen=True)
class OwnCheckpoints:
    """Checkpoints of the user with statistics, in place of a demo."""

    base: Annotated[
        str | None, typer.Option("--base", "-b", help="Your own base, instead of a demo: folder or hub id.")
    ] = None
    expert: Annotated[
        list[str] | None, typer.Option("--expert", "-e", help="NAME=CHECKPOINT of an expert, once per expert.")
    ] = None
    statistics: Annotated[
        list[str] | None,
        typer.Option("--statistics", help="NAME=FOLDER of the expert's Gram matrices, once per expert."),
    ] = None

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[str, dict[str, str], Mapping[str, StatisticsFile]] | None]:
        """Base, experts and their open statistics; None where none are given, which means a demo."""
        experts, places = named(self.expert, "--expert"), named(self.statistics, "--statistics")
        if not (self.base or experts or places):
            yield None
            return
        if not self.base or not experts or experts.keys() != places.keys():
            raise RecipeError(
                "Your own checkpoints need --base, and --expert and --statistics with the same names; "
                f"got experts {sorted(experts)} and statistics {sorted(places)}."
            )
        from actmat_experiments.core import open_statistics

        with contextlib.ExitStack() as stack:
            yield self.base, experts, {n: stack.enter_context(open_statistics(p)) for n, p in places.items()}


def named(given: list[str] | None, flag: str) -> dict[str, str]:
    """NAME=PATH, all of them."""
    pairs = [g.partition("=") for g in given or ()]
    if wrong := [f"got '{n}{equals}{path}'" for n, equals, path in pairs if not (n and equals and path)]:
        raise RecipeError(f"{flag} is NAME=PATH.", wrong)
    return {n: path for n, _, path in pairs}


def numbered(given: list[str] | None, flag: str) -> dict[int, str]:
    """STEP=PATH, all of them."""
    found = named(given, flag)
    if wrong := [f"got '{n}={path}'" for n, path in found.items() if not n.isdecimal()]:
        raise RecipeError(f"{flag} is STEP=PATH, with the number of steps after which the checkpoint was saved.", wrong)
    return {int(n): path for n, path in found.items()}


def numbers(text: str, flag: str) -> list[int]:
    """Numbers above zero with commas between."""
    words = [w.strip() for w in text.split(",")]
    if not all(w.isdecimal() and int(w) > 0 for w in words):
        raise RecipeError(f"{flag} takes comma-separated positive numbers, such as 10,100; got '{text}'.")
    return sorted({int(w) for w in words})


def shape_of(text: str) -> tuple[int, int]:
    """`4096x1024`."""
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal()):
        raise RecipeError(f"--shape is OxI, such as 4096x1024; got '{text}'.")
    return int(rows), int(columns)
