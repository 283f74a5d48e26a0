"""Pieces of a model of SentencePiece, from its file: a protobuf message, of which only these fields are read."""

from __future__ import annotations

from collections.abc import Iterator

_FIXED = {1: 8, 5: 4}
"""Kind of a field -> its bytes."""


def pieces(data: bytes) -> dict[str, int]:
    r"""Piece -> number, of a model of SentencePiece (field 1 of each field 1 of a protobuf message); empty if not one.

    >>> pieces(b"\n\x05\n\x03<s>\n\x07\n\x05hello")
    {'<s>': 0, 'hello': 1}
    """
    try:
        texts = [next(text for k, text in _fields(piece) if k == 1) for key, piece in _fields(data) if key == 1]
        return {text.decode(): i for i, text in enumerate(texts)}
    except (IndexError, StopIteration, UnicodeDecodeError):
        return {}


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each field of a message that holds bytes; IndexError if the data are not a message."""
    at = 0
    while at < len(data):
        key, at = _number(data, at)
        kind = key & 7
        size, at = (_FIXED[kind], at) if kind in _FIXED else _number(data, at)
        if kind == 2:
            yield key >> 3, data[at : at + size]
        at += size if kind else 0
        if kind in (3, 4, 6, 7) or at > len(data):
            raise IndexError


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number of 7 bits per byte, and the place after it."""
    value = 0
    for k in range(10):
        value |= (data[at + k] & 127) << 7 * k
        if data[at + k] < 128:
            return value, at + k + 1
    raise IndexError
