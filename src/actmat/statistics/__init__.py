"""Statistics of models on data, such as Gram matrices of layer inputs and the diagonal Fisher: reading their files."""

from __future__ import annotations

from actmat.statistics.store import Statistics, open_statistics

__all__ = ["Statistics", "open_statistics"]
