"""Are tensors that config.json ties really one? Their bytes tell.

A config that says "tied" while a checkpoint stores two different tensors is not rare (a head that was trained apart,
a table that was resized alone). Merging one of them for both would silently drop the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.hashing import ContentHash
from actmat.engine.findings import Findings
from actmat.experts.base import Expert
from actmat.plan.model import TensorPlan

__all__ = ["check_ties", "content_hash"]

_PIECE = 1 << 20


def content_hash(checkpoint: Checkpoint | Expert, name: str) -> str:
    """Content hash of one stored tensor, read in pieces."""
    nbytes = checkpoint.specs[name].nbytes
    seen, buffer = ContentHash(), memoryview(bytearray(min(_PIECE, max(nbytes, 1))))
    while seen.size < nbytes:
        piece = buffer[: min(_PIECE, nbytes - seen.size)]
        checkpoint.read_into(name, seen.size, piece)
        seen.update(piece)
    return seen.hexdigest()


def check_ties(
    item: TensorPlan,
    base: Checkpoint,
    experts: Sequence[Expert],
    labels: Sequence[str],
    base_hash: str,
    expert_hashes: Sequence[str],
    findings: Findings,
) -> None:
    """Compare every tied name that a checkpoint stores beside the canonical one; differences become findings."""
    pairs: list[tuple[str, Checkpoint | Expert, str, str, tuple[str, ...]]] = []
    pairs.append(("the base", base, item.name, base_hash, item.aliases))
    pairs += [
        (f"expert '{label}'", expert, source, digest, twins)
        for label, expert, source, digest, twins in zip(
            labels, experts, item.sources, expert_hashes, item.twins, strict=False
        )
    ]
    for who, checkpoint, source, digest, names in pairs:
        for name in names:
            if content_hash(checkpoint, name) != digest:
                findings.add_broken_tie(
                    f"'{name}' and '{source}' of {who} are tied by config.json, but their values differ; to merge each "
                    "by itself, write 'ties: false' in the recipe (--no-ties) and check 'tie_word_embeddings'"
                )
