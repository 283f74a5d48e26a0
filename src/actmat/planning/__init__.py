"""Plans: recipe + headers -> a frozen description of every output."""

from __future__ import annotations

from actmat.planning.build import build_plan
from actmat.planning.model import Item, MergePlan, MethodCall

__all__ = ["Item", "MergePlan", "MethodCall", "build_plan"]
