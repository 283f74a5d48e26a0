"""What will happen: recipe + headers -> a frozen plan."""

from __future__ import annotations

from actmat.plan.build import build_plan
from actmat.plan.model import MergePlan, MethodCall, TensorPlan

__all__ = ["MergePlan", "MethodCall", "TensorPlan", "build_plan"]
