"""Names of tensors that transformers renames whenever it loads a checkpoint, whatever its architecture."""

from __future__ import annotations

from collections.abc import Iterable

LEGACY = (
    ("LayerNorm.gamma", "LayerNorm.weight"),
    ("LayerNorm.beta", "LayerNorm.bias"),
    (".weight_g", ".parametrizations.weight.original0"),
    (".weight_v", ".parametrizations.weight.original1"),
)
"""Old and new text in names, as in the table `legacy` of transformers' `conversion_mapping`."""


def rename_legacy(names: Iterable[str]) -> dict[str, str]:
    """Name in the new form -> name; a checkpoint that has both forms of a name keeps each.

    >>> rename_legacy(["bert.embeddings.LayerNorm.gamma", "a.weight"])
    {'bert.embeddings.LayerNorm.weight': 'bert.embeddings.LayerNorm.gamma', 'a.weight': 'a.weight'}
    """
    stored = dict.fromkeys(names)
    out = {}
    for name in stored:
        new = name
        for old, text in LEGACY:
            new = new.replace(old, text)
        out[name if new in stored else new] = name
    return out
