"""Every error that actmat raises on purpose: a small closed tree.

A `MergeError` says what was expected, what was found, the likely cause and the fix. Errors about an input carry
*all* problems of that input (`problems`), because one problem per run is a day lost on a large checkpoint.
`exit_code` is what the command line returns: 1 when the inputs, the recipe or the output place are wrong,
3 when the work failed while running.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

__all__ = [
    "AlignmentError",
    "CheckpointError",
    "MergeError",
    "NumericalError",
    "OutputError",
    "RecipeError",
    "StatisticsError",
    "did_you_mean",
    "format_size",
]

SHOWN_PROBLEMS = 50


class MergeError(Exception):
    """Base of the tree. `problems` holds one line per problem; a plain message is a list of one.

    Args:
        headline: what went wrong, in one line.
        problems: every single problem found, each naming the tensor and the file where there is one.
    """

    exit_code: ClassVar[int] = 3

    def __init__(self, headline: str, problems: Iterable[str] = ()) -> None:
        self.headline = headline
        self.problems: tuple[str, ...] = tuple(problems) or (headline,)
        super().__init__(self._render())

    def _render(self) -> str:
        if self.problems == (self.headline,):
            return self.headline
        shown = self.problems[:SHOWN_PROBLEMS]
        lines = [self.headline, *(f"  - {p}" for p in shown)]
        if len(self.problems) > len(shown):
            lines.append(f"  ... and {len(self.problems) - len(shown)} more problems of the same input")
        return "\n".join(lines)


class RecipeError(MergeError):
    """The recipe or the flags cannot be carried out as written (unknown method, misspelt option, bad value)."""

    exit_code = 1


class CheckpointError(MergeError):
    """A checkpoint is missing, damaged, hostile, of an unsupported format, or holds unusable values."""

    exit_code = 1


class AlignmentError(MergeError):
    """The checkpoints do not fit together (a tensor missing in one expert, another shape, other ties)."""

    exit_code = 1


class StatisticsError(MergeError):
    """Statistics are missing, of another model, or of the wrong shape."""

    exit_code = 1


class OutputError(MergeError):
    """The output cannot be written where it was asked for (exists, is an input, disk full, no permission)."""

    exit_code = 1


class NumericalError(MergeError):
    """A computation failed on finite inputs (an eigensolver that never converged)."""

    exit_code = 3


def format_size(nbytes: float) -> str:
    """`1.5 GB`: powers of ten, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 999.5:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" Did you mean 'ties'?"` when a known word is near, else an empty string."""
    import difflib

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else ""
