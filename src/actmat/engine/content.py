"""Check contents: tied tensors are equal, and statistics belong to the merged models.

A config that says "tied" while a checkpoint stores two different tensors is not rare (a head that was trained apart, a
table that was resized on its own). Merging one of them for both would silently drop the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from actmat.checkpoints.base import Tensors
from actmat.checkpoints.hashing import ContentHash
from actmat.engine.inputs import Inputs
from actmat.errors import StatisticsError
from actmat.experts.deltas import Deltas
from actmat.planning.model import Item
from actmat.statistics.header import adapter_content
from actmat.statistics.store import Statistics

_CHUNK_BYTES = 1 << 22


TensorBytes: TypeAlias = Tensors | Deltas | Statistics
"""Stored tensors whose bytes can be read."""


def content_hash(stored: TensorBytes, name: str) -> str:
    """Content hash of one stored tensor, read in chunks."""
    nbytes = stored.specs[name].nbytes
    seen, buffer = ContentHash(), memoryview(bytearray(min(_CHUNK_BYTES, max(nbytes, 1))))
    while seen.size < nbytes:
        chunk = buffer[: min(_CHUNK_BYTES, nbytes - seen.size)]
        stored.read_into(name, seen.size, chunk)
        seen.update(chunk)
    return seen.hexdigest()


def broken_ties(item: Item, inputs: Inputs, base_hash: str, expert_hashes: Sequence[str]) -> list[str]:
    """One sentence for each tied name of the item that a checkpoint stores with other content.

    Args:
        base_hash, expert_hashes: content hashes of the tensor that was read.
    """
    groups: list[tuple[str, TensorBytes, str, str, tuple[str, ...]]] = []
    if inputs.base is not None:
        groups.append(("the base", inputs.base.tensors, item.name, base_hash, item.target.tied))
    rows = zip(inputs.labels, inputs.experts, item.sources, expert_hashes, item.target.twins, strict=False)
    for label, expert, source, digest, twins in rows:
        if source is not None:
            groups.append((f"expert '{label}'", expert, source.name, digest, twins))
    return [
        f"'{name}' and '{first}' of {who} are tied by config.json, but their values differ; to merge them separately, "
        "write 'ties: false' in the recipe (--set ties=false) and check 'tie_word_embeddings'"
        for who, stored, first, digest, names in groups
        for name in names
        if content_hash(stored, name) != digest
    ]


FOREIGN = (
    "Statistics do not belong to the merged models; collect them again (actmat statistics collect), or give the "
    "experts that they were measured on."
)


def foreign_tensors(item: Item, inputs: Inputs, base_hash: str, expert_hashes: Sequence[str]) -> list[str]:
    """One sentence for each expert whose statistics were measured with another content of this tensor.

    Args:
        base_hash, expert_hashes: content hashes of the tensors read.
    """
    problems = []
    rows = zip(inputs.labels, inputs.statistics.files, inputs.experts, item.sources, expert_hashes, strict=False)
    for label, file, expert, source, digest in rows:
        if file is None or source is None:
            continue
        on_base = source.kind != "stored"
        if expert.needs_base and not on_base:
            continue  # the adapter's own tensor: its hash was compared with the adapter's
        name, content = (item.name, base_hash) if on_base else (source.name, digest)
        expected = file.header.model.tensors.get(name)
        if expected is not None and expected != content:
            problems.append(_foreign(name, "the base" if on_base else f"expert '{label}'", content, label, file))
    return problems


def check_adapters(inputs: Inputs) -> None:
    """Compare the state of every adapter with the one that its statistics were measured on.

    Raises:
        StatisticsError: another state; all of them are listed.
    """
    problems = []
    for label, expert, file in zip(inputs.labels, inputs.experts, inputs.statistics.files, strict=True):
        adapter = expert.adapter
        if adapter is None or file is None or file.header.model.adapter is None:
            continue
        expected, content = file.header.model.adapter.content, adapter_content(adapter)
        if expected != content:
            problems.append(
                f"the adapter '{label}' ({adapter.location}) has content {content}; its statistics ({file.location}) "
                f"were measured with {expected} ({file.header.model.adapter.location})"
            )
    if problems:
        raise StatisticsError(
            "Statistics are of another state of an adapter; collect them again (actmat statistics collect).", problems
        )


def _foreign(name: str, who: str, content: str, label: str, file: Statistics) -> str:
    return (
        f"tensor '{name}' of {who} has content {content}; the statistics of '{label}' ({file.location}) were measured "
        f"with {file.header.model.tensors[name]}"
    )
