"""Text on a console, as a terminal shows it."""

from typing import Any

from rich.console import Console


def console_text(shown: Any, width: int = 80) -> str:
    """The text of a table, or of a function that prints on a console."""
    console = Console(width=width)
    with console.capture() as capture:
        shown(console) if callable(shown) else console.print(shown)
    return capture.get()
