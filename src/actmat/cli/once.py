"""Notes that are shown once per project: the folder that a command is called in.

What was shown is remembered in `$XDG_STATE_HOME/actmat/shown.json` (default: `~/.local/state`). Where that cannot be
read or written, a note is shown every time; nothing else depends on the file, and removing it shows all notes again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

__all__ = ["is_first_time", "state_file"]

MOST = 500
"""Projects that are remembered, the latest ones."""


def state_file() -> Path:
    """File of what was shown."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.join("~", ".local", "state")
    return Path(home).expanduser() / "actmat" / "shown.json"


def is_first_time(note: str) -> bool:
    """True if the note was not shown in this folder before; it is remembered as shown.

    Args:
        note: name of the note.
    """
    try:
        path, key = state_file(), f"{note} {os.getcwd()}"
        shown = _read(path)
        if key in shown:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(json.dumps([*shown, key][-MOST:]), encoding="utf-8")
        os.replace(part, path)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return True
    return True


def _read(path: Path) -> list[str]:
    """The notes that were shown; none without such a file, or with another in its place."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size < 1 << 20 else []
    except (FileNotFoundError, ValueError):
        return []
    return [key for key in found if isinstance(key, str)] if isinstance(found, list) else []
