"""Comparison of two merges of the same experts: weights, recipes, residuals, checks."""

from __future__ import annotations

from actmat.extras.pages.comparison.merges import compare
from actmat.extras.pages.comparison.model import (
    CheckDifference,
    Comparison,
    ResidualDifference,
    SettingDifference,
    TensorDifference,
)

__all__ = ["CheckDifference", "Comparison", "ResidualDifference", "SettingDifference", "TensorDifference", "compare"]
