"""Chat templates of a tokenizer, in any of the files that transformers reads."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from actmat.bounds import read_object
from actmat.checkpoints.source import Source
from actmat.errors import CheckpointError

TEMPLATE = "chat_template.jinja"
HEADER_TEMPLATE = "tokenizer.chat_template"
"""Entry of a GGUF file's header."""
ReadJson = Callable[[Path], Mapping[str, Any]]


def chat_template(files: Source | None, read: ReadJson = read_object, name: str | None = None) -> str | None:
    """Chat template of a tokenizer, from any of the files that transformers reads; of several, all, or that of a name.

    Args:
        files: of the tokenizer.
        read: reads a JSON file.
        name: of one template.
    """
    names = () if files is None else files.names
    with contextlib.suppress(OSError, CheckpointError):
        if files is not None and TEMPLATE in names:
            return files.fetch(TEMPLATE).read_text(encoding="utf-8", errors="replace").strip()
        for file in ("chat_template.json", "tokenizer_config.json"):
            if files is None or file not in names or not (template := read(files.fetch(file)).get("chat_template")):
                continue
            if name is not None and isinstance(template, list):
                of_name = (t.get("template") for t in template if isinstance(t, Mapping) and t.get("name") == name)
                template = next(of_name, None)
            return (template if isinstance(template, str) else json.dumps(template)).strip() if template else None
    return None
