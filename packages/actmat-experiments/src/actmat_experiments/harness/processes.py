"""Several processes on one experiment, each with a GPU of its own; one thread each on a CPU."""

from __future__ import annotations

import contextlib
import os

from actmat.engine.resources import one_thread

__all__ = ["one_thread_on", "placed"]


def one_thread_on(device: str) -> contextlib.AbstractContextManager[None]:
    """One thread per operation on a CPU, nothing elsewhere.

    Runs go side by side there; and sums that are split among other numbers of threads would train other weights.
    """
    return one_thread() if device == "cpu" else contextlib.nullcontext()


def placed(device: str) -> tuple[tuple[int, int] | None, str]:
    """Number of this process and how many there are under `accelerate launch`, None without it; and its device."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None, device
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu")
    return (state.process_index, state.num_processes), str(state.device)
