"""A process that checks classes one after the other."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any


def serve(connection: Any) -> None:
    """Check classes until told to stop."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - libraries warn about every class
    logging.disable(logging.CRITICAL)
    import torch

    torch.set_num_threads(1)
    from benchmarks.families.check import check

    while (one := connection.recv()) is not None:
        try:
            connection.send(check(one))
        except Exception as error:  # noqa: BLE001 - a row, whatever it is
            row = {"library": one.library, "class": one.name, "type": one.model_type, "stage": "failed"}
            connection.send(row | {"why": f"{type(error).__name__}: {error}"[:300]})
