"""Requests to servers: retries with growing pauses, and the parts of HTTP that stores of files share."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from actmat.errors import CheckpointError, MergeError

ATTEMPTS = 6
FIRST_PAUSE = 0.5
"""Seconds before the second attempt; each later pause is twice as long: 15 s in all."""

LONGEST_PAUSE = 60.0
"""Longest Retry-After of a server that is obeyed, in seconds."""

FIRST_RANGE = 256 * 1024
"""Bytes of the first request for a file: nearly every safetensors header is shorter."""

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which another attempt may succeed."""

TIMEOUT = 30.0
"""Seconds without a byte after which a request fails."""

PATIENCE = 60.0
"""Seconds after which an answer must have come at `SLOWEST` or faster, in bytes per second."""
SLOWEST = 1000

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
        error: type of the error that is raised in the end.

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
                    "server that is overloaded. Fix: run the same command again; finished work is kept."
                ) from failure
            # the jitter keeps workers that failed together from coming back together; no result depends on it
            pause = FIRST_PAUSE * 2**attempt * (0.75 + 0.5 * random.random())
            time.sleep(max(pause, min(failure.pause, LONGEST_PAUSE)))
    raise AssertionError("the last attempt returns or raises")


def read_body(answer: Any, length: int) -> bytes:
    """The first `length` bytes of an answer that is streamed; stops early, a server may send more.

    Raises:
        TransientError: it ended early, or arrives too slowly.
        CheckpointError: it is compressed although this was not requested, so that a range is meaningless.
    """
    if (coding := answer.headers.get("Content-Encoding", "identity").strip().lower()) != "identity":
        raise CheckpointError(
            f"{str(answer.url)[:200]}: asked for the bytes of a file, the server sent them with the encoding "
            f"'{coding[:40]}'. Fix: download the folder and give it, or use a server that honors Accept-Encoding."
        )
    out = bytearray()
    with _paced(answer.extensions["network_stream"]):
        for chunk in answer.iter_raw():
            out += chunk
            if len(out) >= length:
                return bytes(out[:length])
    raise TransientError(f"the answer ended after {len(out)} of {length} bytes")


@contextmanager
def _paced(stream: Any) -> Iterator[None]:
    """A connection that breaks when it is too slow, also between the chunks that the HTTP client passes on.

    Raises:
        TransientError: in place of the next bytes.
    """
    receive, count, began = stream.read, 0, time.monotonic()

    def read(*arguments: Any, **options: Any) -> bytes:
        nonlocal count
        if (passed := time.monotonic() - began) > PATIENCE and count < SLOWEST * passed:
            raise TransientError(f"only {count} bytes came in {passed:.0f} s")
        data: bytes = receive(*arguments, **options)
        count += len(data)
        return data

    stream.read = read
    try:
        yield
    finally:
        del stream.read


@contextmanager
def ranged(url: str, offset: int, length: int, headers: Mapping[str, str]) -> Iterator[Any]:
    """The answer of a server to a request for bytes of a file, through the HTTP client of `huggingface_hub`.

    Raises:
        TransientError: a time-out, a broken connection, or a status after which another attempt may succeed.
    """
    from huggingface_hub import errors, get_session

    broken: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]  # of whichever httpx the library uses
    wanted = {**headers, "Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
    try:
        with get_session().stream("GET", url, headers=wanted, timeout=TIMEOUT) as answer:
            if answer.status_code in TRANSIENT:
                raise TransientError(f"HTTP {answer.status_code}", pause_of(answer))
            yield answer
    except errors.HfHubHTTPError:
        raise
    except broken as error:
        raise TransientError(f"{type(error).__name__}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error of another library."""
    return (str(error).strip().splitlines() or ["no message"])[0][:200]


def pause_of(answer: Any) -> float:
    """Seconds that an answer asks to wait; 0 if it does not say, or gives a date."""
    with suppress(ValueError):
        return max(0.0, float(answer.headers.get("Retry-After", "0")))
    return 0.0
