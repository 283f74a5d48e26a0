"""Formats of weight files: the registry, and the choice of one for a source."""

from __future__ import annotations

import re
from pathlib import PurePath

from actmat.checkpoints.file_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, foreign_format
from actmat.checkpoints.folder import INDEX_SUFFIX
from actmat.checkpoints.formats.safetensors import SAFETENSORS
from actmat.checkpoints.formats.torch_files import TORCH_FILES
from actmat.checkpoints.source import Format, Source
from actmat.errors import CheckpointError
from actmat.extras.diffusion.pipelines import PIPELINES
from actmat.extras.gguf.file import GGUF
from actmat.extras.training.dcp.checkpoint import DCP
from actmat.extras.training.dcp.ranks import RANK_SHARDS
from actmat.extras.training.deepspeed import DEEPSPEED

__all__ = ["FORMATS", "find_format", "format_named"]

STEP = re.compile(r"(checkpoint|step|iter|global_step)[-_]?\d+")
"""Folders of the checkpoints of a training run."""

FORMATS: tuple[Format, ...] = (PIPELINES, RANK_SHARDS, SAFETENSORS, DCP, DEEPSPEED, TORCH_FILES, GGUF)
"""Every format that is read. The first that claims a source opens it."""


def find_format(source: Source) -> Format:
    """The first format that claims the files of a source."""
    if source.named not in ADAPTER_WEIGHTS:
        for candidate in FORMATS:
            if candidate.claims(source):
                return candidate
    raise _unclaimed_file(source.named, source.location) if source.named else _unclaimed_folder(source)


def format_named(name: str) -> Format:
    """The format of that name."""
    known = {candidate.name: candidate for candidate in FORMATS}
    if name not in known:
        raise CheckpointError(f"expected a handle of one of the formats {', '.join(known)}, found {name!r}")
    return known[name]


def _unclaimed_file(name: str, location: str) -> CheckpointError:
    if name in ADAPTER_WEIGHTS:
        return CheckpointError(f"{location}: expected a full checkpoint, found the weights of a PEFT adapter")
    if name.endswith(".distcp"):
        return CheckpointError(
            f"{location}: expected a checkpoint, found one file of a distributed checkpoint. Fix: give its "
            "folder, which has a .metadata as well."
        )
    foreign = foreign_format(name)
    found = f"{foreign}, which is not read" if foreign else f"'{name}'"
    suffixes = ", ".join(PurePath(pattern).suffix for f in FORMATS for pattern in f.patterns if "*" in pattern)
    return CheckpointError(
        f"{location}: expected a file ending in {suffixes} or {INDEX_SUFFIX}, found {found}. "
        "Fix: load it with its own library and save it as safetensors."
    )


def _unclaimed_folder(source: Source) -> CheckpointError:
    location, names = source.location, source.names
    if ADAPTER_CONFIG in names or any(n in ADAPTER_WEIGHTS for n in names):
        return CheckpointError(
            f"{location}: expected a full checkpoint, found a PEFT adapter ({ADAPTER_CONFIG}). Fix: give it where an "
            "adapter is accepted, or fold it into its base first (PeftModel.merge_and_unload, save_pretrained)."
        )
    foreign = [f"{n} is {foreign_format(n)}" for n in names if foreign_format(n)]
    if foreign:
        return CheckpointError(
            f"{location}: no weights in a supported format: {'; '.join(foreign[:3])}. Fix: load it with its own "
            "library and save it as safetensors (save_pretrained)."
        )
    steps = [n for n in names if STEP.fullmatch(n)]
    if steps:
        return CheckpointError(
            f"{location}: expected weights, found a training run with the folders {', '.join(steps[:6])}"
            f"{', ...' if len(steps) > 6 else ''}. Fix: give one of them, or average them (actmat merge --average "
            f"{location.rstrip('/')}/{steps[-1]} ...)."
        )
    patterns = ", ".join(pattern for f in FORMATS for pattern in f.patterns)
    return CheckpointError(
        f"{location}: expected weights ({patterns}), found "
        f"{', '.join(names[:6]) or 'an empty folder'}{', ...' if len(names) > 6 else ''}. Likely cause: the wrong "
        "folder, or a download of the config alone. Fix: give the folder that holds the weights."
    )
