"""Retries of requests with growing pauses."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from actmat.errors import CheckpointError, MergeError

__all__ = ["ATTEMPTS", "TransientError", "retried"]

ATTEMPTS = 6
FIRST_PAUSE = 0.5
"""Seconds before the second attempt; each later pause is twice as long: 15 s in all."""

LONGEST_PAUSE = 60.0
"""Most seconds that a server's Retry-After is followed."""

T = TypeVar("T")


class TransientError(Exception):
    """A request failed in a way that another attempt may not.

    Args:
        reason: in words.
        pause: seconds that the server asks to wait.
    """

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


def retried(request: Callable[[], T], what: str, *, error: type[MergeError] = CheckpointError) -> T:
    """Result of `request()`, repeated after a `TransientError` with pauses that double, up to `ATTEMPTS` times.

    Args:
        request: one attempt.
        what: name of the file in messages.
        error: type of what is raised in the end.

    Raises:
        MergeError: every attempt failed; names the file and the last reason.
    """
    for attempt in range(ATTEMPTS):
        try:
            return request()
        except TransientError as failure:
            if attempt + 1 == ATTEMPTS:
                raise error(
                    f"{what}: {ATTEMPTS} attempts failed, the last with: {failure}. Likely cause: the network, or a "
                    "server that is overloaded. Fix: give the same command again, what is finished is kept."
                ) from failure
            # the jitter keeps workers that failed together from coming back together; no result depends on it
            pause = FIRST_PAUSE * 2**attempt * (0.75 + 0.5 * random.random())
            time.sleep(max(pause, min(failure.pause, LONGEST_PAUSE)))
    raise AssertionError("the last attempt returns or raises")
