"""The flags of a simulated run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actmat.flag import Flag

if TYPE_CHECKING:
    from actmat.planning import MergePlan
    from actmat.timing.predict import Prediction

__all__ = ["SimulationFlags"]


@dataclass(frozen=True)
class SimulationFlags:
    """On which machines a run is simulated; see `timing.predict.predict`."""

    simulate: Annotated[
        str | None, Flag(help="Predict the time on so many machines like this one; 4x16: 16 workers on each.")
    ] = None
    bandwidth: Annotated[
        str | None, Flag(help="With --simulate: bytes per second of storage shared by all machines, such as 10GB.")
    ] = None
    network: Annotated[
        str | None, Flag(help="With --simulate: bytes per second between one machine and that storage.")
    ] = None
    rates: Annotated[
        Path | None, Flag(help="With --simulate: rates of other machines, from 'actmat calibrate --out'.", type=Path)
    ] = None

    def predictions(self, plans: Sequence[MergePlan]) -> list[Prediction]:
        """A prediction for each plan; none where none is wanted.

        Raises:
            RecipeError: a flag cannot be read, or this machine was not calibrated.
        """
        if self.simulate is None:
            if any(x is not None for x in (self.bandwidth, self.network, self.rates)):
                raise typer.BadParameter("--bandwidth, --network and --rates are for --simulate NODES")
            return []
        from actmat.timing.predict import predict
        from actmat.timing.rates import load_rates

        rates = load_rates(self.rates)
        return [predict(p, rates, self.simulate, bandwidth=self.bandwidth, network=self.network) for p in plans]
