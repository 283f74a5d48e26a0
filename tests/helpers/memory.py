"""How much memory a call allocates at its peak."""

from collections.abc import Callable

import torch


def peak_bytes(function: Callable[[], object]) -> int:
    """Largest sum of live allocations made inside `function`, the result and LAPACK's work space included."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:  # torch.profiler imports the compiler
        result = function()
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del result
    return peak
