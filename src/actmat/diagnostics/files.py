"""Write a file whole or not at all."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_whole"]


def write_whole(file: Path, data: bytes) -> Path:
    """Write a file, and its folder if need be; readers see the old file or the new one, never a part.

    Raises:
        OSError: writing failed.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.part")
    unfinished.write_bytes(data)
    unfinished.replace(file)
    return file
