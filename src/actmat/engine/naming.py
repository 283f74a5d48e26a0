"""Add the tensor's and the method's name to errors raised by a method."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from actmat.errors import NumericalError, RecipeError

__all__ = ["named_errors"]


@contextlib.contextmanager
def named_errors(kind: str, name: str, method: str) -> Iterator[None]:
    """Raise errors of a method with the item that it was merging: `kind` ("tensor", "module") and its name.

    Raises:
        NumericalError: the method's own, or a factor that the compute dtype does not hold.
        RecipeError: for a ValueError: an option or a weight that only the values show to be wrong.
    """
    where = f"{kind} '{name}', method '{method}'"
    try:
        yield
    except NumericalError as error:
        raise NumericalError(f"{where}: {error}") from error
    except ValueError as error:
        raise RecipeError(f"{where}: {error}") from error
    except RuntimeError as error:
        if "without overflow" not in str(error):  # torch's words for a factor that the dtype does not hold
            raise
        raise NumericalError(
            f"{where}: an option or a weight gives a factor beyond the compute dtype's range; use values nearer to 1, "
            "or --compute-dtype float64"
        ) from error
