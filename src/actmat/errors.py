"""Every error that actmat raises on purpose: a small closed tree, all of it importable from `actmat`.

A message says what was found, what was expected, the likely cause and the fix. Errors about an input carry *all* its
problems, because finding one per run can take a day on a large checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from actmat.foreign import terminal

SHOWN_PROBLEMS = 50
MOST_ALIKE = 3
"""Problems of one kind that are listed one by one, and names of one cause that are shown."""


class MergeError(Exception):
    """Base of the tree.

    >>> print(RecipeError("The recipe is not valid.", ["scale: not a number", "seed: not a number"]))
    The recipe is not valid.
      - scale: not a number
      - seed: not a number

    Every problem is shown in one line of printable characters, whatever the names in it hold.

    Args:
        headline: summary in one line.
        problems: every problem, with its tensor and file; default: the headline.
    """

    exit_code: ClassVar[int] = 3
    """Exit code of the command line: 1 if inputs, recipe or output location are wrong, 3 for a failure at run time."""

    is_permanent: bool = False
    """True if only another recipe or other inputs can fix it, so that partial results are useless."""

    def __init__(self, headline: str, problems: Iterable[str] = ()) -> None:
        self.headline = headline
        self.problems: tuple[str, ...] = tuple(problems) or (headline,)
        super().__init__(self._render())

    @property
    def sentence(self) -> str:
        """Headline and all problems in one line, for the list of problems of another error."""
        if self.problems == (self.headline,):
            return self.headline
        mark = "" if self.headline.endswith((".", ":")) else ":"
        return f"{self.headline}{mark} {'; '.join(by_cause(self.problems))}"

    def _render(self) -> str:
        if self.problems == (self.headline,):
            return terminal(self.headline)
        causes = by_cause(self.problems)
        shown = causes[:SHOWN_PROBLEMS]
        lines = [terminal(self.headline), *(f"  - {terminal(p)}" for p in shown)]
        if len(causes) > len(shown):
            lines.append(f"  ... and {len(causes) - len(shown)} more problems of the same input")
        return "\n".join(lines)


_VARYING = re.compile(r"'[^']*'|\d+")


def by_cause(problems: Sequence[str]) -> list[str]:
    """Problems that differ in quoted names and numbers only, as one line: the first, with more names and their count.

    >>> by_cause([f"module 'h.{k}' has rank {k + 2}, the layer {k}" for k in range(60)])
    ["module 'h.0' has rank 2, the layer 0 (and 59 more of this kind: 'h.1', 'h.2', ...)"]
    """
    groups: dict[str, list[str]] = {}
    for problem in problems:
        groups.setdefault(_VARYING.sub("*", problem), []).append(problem)
    out = []
    for alike in groups.values():
        if len(alike) <= MOST_ALIKE:
            out += alike
            continue
        first, *others = (_VARYING.findall(text) for text in alike[:MOST_ALIKE])
        column = next((k for k, value in enumerate(first) if any(o[k] != value for o in others)), 0)
        out.append(f"{alike[0]} (and {len(alike) - 1} more of this kind: {', '.join(o[column] for o in others)}, ...)")
    return out


def first_names(names: Collection[str]) -> str:
    """The first three names and the number of others.

    >>> first_names(["a", "b", "c", "d"])
    "'a', 'b', 'c' and 1 more"
    """
    return first_of([f"'{n}'" for n in names])


def first_of(texts: Sequence[str], most: int = MOST_ALIKE) -> str:
    """The first texts and the number of others.

    >>> first_of(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


class RecipeError(MergeError):
    """The recipe or the flags cannot be carried out as written (unknown method, misspelled option, bad value)."""

    exit_code = 1
    is_permanent = True


class CheckpointError(MergeError):
    """A checkpoint is missing, damaged, hostile, of an unsupported format, or holds unusable values."""

    exit_code = 1


class AlignmentError(MergeError):
    """The checkpoints do not fit together (a tensor missing in one expert, another shape, other ties)."""

    exit_code = 1
    is_permanent = True


class StatisticsError(MergeError):
    """Statistics are missing, of another model, or of the wrong shape."""

    exit_code = 1
    is_permanent = True


class OutputError(MergeError):
    """The output cannot be written to its place (exists, is an input, disk full, no permission)."""

    exit_code = 1


class NumericalError(MergeError):
    """A computation failed on finite inputs (an eigensolver that never converged)."""

    exit_code = 3
    is_permanent = True


_MEMORY_MESSAGES = (
    "allocate memory",  # torch on a CPU, and the C library
    "out of memory",  # CUDA
    "can't start new thread",  # no room for its stack
    "failed to map segment",  # a library that is imported
    "alloc_failed",  # cuBLAS and its relatives
)


def is_memory_error(error: BaseException) -> bool:
    """True for too little memory, for which torch and the system raise errors of several types, some without a code."""
    known = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return known or any(message in str(error).lower() for message in _MEMORY_MESSAGES)


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Turn the errors that mean too little memory, which torch and Python raise as several types, into a `MergeError`.

    >>> with memory_errors():
    ...     raise MemoryError
    Traceback (most recent call last):
    actmat.errors.MergeError: Too little memory. Likely cause: ...
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError, ImportError) as error:
        if not is_memory_error(error):
            raise
        text = " ".join(str(error).split())[:200]
        raise MergeError(
            f"Too little memory{f': {text}' if text else ''}. Likely cause: other programs, or a limit on this "
            "process (ulimit -v, a container's), that the free memory does not show. Fix: a smaller --max-memory, "
            "--threads 1, or a machine with more memory; the same command goes on where it stopped."
        ) from error


def format_size(nbytes: float) -> str:
    """A size in powers of ten with three digits.

    >>> format_size(1.5e9)
    '1.5 GB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 999.5:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question that suggests the most similar known word, whatever its case; empty without one.

    >>> did_you_mean("TISE", ["ties", "dare"])
    " Did you mean 'ties'?"
    """
    import difflib

    spelled = {k.casefold(): k for k in known}
    near = difflib.get_close_matches(word.casefold(), [*spelled], n=1, cutoff=0.6)
    return f" Did you mean '{spelled[near[0]]}'?" if near else ""


NoteSeverity = Literal["note", "warning"]


@dataclass(frozen=True, slots=True)
class Note:
    """A message of a plan or of a finished merge.

    >>> print(Note("warning", "AM404", "the adapter is 0"))
    warning AM404: the adapter is 0

    Args:
        severity: commands show warnings first.
        code: of a check, or what code reads of other messages; empty for those that only people read.
        text: for people; begins with a small letter.
    """

    severity: NoteSeverity
    code: str
    text: str

    def __str__(self) -> str:
        return f"{f'warning {self.code}'.strip()}: {self.text}" if self.severity == "warning" else self.text


@dataclass
class Problems:
    """Errors found so far; raised together, because one problem per run is a day lost on a large checkpoint."""

    found: list[MergeError] = field(default_factory=list)

    @contextlib.contextmanager
    def noted(self, kind: type[MergeError] = MergeError) -> Iterator[None]:
        """Collect an error of a kind, and continue."""
        try:
            yield
        except kind as error:
            self.found.append(error)

    def check(self) -> None:
        """Raise all errors as one, of the first one's kind."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            problems = list(dict.fromkeys(p for e in self.found for p in e.problems))
            headline = f"The merge cannot be done: {len(problems)} problem{'s' * (len(problems) > 1)}."
            raise type(self.found[0])(headline, problems)
