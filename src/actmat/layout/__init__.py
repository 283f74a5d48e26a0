"""Layouts of tensors: roles, orientation, packed linear maps, ties."""

from __future__ import annotations

from actmat.layout.paper import paper_scope
from actmat.layout.patterns import compile_pattern
from actmat.layout.resolve import resolve_layout
from actmat.layout.ties import tied_partner
from actmat.layout.types import Block, LayoutMap, Orientation, Role, RoleOverride, TensorLayout

__all__ = [
    "Block",
    "LayoutMap",
    "Orientation",
    "Role",
    "RoleOverride",
    "TensorLayout",
    "compile_pattern",
    "paper_scope",
    "resolve_layout",
    "tied_partner",
]
