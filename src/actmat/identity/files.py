"""Files beside the weights, compared by exclusion: all that an output would get, but for those that nothing reads.

Settings follow the rule of weights: where the experts agree and the base differs, the output has theirs; where they
differ, it has the base's, and a note says so. A tokenizer and its chat templates are written together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actmat.checkpoints.side_files import MODULES, is_of_architecture
from actmat.errors import first_of
from actmat.identity.configs import InputAgreement, words_of
from actmat.identity.entries import same
from actmat.identity.inventory import DAMAGED, TEMPLATES, Inventory, matches
from actmat.identity.tokens import tokenizer_file
from actmat.identity.usable import TOKENIZERS

_OF_TOKENIZER = (*TOKENIZERS, "special_tokens_map.json", "added_tokens.json", "merges.txt", "*chat_template*")
SHOWN = 6
"""Entries that a note names."""
FIX = ". Another one: --set files_from=NAME"


def agree_files(
    files: Mapping[str, Inventory], owner: str | None, coded: str, *, is_new: bool = False, is_model: bool = True
) -> InputAgreement:
    """Compare the files of inputs by label.

    Args:
        files: of the base, if there is one, and of the experts.
        owner: whose tokenizer and settings are written, 'base' or a label; None: the experts' where these agree.
        coded: whose code is written.
        is_new: a new tokenizer is written.
        is_model: the output is a model, for which `files_from` chooses.
    """
    can_choose = is_model and "base" in files
    whole = {top for of_input in files.values() for top in of_input.side.modules}
    paths = sorted({path for of_input in files.values() for path in of_input.contents})
    of_tokenizer = tuple(p for p in paths if p == TEMPLATES or matches(p, _OF_TOKENIZER))
    taken: dict[str, str] = {}
    notes: list[str] = []
    for group in (of_tokenizer, *((p,) for p in paths if p not in of_tokenizer)):
        if not group:
            continue
        of_base = group != of_tokenizer and is_of_architecture(group[0], whole)
        written = coded if group[0].endswith(".py") else "base" if of_base else owner or "base"
        rows = [row for path in group for row in _unlike(files, path, group, written)]
        fixed = group[0].endswith(".py") or group[0] == MODULES or (is_new and group == of_tokenizer)
        fixed = fixed or any(DAMAGED in f.contents.get(path, ()) for f in files.values() for path in group)
        source = None if fixed or owner is not None or not rows else _agreed(files, group)
        if source is not None:
            taken |= dict.fromkeys(_paths(files, source, group, is_whole=group == of_tokenizer), source)
            shown = first_of(list(dict.fromkeys(f"{p}: {key}" if key else p for p, key, _ in rows)), SHOWN)
            fix = ", those of the base not (--set files_from=base)" if can_choose else ""
            notes.append(f"{shown}: the experts agree, and theirs are written{fix}")
        else:
            differing = _notes(files, group, rows, written, "" if of_base or "base" not in files else FIX)
            notes += differing if can_choose else [note.removesuffix(FIX) for note in differing]
    return InputAgreement(notes=tuple(notes), files=taken)


def _unlike(
    files: Mapping[str, Inventory], path: str, group: Sequence[str], written: str
) -> Iterator[tuple[str, str, str]]:
    """Path, entry and input of what is not as in the input whose files are written; no entry: that has no such file."""
    owned = files[written].contents if written in files else {}
    has_others = len(group) > 1 and path != TEMPLATES and any(p in owned for p in group)
    for label, of_input in files.items():
        theirs, ours = of_input.contents.get(path), owned.get(path)
        if label == written or theirs is None or (ours is None and has_others):
            continue
        if ours is None:
            yield path, "", label
            continue
        for key in unequal_keys(ours, theirs):
            yield path, key, label


def unequal_keys(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Keys with other values, where nothing, false and empty are the same.

    >>> unequal_keys({"a": 1, "b": [], "c": 2}, {"a": 1.0, "c": 3, "d": False})
    ['c']
    """
    pairs = {key: (ours.get(key), theirs.get(key)) for key in dict.fromkeys((*ours, *theirs))}
    return [k for k, pair in pairs.items() if not same(*pair) and not all(map(_is_nothing, pair))]


def _is_nothing(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def _agreed(files: Mapping[str, Inventory], group: Sequence[str]) -> str | None:
    """The first of the experts that have these files, if all full models do and none differs."""
    experts = {label: of_input for label, of_input in files.items() if label != "base"}
    holders = [label for label, of_input in experts.items() if any(p in of_input.contents for p in group)]
    if not holders or any(label not in holders for label, of_input in experts.items() if not of_input.is_adapter):
        return None
    for path in group:
        first, *others = (experts[label].contents.get(path) for label in holders)
        is_needed = len(group) == 1 or path == TEMPLATES
        for other in others:
            if (first is None or other is None) and (first is not None or other is not None) and is_needed:
                return None
            if first is not None and other is not None and unequal_keys(first, other):
                return None
    return holders[0]


def _paths(files: Mapping[str, Inventory], source: str, group: Sequence[str], *, is_whole: bool) -> Iterator[str]:
    """Paths that are written as an expert has them; those of a tokenizer also where it has none."""
    giver = files[source]
    if not is_whole:
        yield from group
        return
    yield from (p for p in giver.side.kept if matches(p, _OF_TOKENIZER))
    replaced = (
        _OF_TOKENIZER if giver.source is not None and tokenizer_file(giver.source) is not None else ("*chat_template*",)
    )
    if "base" in files and (replaced is _OF_TOKENIZER or TEMPLATES in giver.contents):
        yield from (p for p in files["base"].side.kept if matches(p, replaced))


def _notes(
    files: Mapping[str, Inventory], group: Sequence[str], rows: Sequence[tuple[str, str, str]], written: str, fix: str
) -> Iterator[str]:
    """Notes on files that differ from those that are written."""
    whose = f"that of {words_of(written)} is written" if written in files else "none is written"
    for path in group:
        keys = {key: label for p, key, label in rows if p == path and key and key != "tokens"}
        only = [words_of(label) for p, key, label in rows if p == path and not key]
        labels = [f"'{n}'" for n in dict.fromkeys(label for p, _, label in rows if p == path)]
        lacking = [f"'{n}'" for n, f in files.items() if path not in f.contents and n != written and not f.is_adapter]
        is_owned = written in files and path in files[written].contents and not matches(path, _OF_TOKENIZER)
        if path == TEMPLATES and labels:
            none = f"{words_of(written)} has none, and none is written" if only and written in files else whose
            yield f"chat templates differ ({', '.join(labels)}): {none}{fix}"
        elif keys:
            shown = [f"{key} ('{label}')" for key, label in keys.items()]
            yield f"{path} differs in {first_of(shown)}: {whose}{fix}"
        elif only:
            where = f"is only in {first_of(only)}" if "base" in files else f"is not alike in {first_of(only)}"
            yield f"{path} {where}: none is written{fix}"
        elif lacking and fix and is_owned:
            yield f"{path} is not in {first_of(lacking)}: {whose}"
