"""Formats of weight files: the choice of one for a source.

The core reads safetensors and torch files. All others are plug-ins of the group `actmat.formats`. Those of `SIGNS` are
imported where a file name matches; any other is asked when no format before it claims the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from typing import Final

from actmat import plugins
from actmat.checkpoints.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, foreign_format
from actmat.checkpoints.formats.modules import SENTENCE_MODULES
from actmat.checkpoints.formats.safetensors import SAFETENSORS
from actmat.checkpoints.formats.torch_files import TORCH_FILES
from actmat.checkpoints.model import Format
from actmat.checkpoints.side_files import MODULES
from actmat.checkpoints.source import Source
from actmat.errors import CheckpointError, first_of

__all__ = ["all_formats", "find_format", "format_named"]

GROUP: Final = "actmat.formats"

CORE = {"modules": SENTENCE_MODULES, "safetensors": SAFETENSORS, "torch": TORCH_FILES}

SIGNS: dict[str, tuple[str, ...]] = {
    "pipelines": ("model_index.json",),
    "modules": (MODULES,),
    "safetensors": ("*",),
    "dcp": (".metadata", "*.distcp", "pytorch_model_fsdp_*", "model"),
    "torch": ("*",),
    "gguf": ("*.gguf",),
}
"""Format -> file-name patterns, in the order of asking; a format is asked only if a file matches."""


def _candidates(source: Source) -> Iterator[Format]:
    """Formats to ask, in order; a plug-in is imported when its turn comes."""
    for name, patterns in SIGNS.items():
        if any(fnmatch(n, pattern) for pattern in patterns for n in source.names):
            candidate = CORE.get(name) or plugins.load(GROUP, name, Format)
            if candidate is not None:
                yield candidate
    for name in plugins.names(GROUP):
        if name not in SIGNS:
            yield plugins.needed(GROUP, name, Format)


def all_formats() -> tuple[Format, ...]:
    """Every installed format."""
    return (*CORE.values(), *plugins.load_all(GROUP, Format).values())


def find_format(source: Source) -> Format:
    """The first format that claims the files of a source."""
    if source.named not in ADAPTER_WEIGHTS:
        for candidate in _candidates(source):
            if candidate.claims(source):
                return candidate
    raise _unclaimed(source)


def format_named(name: str) -> Format:
    """The installed format of this name.

    Raises:
        CheckpointError: no such format is installed.
    """
    for candidate in CORE.values():
        if candidate.name == name:
            return candidate
    known = {candidate.name: candidate for candidate in all_formats()}
    if name not in known:
        raise CheckpointError(f"expected a handle of one of the formats {', '.join(known)}, found {name!r}.")
    return known[name]


def _absent(names: Sequence[str]) -> str:
    """One sentence, with the fix, on a file of a format that is not installed; may be empty."""
    lacking = [n for n in SIGNS if n not in CORE and n not in plugins.entries(GROUP)]
    lost = next((n for name in lacking for p in SIGNS[name] for n in names if fnmatch(n, p)), None)
    return f"no installed part of actmat reads '{lost}'." if lost else ""


def _unclaimed(source: Source) -> CheckpointError:
    location, names = source.location, [source.named] if source.named else source.names
    if ADAPTER_CONFIG in names or any(n in ADAPTER_WEIGHTS for n in names):
        return CheckpointError(
            f"{location}: expected a full checkpoint, found a PEFT adapter. Fix: give it where an adapter is accepted, "
            "or fold it into its base first (PeftModel.merge_and_unload, save_pretrained)."
        )
    if foreign := [f"{n} is {foreign_format(n)}" for n in names if foreign_format(n)]:
        return CheckpointError(
            f"{location}: no weights in a supported format: {'; '.join(foreign[:3])}. Fix: load it with its own "
            "library and save it as safetensors (save_pretrained)."
        )
    if MODULES in names:
        return CheckpointError(
            f"{location}: expected the encoder of a sentence-transformers model at the top of the folder, found none. "
            "Likely cause: an earlier version of the library saved it in a folder of its own. Fix: load and save it "
            "again, SentenceTransformer(PATH).save(OTHER), and give that folder."
        )
    if absent := _absent(names):
        return CheckpointError(f"{location}: {absent}")
    patterns = ", ".join(pattern for f in all_formats() for pattern in f.patterns)
    return CheckpointError(
        f"{location}: expected weights ({patterns}), found {first_of(names, 6) or 'an empty folder'}. Likely cause: "
        "the wrong folder, one file of several, or a download of the config alone. Fix: give the folder that holds the "
        "weights, or save them as safetensors with their own library."
    )
