"""Experts of another vocabulary than the base: rows of embeddings and output heads put in the base's order, by token.

A row of the base's table is the expert's row for the same token text. For a token that the expert lacks, and for rows
beyond the base's tokenizer, it is the base's own row, so that the delta there is 0. Tokens that only the expert has are
left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from actmat.bounds import read_object
from actmat.checkpoints.base import Checkpoint, FileIdentity, TensorSpec
from actmat.checkpoints.folder import member
from actmat.checkpoints.raw import check_range, empty_tensor, raw_bytes
from actmat.errors import CheckpointError
from actmat.experts.base import VocabularyHandle
from actmat.experts.checkpoint import CheckpointExpert
from actmat.layout.ties import is_output_head, is_token_table

__all__ = ["AlignedExpert", "align_vocabulary", "read_vocabulary"]

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows `start ...` of the base's table that are `count` consecutive rows of a source."""

    start: int
    count: int
    row: int
    of_base: bool


def align_vocabulary(
    checkpoint: Checkpoint, base: Checkpoint, *, complete: bool = False, owns_base: bool = False
) -> CheckpointExpert:
    """An expert whose tables have the base's rows.

    Args:
        checkpoint: the expert's, which is closed with it.
        base: decides the order of the rows.
        complete: refuse an expert with tokens that the base lacks.
        owns_base: close the base with the expert.

    Raises:
        CheckpointError: a tokenizer is missing or cannot be read, or a token would be lost that must not be.
    """
    ours, theirs = read_vocabulary(base), read_vocabulary(checkpoint)
    lost = sorted(theirs.keys() - ours.keys(), key=theirs.__getitem__)
    if complete and lost:
        raise CheckpointError(
            f"{checkpoint.location}: has {len(lost)} tokens that the base lacks ({', '.join(map(repr, lost[:4]))}); a "
            "union of vocabularies would need a new tokenizer. Fix: 'vocabulary: base', which leaves them out, or add "
            "them to the base first"
        )
    tables = [n for n in checkpoint.specs if n in base.specs and (is_token_table(n) or is_output_head(n))]
    tables = [n for n in tables if checkpoint.specs[n].shape[1:] == base.specs[n].shape[1:]]
    rows = max((base.specs[n].shape[0] for n in tables), default=0)
    by_row = {i: token for token, i in ours.items()}
    own = [theirs.get(by_row[r]) if r in by_row else None for r in range(rows)]
    if own == list(range(rows)) and all(checkpoint.specs[n].shape == base.specs[n].shape for n in tables):
        if owns_base:
            base.close()
        return CheckpointExpert(checkpoint)
    expert = AlignedExpert(checkpoint, base, tables, _runs(own), owns_base=owns_base)
    expert.missing = sum(r in by_row and i is None for r, i in enumerate(own))
    expert.dropped = len(lost)
    return expert


def read_vocabulary(checkpoint: Checkpoint) -> dict[str, int]:
    """Token -> row, from the `tokenizer.json` of a checkpoint.

    Raises:
        CheckpointError: there is none, or it holds no vocabulary.
    """
    folder = checkpoint.fetch_sidecars()
    if folder is None or not (folder / TOKENIZER).exists():
        raise CheckpointError(
            f"{checkpoint.location}: expected a {TOKENIZER}, by which rows are put in order ('vocabulary: base'), "
            "found none. Fix: save the tokenizer beside the weights (AutoTokenizer.from_pretrained, save_pretrained)"
        )
    data = read_object(member(Path(folder), TOKENIZER))
    model = data.get("model")
    listed = model.get("vocab") if isinstance(model, Mapping) else None
    tokens = _tokens(listed)
    for entry in data.get("added_tokens") or []:
        if isinstance(entry, Mapping) and isinstance(entry.get("content"), str) and isinstance(entry.get("id"), int):
            tokens[entry["content"]] = entry["id"]
    if not tokens:
        raise CheckpointError(f"{folder / TOKENIZER}: expected a vocabulary (model.vocab), found none")
    return tokens


def _tokens(listed: Any) -> dict[str, int]:
    """Vocabulary of a BPE or WordPiece model, a mapping, or of a Unigram model, a list of pairs."""
    if isinstance(listed, Mapping):
        return {str(t): i for t, i in listed.items() if isinstance(i, int)}
    if isinstance(listed, list):
        return {str(pair[0]): i for i, pair in enumerate(listed) if isinstance(pair, list) and pair}
    return {}


def _runs(own: Sequence[int | None]) -> list[_Run]:
    """Consecutive rows that lie together, in the expert or (None) in the base."""
    runs: list[_Run] = []
    for row, source in enumerate(own):
        of_base, there = source is None, row if source is None else source
        last = runs[-1] if runs else None
        if last is not None and last.of_base == of_base and last.row + last.count == there:
            runs[-1] = replace(last, count=last.count + 1)
        else:
            runs.append(_Run(row, 1, there, of_base))
    return runs


class AlignedExpert(CheckpointExpert):
    """A full checkpoint whose tables of tokens are read in the base's order of rows.

    Attributes:
        missing: tokens of the base that the expert lacks.
        dropped: tokens of the expert that the base lacks.
    """

    missing = 0
    dropped = 0

    def __init__(
        self, checkpoint: Checkpoint, base: Checkpoint, tables: Sequence[str], runs: Sequence[_Run], *, owns_base: bool
    ) -> None:
        super().__init__(checkpoint)
        self._base, self._runs, self._owns_base = base, list(runs), owns_base
        self._starts = [r.start for r in runs]
        self._tables = frozenset(tables)
        specs = {n: _with_rows(s, base.specs[n]) if n in self._tables else s for n, s in checkpoint.specs.items()}
        self.specs = MappingProxyType(specs)
        other = [n for n in tables if checkpoint.specs[n].dtype != base.specs[n].dtype]
        if other and any(r.of_base for r in runs):
            raise CheckpointError(
                f"{self.location}: some tokens of the base are missing, and its table '{other[0]}' is stored in "
                f"{checkpoint.specs[other[0]].dtype}, the base's in {base.specs[other[0]].dtype}. Fix: store both alike"
            )

    def read(self, name: str) -> Tensor:
        """The whole tensor, a table in the base's order."""
        if name not in self._tables:
            return super().read(name)
        out = empty_tensor(self.specs[name])
        self.read_into(name, 0, raw_bytes(out))
        return out

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Bytes of the tensor, of a table in the base's order."""
        if name not in self._tables:
            super().read_into(name, start, out)
            return
        spec = self.specs[name]
        check_range(spec, start, out)
        width = spec.nbytes // spec.shape[0]
        done = 0
        k = bisect_right(self._starts, start // width) - 1
        while done < len(out):
            run = self._runs[k]
            inside = start + done - run.start * width
            size = min(len(out) - done, run.count * width - inside)
            source = self._base if run.of_base else self.checkpoint
            source.read_into(name, run.row * width + inside, out[done : done + size])
            done += size
            k += 1

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of the weight files, and of both tokenizers."""
        return (*self.checkpoint.identity(), *_tokenizer_identity(self.checkpoint), *_tokenizer_identity(self._base))

    def handle(self) -> VocabularyHandle:
        """Addresses of the expert and of the base."""
        return VocabularyHandle(self.checkpoint.handle(), self._base.handle())

    def close(self) -> None:
        """Close the checkpoint, and the base if it is its own."""
        super().close()
        if self._owns_base:
            self._base.close()


def _with_rows(spec: TensorSpec, base: TensorSpec) -> TensorSpec:
    return replace(spec, shape=(base.shape[0], *spec.shape[1:]))


def _tokenizer_identity(checkpoint: Checkpoint) -> tuple[FileIdentity, ...]:
    path = Path(checkpoint.fetch_sidecars() or ".", TOKENIZER)
    stat = path.stat()
    return (FileIdentity(str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns),)
