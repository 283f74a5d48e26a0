"""Alignment of models with different vocabularies: rows of embeddings and output heads, matched by token text.

The new vocabulary is that of the base, that of an expert, or the base's with the tokens that experts added. An input
keeps its own row for a token that it has. An input that lacks the token gets the only existing row, else the base's,
else the mean over the inputs that have it. So a token of one expert gets that expert's row, and a token of several
experts starts from their mean. The rule is that of mergekit's `tokenizer_source`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actmat.checkpoints.files import file_identity
from actmat.checkpoints.folder import ADAPTER_CONFIG
from actmat.checkpoints.model import Config, Model
from actmat.errors import CheckpointError, did_you_mean, first_of
from actmat.extras.vocabulary import tokenizer
from actmat.extras.vocabulary.rows import OWN_MEAN, Sources, TokenRows, joined_runs
from actmat.identity.tokens import TOKENIZER
from actmat.recipe.vocabulary import TokenRow, Vocabulary

BASE, UNION = "base", "union"
SHOWN = 12
"""Maximum number of new tokens listed in a note."""
MOST_GAPS = 2
"""Allowed ratio of the first new token's row to the table's rows or token count: a tokenizer may skip numbers."""


@dataclass(frozen=True)
class _TokenInput:
    """A model with its tokens and tables."""

    label: str
    model: Model
    tokens: Mapping[str, int]
    tables: tuple[str, ...]
    rows: int

    def row(self, token: str) -> int | None:
        """Row of a token; None if it is beyond the table (a tokenizer may have more tokens than the table)."""
        number = self.tokens.get(token)
        return number if number is not None and number < self.rows else None


def align_vocabularies(
    base: Model, experts: Mapping[str, Model], vocabulary: Vocabulary
) -> tuple[Model, dict[str, Model], list[str]]:
    """See `recipe.vocabulary.AlignVocabularies`; a model is returned unchanged if its rows stay."""
    inputs, problems = _inputs({BASE: base, **experts})
    if vocabulary.source not in (*inputs, UNION) and not problems:
        problems.append(f"the vocabulary '{vocabulary.source}' is not one of base, union, {', '.join(experts)}")
    if problems:
        raise CheckpointError("The vocabularies cannot be aligned.", problems)
    joined = _Joined(inputs, vocabulary)
    if joined.problems:
        raise CheckpointError("The vocabularies cannot be aligned.", joined.problems)
    aligned = {label: joined.aligned(label) for label in inputs}
    return aligned.pop(BASE), aligned, joined.moved


def _inputs(models: Mapping[str, Model]) -> tuple[dict[str, _TokenInput], list[str]]:
    inputs: dict[str, _TokenInput] = {}
    problems: list[str] = []
    for label, model in models.items():
        try:
            tables, rows = tokenizer.token_tables(model)
            like_base = tables and BASE in inputs and inputs[BASE].rows == rows and _is_adapter_without_tokens(model)
            tokens = inputs[BASE].tokens if like_base else tokenizer.read_tokenizer(model)[0]
            inputs[label] = _TokenInput(label, model, tokens, tables, rows)
        except CheckpointError as error:
            problems.extend(error.problems)
    return inputs, problems


def _is_adapter_without_tokens(model: Model) -> bool:
    """True for an adapter's tensors whose folder has no tokenizer, so that its tokens are those of its base."""
    return any(ADAPTER_CONFIG in files.names and TOKENIZER not in files.names for files in model.folder.files)


class _Joined:
    """The new vocabulary and the sources of its rows.

    Attributes:
        tokens: token -> row in the new vocabulary.
        added: tokens missing in the kept tokenizer -> label of an input that has them; may be ''.
        rows: number of rows of the new tables.
        moved: labels of aligned inputs whose rows are not those that are stored, with others after them.
    """

    def __init__(self, inputs: Mapping[str, _TokenInput], vocabulary: Vocabulary) -> None:
        self.inputs, self.vocabulary = inputs, vocabulary
        self.problems: list[str] = []
        self.moved: list[str] = []
        self.labels = list(inputs)
        self.keeper = inputs[BASE if vocabulary.source == UNION else vocabulary.source]
        self.added = self._added()
        self.tokens = dict(self.keeper.tokens)
        first = 1 + max(self.tokens.values(), default=-1)
        self.tokens |= {token: first + k for k, token in enumerate(self.added)}
        self.by_row = {row: token for token, row in self.tokens.items()}
        self.rows = max(self.keeper.rows, 1 + max(self.by_row, default=-1) if self.added else 0)
        if (multiple := vocabulary.pad_to_multiple_of) is not None:
            self.rows = -(-self.rows // multiple) * multiple
        if self.added and first > MOST_GAPS * (self.keeper.rows + len(self.tokens)):
            self.problems.append(
                f"'{self.keeper.label}' ({self.keeper.model.location}): its tokenizer has "
                f"{len(self.keeper.tokens)} tokens and its table {self.keeper.rows} rows, but its last token has row "
                f"{first - 1}. Likely cause: a damaged tokenizer.json. Fix: save the tokenizer again"
            )
        self.special = {t: self._special(t, source) for t, source in vocabulary.tokens.items()}
        self._lent = {t: self._lent_row(t) for t in self.tokens}

    def aligned(self, label: str) -> Model:
        """An input with the new rows, or unchanged if it already has them."""
        donor = self.inputs[label]
        number = self.labels.index(label)
        rows = [self._sources(donor, number, row) for row in range(self.rows)]
        same_tokens = donor.tokens == self.tokens and not self.special  # then padding is also unchanged
        as_they_lie = same_tokens or all(s == ((number, r),) for r, s in enumerate(rows))
        if not donor.tables or (self.rows == donor.rows and as_they_lie):
            return donor.model
        models = [i.model for i in self.inputs.values()]
        names = {n: tuple(n if m is donor.model else tokenizer.table_in(n, m) for m in models) for n in donor.tables}
        self._check_tables(donor, names, rows)
        if others := tokenizer.other_axes(donor.model, donor.tables, donor.rows):
            raise CheckpointError(
                f"{donor.model.location}: {first_of(others)} has an axis of {donor.rows} entries, one per token, and "
                "no rows that could follow the tokens. Fix: give experts whose tokenizer is the base's"
            )
        if rows[: donor.rows] != [((number, row),) for row in range(donor.rows)]:
            self.moved.append(label)
        folders = [f for m in models if (f := m.folder.directory) is not None]
        files = tuple(file_identity(f / TOKENIZER) for f in folders if (f / TOKENIZER).exists())
        tensors = TokenRows([m.tensors for m in (donor.model, *models)], names, joined_runs(rows), files)
        lost = sum(t not in self.tokens for t in donor.tokens)
        lacks = sum(donor.row(t) is None for t in self.tokens)
        folder = donor.model.folder.noted(
            f"has another vocabulary: its rows are matched by token; {lacks} missing tokens come from other inputs, "
            f"{lost} tokens outside the new vocabulary are left out"
        )
        if label == BASE:
            new = first_of([f"{self.tokens[t]} {t!r}" for t in self.added], SHOWN)
            notes = [f"{len(self.added)} tokens are new to its tokenizer: {new}"] if self.added else []
            texts = {**folder.texts, **self._sidecars()}
            folder = replace(folder.with_config(self._config), texts=texts).noted(*notes)
        return Model(tensors, folder)

    def _added(self) -> dict[str, str]:
        """Tokens that the kept tokenizer lacks, in row order -> label of an input that has them."""
        tokens = self.keeper.tokens
        added: dict[str, str] = {}
        for donor in self.inputs.values() if self.vocabulary.source == UNION else ():
            more = [t for t in sorted(donor.tokens, key=donor.tokens.__getitem__) if t not in tokens]
            listed = {entry["content"] for entry in tokenizer.read_tokenizer(donor.model)[1]} if more else set()
            plain = [t for t in more if t not in listed]
            if plain:
                self.problems.append(
                    f"expert '{donor.label}' ({donor.model.location}) has {len(plain)} tokens of its own that are "
                    f"part of its tokenization model, not added tokens ({', '.join(map(repr, plain[:4]))}):"
                    f" tokenization models "
                    "cannot be joined. Fix: 'vocabulary: base', or the name of an expert"
                )
            added |= {t: donor.label for t in more if t not in added}
        for token in self.vocabulary.tokens:
            if token not in tokens and token not in added:
                holder = next((i.label for i in self.inputs.values() if token in i.tokens), "")
                added[token] = holder
        return added

    def _special(self, token: str, source: TokenRow) -> Sources:
        """Source row that the recipe names for a token."""
        if not source.model:
            return ()
        donor = self.inputs.get(source.model)
        if donor is None:
            self.problems.append(
                f"vocabulary: the row of {token!r} is to be taken from '{source.model}', expected one of "
                f"{', '.join(self.inputs)}.{did_you_mean(source.model, self.inputs)}"
            )
            return ()
        named = source.token if source.token is not None else token
        row = source.token_id if source.token_id is not None else donor.row(named)
        if row is None or not 0 <= row < donor.rows:
            what = f"the token {named!r}" if source.token_id is None else f"row {source.token_id}"
            self.problems.append(
                f"vocabulary: the row of {token!r} is to be {what} of '{source.model}', which has none"
            )
            return ()
        return ((self.labels.index(source.model), row),)

    def _lent_row(self, token: str) -> Sources:
        """Substitute row of a token for inputs that lack it."""
        if token in self.special:
            return self.special[token]
        rows: dict[str, tuple[int, int]] = {}  # each checkpoint once
        for number, donor in enumerate(self.inputs.values()):
            if (row := donor.row(token)) is not None:
                rows.setdefault(str(donor.model.tensors.identity()), (number, row))
        return tuple(pair for pair in rows.values() if pair[0] == 0) or tuple(rows.values())

    def _sources(self, donor: _TokenInput, number: int, row: int) -> Sources:
        """Sources of a row of an input's new table."""
        token = self.by_row.get(row)
        if token is None:  # padding comes from the model whose tokenizer is kept
            keeper = self.labels.index(self.keeper.label)
            return ((keeper, row),) if row < self.keeper.rows else OWN_MEAN
        forced = token in self.vocabulary.tokens and self.vocabulary.tokens[token].force
        own_row = donor.row(token)
        return ((number, own_row),) if own_row is not None and not forced else self._lent[token]

    def _check_tables(self, donor: _TokenInput, names: Mapping[str, Sequence[str]], rows: Sequence[Sources]) -> None:
        """Raise if a donor of rows has no table of the same width."""
        lenders = {k for sources in rows for k, _ in sources if k >= 0}
        for name, tables in names.items():
            shape = donor.model.specs[name].shape[1:]
            for k in lenders:
                other = self.inputs[self.labels[k]].model
                if not tables[k] or other.specs[tables[k]].shape[1:] != shape:
                    raise CheckpointError(
                        f"{donor.model.location}: rows of '{name}' are to be taken from {other.location}, which has "
                        "no such table of the same width. Are these models of one architecture? (PEFT does not save "
                        "a table of another length that the adapter does not train.)"
                    )

    def _config(self, config: Config) -> Config:
        """A config of the base for the new tables."""
        return tokenizer.config_with_tokens(config, self.rows, self.keeper.model.config)

    def _sidecars(self) -> dict[str, str]:
        """Tokenizer files that differ from those of the kept tokenizer."""
        if not self.added:
            return {}
        entries = []
        for token, label in self.added.items():
            listed = tokenizer.read_tokenizer(self.inputs[label].model)[1] if label else []
            entry = next((e for e in listed if e["content"] == token), {**tokenizer.ADDED, "content": token})
            entries.append({**entry, "id": self.tokens[token]})
        return tokenizer.written_tokenizer(self.keeper.model.folder.directory or Path(), entries)
