"""Statistics of models on data, such as Gram matrices of layer inputs and the diagonal Fisher."""

from __future__ import annotations

from actmat.extras.collect.agreement import Agreement, agreement
from actmat.extras.collect.collect import Collected, collect
from actmat.statistics.combine import merge_statistics
from actmat.statistics.store import Statistics, open_statistics

__all__ = ["Agreement", "Collected", "Statistics", "agreement", "collect", "merge_statistics", "open_statistics"]
