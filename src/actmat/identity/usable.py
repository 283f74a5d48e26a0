"""Files without weights that a model needs to be used: its tokenizer, or its processor."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from typing import Any

from actmat.checkpoints.side_files import code_files
from actmat.errors import first_names

TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model*", "tokenizer_config.json", "vocab.*", "*.tiktoken", "tekken.json", "*.spm"),
    *("spiece.model", "sentencepiece*.model", "spm.model", "bpe.codes"),
)
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
NEEDS = {"tokenizer": TOKENIZERS, "processor": PROCESSORS}


def has_files(kind: str, names: Collection[str]) -> bool:
    """True if a tokenizer or a processor is among files.

    >>> has_files("tokenizer", ["config.json", "tekken.json"]), has_files("processor", ["config.json"])
    (True, False)
    """
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in NEEDS[kind])


def missing_notes(
    config: Mapping[str, Any] | None, written: Collection[str], others: Mapping[str, Collection[str]], source: str
) -> list[str]:
    """One sentence for each kind of files that an output lacks, with the place to take it from.

    Args:
        config: `config.json` of the output.
        written: names of its files.
        others: label of an expert -> names of the files in its folder.
        source: place of the base, for messages.
    """
    if config is None or "_class_name" in config or not ({"model_type", "architectures"} & config.keys()):
        return []
    levels = [config, *(v for v in config.values() if isinstance(v, Mapping))]
    needs = ["tokenizer"] if any("vocab_size" in level for level in levels) else []
    needs += ["processor"] if {"vision_config", "audio_config", "image_size", "num_mel_bins"} & config.keys() else []
    copy = "copy its files from the repository of the original model"
    lost = [n for n in code_files(config, is_local=True) if n not in written]
    notes = [f"the output has no {first_names(lost)}, which auto_map of its config names: {copy}"] if lost else []
    for kind in (k for k in needs if not has_files(k, written)):
        holders = [label for label, names in others.items() if has_files(kind, names)]
        fix = f"{copy} (save_pretrained)"
        if holders:
            fix = f"'--set files_from={holders[0]}' takes that of expert '{holders[0]}'"
        notes.append(f"the output has no {kind}, as the base ({source}) gives none: {fix}")
    return notes
