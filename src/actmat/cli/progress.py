"""The progress bar of a command that merges."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from actmat.cli.screen import MergeProgress

__all__ = ["showing_progress"]


@contextlib.contextmanager
def showing_progress(doing: str = "merging", *, quiet: bool) -> Iterator[Any]:
    """An `actmat.progress.Progress` that draws a bar on stderr, or None if `quiet`."""
    if quiet:
        yield None
    else:
        with MergeProgress(doing) as progress:
            yield progress
