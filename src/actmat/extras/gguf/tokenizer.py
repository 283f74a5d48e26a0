"""The tokenizer in the metadata of a GGUF file, converted by transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path


def converted_tokenizer(path: Path) -> dict[str, str]:
    """Name of a file -> text; empty if transformers is missing or cannot convert it, which the output then says."""
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            return {f.name: f.read_text(encoding="utf-8") for f in sorted(Path(folder).iterdir()) if f.is_file()}
    except Exception:  # noqa: BLE001 - converters of each architecture raise errors of many types
        return {}
