"""The paper's analyses as tools: what its theorems suppose, measured.

Each gives an `Analysis` with tables, JSON and a figure; `actmat analyze NAME` is its command and
docs/analyses/README.md its documentation.
"""

from __future__ import annotations

from actmat_experiments.analyses.correlation import correlation
from actmat_experiments.analyses.cost import cost
from actmat_experiments.analyses.distribution import distribution
from actmat_experiments.analyses.drift import drift
from actmat_experiments.analyses.estimates import cosine, scale
from actmat_experiments.analyses.interference import interference
from actmat_experiments.analyses.monitor import DriftMonitor
from actmat_experiments.analyses.packed import packed
from actmat_experiments.analyses.result import Analysis, save_analysis
from actmat_experiments.analyses.theorem1 import theorem1
from actmat_experiments.analyses.theorem2 import theorem2
from actmat_experiments.analyses.trajectory import trajectory_of_statistics
from actmat_experiments.analyses.transfer import transfer

__all__ = [
    "Analysis",
    "DriftMonitor",
    "correlation",
    "cosine",
    "cost",
    "distribution",
    "drift",
    "interference",
    "packed",
    "save_analysis",
    "scale",
    "theorem1",
    "theorem2",
    "trajectory_of_statistics",
    "transfer",
]
