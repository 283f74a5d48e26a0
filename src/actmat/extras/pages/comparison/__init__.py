"""Comparison of two merges of the same experts: weights, recipes, answers kept."""

from __future__ import annotations

from actmat.extras.pages.comparison.merges import compare
from actmat.extras.pages.comparison.model import Difference, MergeComparison, TensorDifference

__all__ = ["Difference", "MergeComparison", "TensorDifference", "compare"]
