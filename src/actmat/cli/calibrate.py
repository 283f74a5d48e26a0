"""`actmat calibrate`: measure this machine, for predicted times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actmat.cli import flags

__all__ = ["calibrate"]


def calibrate(
    *,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write (default: this machine's in the cache).")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="On the disk to be measured (default: of temporary files).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Some seconds, with small matrices: rough.")] = False,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Measure the rates of this machine, in a minute, for 'actmat plan --simulate'.

    Measured are products, decompositions, elementwise operations, hashing and
    storage, on one thread and on all, and on an accelerator if there is one.
    Nothing else should run at the time.
    """
    from actmat.api.calibrating import calibrate as measured
    from actmat.cli.results import print_result
    from actmat.cli.screen import console, escape
    from actmat.cli.streams import say
    from actmat.errors import OutputError
    from actmat.timing.measure import QUICK, Effort
    from actmat.timing.rates import rates_file, save_rates

    def note(text: str) -> None:
        if not quiet:
            say(f"measuring {text}")

    path = out or rates_file()
    try:
        rates = measured(QUICK if quick else Effort(), folder=folder, note=note)
        save_rates(rates, path)
    except OSError as error:
        raise OutputError(f"The rates cannot be measured or written: {error}. Fix: give --out or --folder.") from None
    if json:
        print_result("calibrate", {"file": str(path), "rates": rates.to_json()})
    if json or quiet:
        return
    console.print(f"{escape(rates.processor)}, {rates.cores} core(s); written to {escape(path)}")
    for line in rates.lines():
        console.print(escape(line))
    if rates.load > 0.5 * rates.cores:
        console.print(
            f"note: {rates.load:g} processes were running on {rates.cores} core(s): measure again when it is quiet"
        )
