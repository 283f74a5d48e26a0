"""Fields of the JSON of every command, pinned with the version of its layout."""

import json
from typing import Any

from tests.helpers.merging import actmat

from actmat.cli.screen import LAYOUTS

MERGE = {
    "out", "kind", "method", "options", "experts", "was_finished", "actions", "unchanged", "answers",
    "relative_error", "size", "warnings", "read_bytes", "write_bytes", "seconds", "notes", "findings",
}  # fmt: skip
PINNED: dict[str, set[str]] = {
    "merge": {"outputs"},
    "merge outputs": MERGE,
    "merge size": {"merged", "sum", "experts"},
    "demo": {"out", "seed", "settings", "rows", "left_out"},
    "export": {"out", "checkpoint", "form"},
    "average": {"outputs"},
    "extract": {"outputs"},
    "push": {"repo_id", "files", "removed", "nbytes", "private", "is_new", "left_out", "notes", "url"},
    "serve": {"python", "vllm", "notes"},
    "statistics": {"statistics"},
    "statistics statistics": {
        "path", "model", "samples", "tokens", "not_measured", "data", "kinds",
    },
    "try": {"prompts", "models"},
    "ui": {"url", "port"},
    "tune": {
        "actmat_tune", "version", "out", "recipe", "score", "compared", "chosen", "final", "front", "refused", "notes",
        "seconds", "left_out",
    },
    "plan": {"plans"},
    "plan plans": {
        "kind", "method", "base", "experts", "family", "items", "groups", "kept", "read_bytes", "write_bytes",
        "peak_bytes", "seconds_one_worker", "device", "notes",
    },
    "diagnose": {
        "format", "kind", "actmat", "created", "recipe", "method", "source", "base", "out", "experts",
        "actions", "findings", "agreement", "residual_on_data", "left_out",
    },
    "verify": {"out", "ok", "tensors", "files", "inputs", "problems", "unchecked"},
    "inspect": {
        "location", "schemes", "stored_bytes", "notes", "family", "parameters", "bytes", "dtypes", "roles", "files",
        "ties", "left_out",
    },
    "methods": {"methods"},
    "recipe": {"recipe", "notes", "warnings"},
}  # fmt: skip
"""Fields of every layout of version 1. A field that goes or changes its meaning needs a new version in `LAYOUTS`."""


def said(*arguments: object, code: int = 0) -> Any:
    """JSON that a command prints, run in this process; its exit code is checked."""
    done = actmat(arguments, code=code)
    return json.loads(done.out)


def pinned(data: dict[str, Any], command: str, also: tuple[str, ...] = ()) -> dict[str, Any]:
    """The data, once its fields are those of the command's layout."""
    assert next(iter(data)) == "schema"
    assert data["schema"] == f"actmat.{command}/{LAYOUTS[command]}"
    assert LAYOUTS[command] == 1, "pin the fields of the new version"
    assert set(data) == {"schema", *PINNED[command], *also}
    return data
