"""Models split into GGUF files `NAME-00001-of-00003.gguf`: the first has the metadata, each has its own tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from actmat.errors import CheckpointError
from actmat.extras.gguf.header import GgufHeader

PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MOST_PARTS = 1000


def parts_of(name: str) -> list[str]:
    """All file names of a split model, in order, from the name of one part; else only the given name.

    >>> parts_of("m-00002-of-00002.gguf")
    ['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf']
    """
    found = PART.fullmatch(name)
    count = 0 if found is None else int(found["count"])
    if found is None or not 1 <= count <= MOST_PARTS:
        return [name]
    return [f"{found['stem']}-{k:05d}-of-{count:05d}.gguf" for k in range(1, count + 1)]


def joined(headers: Sequence[GgufHeader], location: str) -> GgufHeader:
    """Join the headers of all parts.

    Raises:
        CheckpointError: the number or order of the parts, or their tensors, differ from their headers.
    """
    problems = []
    for number, header in enumerate(headers):
        said, own = _number(header, "split.count", 1), _number(header, "split.no", 0)
        if max(1, said) != len(headers):
            problems.append(f"file {number + 1} belongs to {said} parts, but {len(headers)} are present")
        elif own != number:
            problems.append(f"file {number + 1} is numbered {own + 1} in its header")
    first = headers[0]
    tensors = tuple(t for header in headers for t in header.tensors)
    if len({t.name for t in tensors}) < len(tensors):
        problems.append("a tensor is in two files")
    wanted = _number(first, "split.tensors.count", len(tensors))
    if len(headers) > 1 and wanted != len(tensors):
        problems.append(f"expected {wanted} tensors, as the first file says, found {len(tensors)}")
    if problems:
        raise CheckpointError(
            f"{location}: the parts of a split GGUF file are inconsistent. Fix: give the folder with all parts "
            "under their original names, or join them (llama-gguf-split --merge)",
            problems,
        )
    return GgufHeader(first.metadata, tensors)


def _number(header: GgufHeader, key: str, default: int) -> int:
    found: Any = header.metadata.get(key, default)
    return found if isinstance(found, int) else -1
