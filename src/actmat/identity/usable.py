"""Files without weights that a model needs to be used: its tokenizer, or its processor."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from typing import Any

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


def lacks(config: Mapping[str, Any] | None, written: Collection[str]) -> list[str]:
    """Kinds of files that a model of this config needs and that are not among the written ones."""
    if config is None or "_class_name" in config or not ({"model_type", "architectures"} & config.keys()):
        return []
    levels = [config, *(v for v in config.values() if isinstance(v, Mapping))]
    needs = ["tokenizer"] if any("vocab_size" in level for level in levels) else []
    needs += ["processor"] if {"vision_config", "audio_config", "image_size", "num_mel_bins"} & config.keys() else []
    return [kind for kind in needs if not has_files(kind, written)]


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
    notes = []
    for kind in lacks(config, written):
        holders = [label for label, names in others.items() if has_files(kind, names)]
        fix = (
            f"'--set files_from={holders[0]}' takes that of expert '{holders[0]}'"
            if holders
            else "copy its files from the repository of the original model (save_pretrained)"
        )
        notes.append(f"the output has no {kind}, as the base ({source}) gives none: {fix}")
    return notes
