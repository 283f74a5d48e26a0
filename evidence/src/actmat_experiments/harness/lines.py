"""Files of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

Parsed = TypeVar("Parsed")


def json_lines(text: str) -> list[Any]:
    """The values of a text, one a line.

    Lines end with a newline only: texts hold other characters at which `str.splitlines` would split.
    """
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def read_files(
    folder: Path, task: str, files: Sequence[str], read: Callable[[list[Any]], Parsed], problems: list[str]
) -> list[Parsed]:
    """The rows of each file as `read` makes them; missing and malformed files are added to `problems`."""
    found = []
    for file in files:
        try:
            found.append(read(json_lines((folder / file).read_text(encoding="utf-8"))))
        except FileNotFoundError:
            problems.append(f"{task}: {file} is missing")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{task}: {file} has unexpected content: {type(error).__name__}: {error}")
    return found
