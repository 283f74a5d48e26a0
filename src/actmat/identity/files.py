"""Files beside the weights, compared by exclusion: all that an output would get, but for those that nothing reads.

Settings follow the rule of weights: where the experts agree and the base differs, the output has theirs; where they
differ, it has the base's, and a note says so. A tokenizer and its chat templates are written together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actmat.checkpoints.side_files import MODULES, PIPELINE, ROUTER, is_of_architecture
from actmat.errors import first_of
from actmat.identity.configs import InputAgreement, words_of
from actmat.identity.entries import same
from actmat.identity.inventory import DAMAGED, TEMPLATES, Inventory, matches
from actmat.identity.tokens import FLAGS, TOKENIZER, TOKENIZERS, WORDS, tokenizer_file

_OF_TOKENIZER = (*TOKENIZERS, "special_tokens_map.json", "added_tokens.json", "*chat_template*")
_OF_PROCESSOR = "processor_config.json"
"""End of the names of files of a processor: one in the form of transformers 5 holds the entries of the others."""
SHOWN = 6
"""Entries that a note names."""
FIX = ". Another one: --set {}_from=NAME"


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
    has_tables = any(f.is_adapter or f.tables() for f in files.values())
    whole = {top for of_input in files.values() for top in of_input.side.modules}
    paths = sorted({path for of_input in files.values() for path in of_input.contents})
    of_tokenizer = [p for p in paths if p == TEMPLATES or matches(p, _OF_TOKENIZER)]
    of_processor = [p for p in paths if p.endswith(_OF_PROCESSOR) and "/" not in p]
    of_modules = [p for p in paths if p in (MODULES, ROUTER) or ("/" in p and p.partition("/")[0] in whole)]
    others = [[p] for p in paths if p not in (*of_tokenizer, *of_processor, *of_modules)]
    weighted = files["base"].weighted_modules if "base" in files else set()
    taken: dict[str, str] = {}
    notes: list[str] = []
    for group in filter(None, (of_tokenizer, of_processor, of_modules, *others)):
        is_whole, is_code = group == of_tokenizer, group[0].endswith(".py")
        of_base = not is_whole and (group == of_modules or is_of_architecture(group[0]))
        written = coded if is_code else "base" if of_base else owner or "base"
        ours = files[written].contents if written in files else {}
        rows = [(*row, label) for label, f in files.items() if label != written for row in _unlike(ours, f, group)]
        fixed = owner is not None or is_code or group[0] == PIPELINE or (is_new and is_whole)
        fixed = fixed or any(DAMAGED in f.contents.get(path, ()) for f in files.values() for path in group)
        source = None if fixed or all(key == "not" for _, key, _ in rows) else _agreed(files, group)
        if source is not None and (group != of_modules or files[source].weighted_modules == weighted):
            taken |= dict.fromkeys(_paths(files, source, group, is_whole=is_whole), source)
            keys_of = {p: list(dict.fromkeys(key for path, key, _ in rows if path == p)) for p, *_ in rows}
            lines = (f"{p}: {'none' if keys == ['not'] else first_of(keys, SHOWN)}" for p, keys in keys_of.items())
            shown = "; ".join(line.removesuffix(": ") for line in lines)
            fix = ", those of the base not (--set files_from=base)" if can_choose else ""
            notes.append(f"{shown}: the experts agree, and theirs are written{fix}")
            continue
        for path in group:
            labels: dict[str, list[str]] = {}
            compared = {"tokens"} if has_tables else ()  # by the rows of tables, see `compare_tokens`
            for _, key, label in (row for row in rows if row[0] == path and row[1] not in compared):
                labels.setdefault(key or "only", []).append(words_of(label))
            entries = [f"{key} in {first_of(of_key)}" for key, of_key in labels.items()]
            whose = f"that of {words_of(written)} is written" if path in ours else "none is written"
            fix = FIX.format("config" if is_code else "files") * (can_choose and (is_code or not of_base))
            notes += [f"{path} differs ({first_of(entries)}): {whose}{fix}"] if entries else []
    return InputAgreement(notes=tuple(notes), files=taken)


def _unlike(ours: Mapping[str, Mapping[str, Any]], other: Inventory, group: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Path and entry of what is not as in other contents; no entry: only the input has it; 'not': it has none.

    Programs write the files of one tokenizer in several forms: only those that both have are compared.
    """
    theirs = other.contents
    has_form = any(p in ours and matches(p, (TOKENIZER, *WORDS)) for p in group)
    for path in group:
        if path in ours and path in theirs:
            keys = unequal_keys(ours[path], theirs[path])
            flags = [side[path].get(FLAGS, {}) for side in (ours, theirs) if "tokens" in keys and path == TOKENIZER]
            is_said = len(flags) > 1 and all(flags[1].get(token, flag) == flag for token, flag in flags[0].items())
            yield from ((path, key) for key in keys if key != FLAGS or not is_said)  # new tokens have new flags
        elif path in theirs and (path == TEMPLATES or not has_form):
            yield path, ""
        elif path in ours and not (other.is_adapter or matches(path, _OF_TOKENIZER)):
            yield path, "not"


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
    experts = {label: f for label, f in files.items() if label != "base"}
    holders = [label for label, f in experts.items() if any(p in f.contents for p in group)]
    if not holders or any(label not in holders and not f.is_adapter for label, f in experts.items()):
        return None
    first, *others = (experts[label] for label in holders)
    alike = not any([*_unlike(a.contents, b, group)] for o in others for a, b in ((first, o), (o, first)))
    return holders[0] if alike else None


def _paths(files: Mapping[str, Inventory], source: str, group: Sequence[str], *, is_whole: bool) -> Iterator[str]:
    """Paths that are written as an expert has them; those of a tokenizer also where it has none."""
    giver = files[source]
    yield from (p for p in giver.side.kept if matches(p, _OF_TOKENIZER)) if is_whole else group
    has_tokens = giver.source is not None and tokenizer_file(giver.source) is not None
    if is_whole and "base" in files and (has_tokens or TEMPLATES in giver.contents):
        replaced = _OF_TOKENIZER if has_tokens else ("*chat_template*",)
        yield from (p for p in files["base"].side.kept if matches(p, replaced))
