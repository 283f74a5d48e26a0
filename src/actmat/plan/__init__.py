"""Plans: recipe + headers -> a frozen description of every output."""

from __future__ import annotations

from actmat.plan.build import build_plan
from actmat.plan.model import Item, MergePlan, MethodCall

__all__ = ["Item", "MergePlan", "MethodCall", "build_plan"]
