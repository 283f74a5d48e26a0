"""Comparison of base and experts beside their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actmat.checkpoints.base import Checkpoint
from actmat.experts.base import Expert
from actmat.identity.compare import Agreement, agree


def agreement(
    base: Checkpoint,
    experts: Sequence[tuple[str, Expert]],
    take: str | None = None,
    written: Mapping[str, Any] | None = None,
) -> Agreement:
    """Compare configs of base and experts.

    Args:
        base: of the merge.
        experts: with their labels.
        take: whose entries are written where they differ.
        written: config of the base as an output has it; default: as stored.
    """
    configs = [(label, expert.config) for label, expert in experts]
    return agree(base.config if written is None else written, configs, take)
