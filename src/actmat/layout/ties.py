"""Ties: stored tensors that are one parameter, such as an output head and the token embedding.

Most checkpoints store a tied parameter once. Those that store both names (torch files, some converters) get an entry
`tied -> canonical`, so that the parameter is merged once. The config decides, else the family's default; without a
config no tensors are tied.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.model import Config, Model
from actmat.checkpoints.tied_names import HEAD_BIASES, OUTPUT_HEADS, SHARED_BY, TOKEN_TABLES, end_of
from actmat.errors import CheckpointError
from actmat.layout.families import TIED_BY_DEFAULT, recognize, text_config_of
from actmat.layout.packing import first_int

# Their encoder and decoder share one embedding in any case; `tie_word_embeddings` is about the head.
_T5_LIKE = frozenset({"t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "udop"})
# All released checkpoints have a head of their own, though transformers 5 writes `tie_word_embeddings: true` for them.
_HEAD_OF_ITS_OWN = frozenset({"mt5", "umt5"})


def ties_embeddings(config: Config | None) -> bool:
    """True if the config, or by default the family, ties the output head to the token embedding."""
    if config is None:
        return False
    family = recognize(config)
    if family in _HEAD_OF_ITS_OWN:
        return False
    if family in _T5_LIKE and config.get("scale_decoder_outputs") is False:
        return False  # how transformers 5 records a T5 v1.1, while it always writes tie_word_embeddings: true
    text = text_config_of(config) or {}
    for source in (config, text):
        if isinstance(source.get("tie_word_embeddings"), bool):
            return bool(source["tie_word_embeddings"])
    return family in TIED_BY_DEFAULT or recognize(text) in TIED_BY_DEFAULT


def find_ties(specs: Mapping[str, TensorSpec], config: Config | None) -> dict[str, str]:
    """Tied name -> canonical name, for ties whose names are both stored, with one shape and dtype."""
    ties: dict[str, str] = {}
    tables = list(filter(is_token_table, specs))
    for name, spec in specs.items():
        source = _source(name, specs, tables, config, specs)
        if source is not None and (specs[source].shape, specs[source].dtype) == (spec.shape, spec.dtype):
            ties[name] = source
    # a head tied to `decoder.embed_tokens`, itself tied to `shared`
    return {name: ties.get(source, source) for name, source in ties.items()}


def tied_partner(name: str, stored: Iterable[str], config: Config | None) -> str | None:
    """The stored tensor that holds the values of `name`, if `name` is tied and not stored itself.

    Needed to align a checkpoint that stores `lm_head.weight` with one, saved by another tool, that does not.
    """
    names = dict.fromkeys([*stored, name])
    tables = list(filter(is_token_table, names))
    source = _source(name, names, tables, config)
    # else only the head may be stored
    return source or next((other for other in names if _source(other, names, tables, config) == name), None)


def check_absent(model: Model) -> None:
    """Refuse a model whose index lists a tensor that no file holds, unless its config ties it to one that is held.

    Raises:
        CheckpointError: names all of them.
    """
    lost = [n for n in model.folder.absent if tied_partner(n, model.specs, model.config) is None]
    if lost:
        raise CheckpointError(
            f"{model.location}: the index lists tensors that no shard holds, and config.json does not tie them to "
            "others. Likely cause: files of two saves mixed in one folder. Fix: fetch or save the whole folder again",
            [f"tensor '{n}': in the index, but in no file" for n in lost],
        )


UNTIED_HEAD = "lm_head.weight"
"""End of the name of a head without other ties, so that a model loads whose config unties it."""
_DECODER_TABLE = re.compile(
    r"(?:(?:model|transformer|language_model)\.)*(?:embed_tokens|wte)\.weight|transformer\.word_embeddings\.weight"
)
"""Token tables of decoders in transformers whose head is `UNTIED_HEAD`."""


def tied_heads(
    specs: Mapping[str, TensorSpec], stored: Mapping[str, TensorSpec], config: Config | None
) -> dict[str, str]:
    """Output heads among `specs` -> the token table, of those `stored`, that the config ties each to.

    A name that ends like a head's counts only with the table's shape, except for `UNTIED_HEAD`. Empty if the
    architecture has no head.
    """
    out = {}
    if not may_have_head(config):
        return {}
    for name in filter(is_output_head, specs):
        table = tied_partner(name, stored, config)
        if table is not None and (end_of(name, [UNTIED_HEAD]) or specs[name].shape == stored[table].shape):
            out[name] = table
    return out


def can_untie(head: str, table: str) -> bool:
    """True for a head that the config can untie from its table; a table that encoders share has other ties too.

    >>> can_untie("lm_head.weight", "model.embed_tokens.weight"), can_untie("lm_head.weight", "shared.weight")
    (True, False)
    """
    return end_of(head, [UNTIED_HEAD]) is not None and end_of(table, ["shared.weight"]) is None


def head_of(table: str) -> str | None:
    """Name of the output head that is tied to a decoder's token table; None if families differ.

    >>> head_of("model.embed_tokens.weight"), head_of("language_model.model.embed_tokens.weight")
    ('lm_head.weight', 'language_model.lm_head.weight')
    """
    if not _DECODER_TABLE.fullmatch(table):
        return None
    return ("language_model." if table.startswith("language_model.model.") else "") + UNTIED_HEAD


_HEADLESS = re.compile(
    "For(?=[A-Z])(?!CausalLM|ConditionalGeneration|MaskedLM|PreTraining|[A-Za-z]*To(Text|Speech))"
    "|(?<!LMHead)(?<!DoubleHeads)Model$|Encoder$"
)
"""Classes of another task, or of none."""


def may_have_head(config: Config | None) -> bool:
    """False for a config whose first architecture is one without an output head over the vocabulary.

    >>> [may_have_head({"architectures": [name]}) for name in ("RoFormerForMaskedLM", "BertModel")]
    [True, False]
    """
    return not _HEADLESS.search(str(next(iter((config or {}).get("architectures") or ()), "")))


def is_output_head(name: str) -> bool:
    """True for the name of an output head over the vocabulary."""
    return end_of(name, OUTPUT_HEADS) is not None


def is_vocabulary(shape: Sequence[int], config: Config | None) -> bool:
    """True for the shape of a table with a row per token: as many rows as the config has tokens, or more (padding).

    >>> is_vocabulary((104, 8), {"vocab_size": 100}), is_vocabulary((4, 256), {"tie_word_embeddings": True})
    (True, False)
    """
    top = config or {}
    sizes = [n for c in (top, text_config_of(top) or {}) if (n := first_int(c, "vocab_size", "n_vocab")) is not None]
    return len(shape) == 2 and bool(sizes) and shape[0] >= min(sizes)


def is_token_table(name: str) -> bool:
    """True for the name of a token embedding."""
    return end_of(name, TOKEN_TABLES) is not None


def _source(
    name: str,
    stored: Collection[str],
    tables: Sequence[str],
    config: Config | None,
    specs: Mapping[str, TensorSpec] | None = None,
) -> str | None:
    """The stored name whose parameter `name` shares, or None. With specs, only tables of the head's shape count.

    Args:
        tables: the token tables among the stored names.
    """
    if config is None:
        return None
    shared = end_of(name, SHARED_BY)
    if shared is not None:
        if not (ties_embeddings(config) or recognize(config) in _T5_LIKE):
            return None
        table = name.removesuffix(shared) + "shared.weight"
        return table if table in stored else None
    if is_output_head(name):
        tables = [table for table in tables if table != name]
        if specs is not None:
            tables = [table for table in tables if specs[table].shape == specs[name].shape]
        return _nearest(name, tables) if ties_embeddings(config) else None
    for end, target in HEAD_BIASES:
        if end_of(name, [end]):
            bias = name.removesuffix(end) + target
            return bias if bias in stored and ties_embeddings(config) else None
    return None


def _nearest(head: str, tables: Sequence[str]) -> str | None:
    """The token table of the same model part: `shared` first, then the longest common path, then the shortest name."""

    def rank(table: str) -> tuple[bool, int, bool, int, str]:
        pairs = zip(head.split("."), table.split("."), strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return (not table.endswith("shared.weight"), -common, ".encoder." in f".{table}", table.count("."), table)

    return min(tables, key=rank, default=None)
