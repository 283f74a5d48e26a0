"""Tokens of the base and the experts, compared before their tables are merged row by row."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.folder import ADAPTER_CONFIG
from actmat.errors import CheckpointError
from actmat.experts.base import Expert
from actmat.identity.inputs import template_note
from actmat.identity.tokens import TokenInput, TokenReader, compare_tokens
from actmat.layout.ties import is_output_head, is_token_table
from actmat.recipe import Recipe
from actmat.recipe.output import ExtractedOutput


def token_findings(
    recipe: Recipe, base: Checkpoint, experts: Sequence[Expert], kept: Collection[str]
) -> tuple[list[str], list[str]]:
    """Problems and notes on tokens and chat templates of inputs; an extracted adapter has no template.

    Args:
        kept: tensors that are copied from the base.
    """
    reader, named = TokenReader(), list(zip(recipe.labels, experts, strict=True))
    problems, notes = _rows(recipe, base, named, kept, reader)
    if not isinstance(recipe.output, ExtractedOutput):
        notes += template_note(base, named, recipe.model.files_of, reader.config)
    return problems, notes


def _rows(
    recipe: Recipe, base: Checkpoint, experts: Sequence[tuple[str, Expert]], kept: Collection[str], reader: TokenReader
) -> tuple[list[str], list[str]]:
    """Problems and notes on rows of token tables that mean different tokens; tables of other sizes are not compared."""
    tables = [n for n, s in base.specs.items() if len(s.shape) == 2 and is_token_table(n)]
    if not tables or not experts or recipe.model.vocabulary is not None:
        return [], []
    rows = max(base.specs[n].shape[0] for n in tables)
    unread: list[str] = []
    inputs: list[TokenInput] = []
    every: list[tuple[str, Checkpoint | Expert]] = [("base", base), *experts]
    for label, one in every:
        changes = True
        if isinstance(one, Expert) and one.needs_base:
            names = (n for n in one.specs if is_token_table(n) or is_output_head(n))
            changes = any(one.source(n).kind != "zero" for n in names)
        elif rows not in {s.shape[0] for n, s in one.specs.items() if len(s.shape) == 2 and is_token_table(n)}:
            continue
        try:
            inputs.append(TokenInput(label, _tokens(one, reader), changes))
        except CheckpointError as error:
            unread.append(f"{label}: its tokens are not compared with those of others: {error.problems[0]}")
    heads = [n for n, s in base.specs.items() if is_output_head(n) and s.shape[:1] == (rows,)]
    merged = not all(n in kept for n in (*tables, *heads))
    problems, notes = compare_tokens(inputs, recipe.model.files_of, rows, merged=merged)
    return problems, [*notes, *unread]


def _tokens(one: Checkpoint | Expert, reader: TokenReader) -> dict[str, int]:
    """Tokens of an input by row; empty for a single file, whose folder may hold the files of other models."""
    for files in one.sources()[:1]:
        folder = files.whole()
        if files.named is None or files.named.endswith(".index.json") or ADAPTER_CONFIG in folder.names:
            return dict(reader.tokens(folder))
    return {}
