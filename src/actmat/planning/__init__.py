"""Plans: recipe + headers -> a frozen description of every output."""

from __future__ import annotations

from actmat.planning.model import Item, MergePlan, MethodCall
from actmat.planning.plan import build_plan

__all__ = ["Item", "MergePlan", "MethodCall", "build_plan"]
