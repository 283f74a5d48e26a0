"""Check by content that tensors which config.json ties are really one.

A config that says "tied" while a checkpoint stores two different tensors is not rare (a head that was trained apart,
a table that was resized on its own). Merging one of them for both would silently drop the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.hashing import ContentHash
from actmat.engine.inputs import Inputs
from actmat.experts.base import Expert
from actmat.planning.model import Item

__all__ = ["broken_ties", "content_hash"]

_CHUNK_BYTES = 1 << 20


def content_hash(stored: Checkpoint | Expert, name: str) -> str:
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
    assert inputs.base is not None
    groups: list[tuple[str, Checkpoint | Expert, str, str, tuple[str, ...]]] = [
        ("the base", inputs.base, item.name, base_hash, item.aliases)
    ]
    rows = zip(inputs.labels, inputs.experts, item.sources, expert_hashes, item.twins, strict=False)
    for label, expert, source, digest, twins in rows:
        if source is not None:
            groups.append((f"expert '{label}'", expert, source.name, digest, twins))
    return [
        f"'{name}' and '{first}' of {who} are tied by config.json, but their values differ; to merge each by itself, "
        "write 'ties: false' in the recipe (--no-ties) and check 'tie_word_embeddings'"
        for who, stored, first, digest, names in groups
        for name in names
        if content_hash(stored, name) != digest
    ]
