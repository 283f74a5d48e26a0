"""Entries of a tensor from which its norm is estimated: evenly spread runs."""

from __future__ import annotations

__all__ = ["RUN", "RUNS", "sample_runs"]

RUNS = 16
RUN = 2048
"""Consecutive entries. 32,768 in all take 128 kB for the base and 256 kB for the sum, per worker and however many
experts there are, and give the norm of independent normal entries with a standard error of `1 / sqrt(2 * 32768)`,
0.4 %; where tails are heavy, or parts of a tensor differ, it is larger.
"""


def sample_runs(numel: int) -> list[tuple[int, int]]:
    """`(start, stop)` of the runs of a tensor, in order; they do not overlap.

    >>> sample_runs(10), len(sample_runs(10**9))
    ([(0, 10)], 16)
    """
    if numel <= RUNS * RUN:
        return [(0, numel)] if numel else []
    return [(start, start + RUN) for start in (k * (numel - RUN) // (RUNS - 1) for k in range(RUNS))]
