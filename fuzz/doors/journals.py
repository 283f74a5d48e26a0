"""Door of journals, which an interrupted run, or another user of the machine, left."""

from __future__ import annotations

import json
import random
from pathlib import Path

from actmat.checkpoints.writing.staging import JOURNAL_NAME, Staging
from actmat.engine.task import Record
from fuzz.doors.folder import in_folder
from fuzz.draw import json_text, mutated_bytes
from fuzz.harness import Files, door

ENTRY = {
    "name": "a", "hash": "0", "hashes": {"a": "0"}, "base_hash": "0", "expert_hashes": ["1"], "stats": {"norm": 1.0, "parts": {}},
    "unchanged": False, "nonfinite": 0, "seconds": 0.1, "watched": {"a": [1.0]},
}  # fmt: skip


def _journal(rng: random.Random) -> Files:
    head = json.dumps({"actmat_journal": 1, "fingerprint": "f"}).encode()
    lines = [head, *(json_text(rng, ENTRY) for _ in range(rng.randrange(4)))]
    content = b"\n".join(lines) + b"\n" * rng.randrange(2)
    return {"j": mutated_bytes(rng, content) if rng.random() < 0.3 else content}


def _read(folder: Path) -> None:
    stage = Staging(folder / "out", "f")
    stage.path.mkdir()
    (folder / "j").rename(stage.path / JOURNAL_NAME)
    try:
        for line in stage.open().values():
            Record.from_json(line)
    finally:
        stage.close()


door("journals", _journal, in_folder(_read))
