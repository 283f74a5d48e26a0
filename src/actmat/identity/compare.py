"""Configs of the inputs of a merge, compared: entries that change what the weights compute must agree."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actmat.checkpoints.side_files import SCHEDULER_CONFIG
from actmat.errors import first_of
from actmat.identity.meaning import ABSENT, NESTED, ROPE_KEYS, ConfigEntry, meaning, same

FIX = "--set config_from=base, or =NAME for those of an expert"
SHOWN = 8
"""Most entries that one sentence names."""
KINDS = {
    "length": "lengths and sizes for which the inputs are meant differ",
    "token": "ids of special tokens differ",
    "code": "files with the model's code differ, so that the same weights may mean another function",
    "unknown": "entries whose effect is not known differ",
    "absent": "entries that their class computes where they are absent are in one file only",
    "class": "entries are given in one file only, of two classes of models",
}
"""Kind of differences that are notes -> words for them."""


@dataclass(frozen=True)
class InputAgreement:
    """Outcome of a comparison of inputs.

    Args:
        problems: differences that must be decided.
        notes: differences that are not.
        configs: path in the output -> config to be written there in place of the base's.
    """

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Difference:
    key: str
    label: str
    base: ConfigEntry | None
    expert: ConfigEntry | None

    @property
    def kind(self) -> str:
        """`absent` if only one file holds it and its class computes it from others; else that of the entries."""
        is_absent = any(e is None or e.value is ABSENT for e in (self.base, self.expert))
        in_one = is_absent and self.entry.raw != ROPE_KEYS and self.entry.kind == "function"
        return "absent" if in_one else self.entry.kind

    @property
    def entry(self) -> ConfigEntry:
        """The entry of the base, else of the expert."""
        found = self.base or self.expert
        assert found is not None
        return found


def agree(
    base: Mapping[str, Any] | None, experts: Sequence[tuple[str, Mapping[str, Any] | None]], take: str | None = None
) -> InputAgreement:
    """Compare the config of the base with those of the experts.

    Args:
        base: content of `config.json`; of a pipeline, with those of its components.
        experts: label and config; None without one, as adapters are.
        take: whose entries are written where they differ: 'base' or a label.

    >>> llama = {"model_type": "llama"}
    >>> found = agree(llama, [("long", llama | {"rope_theta": 1e6})])
    >>> print(found.problems[0][:75])
    config.json: entries that change what the model computes differ: rope_theta
    >>> agree(llama, [("long", llama | {"rope_theta": 1e6})], "long").configs["config.json"]["rope_theta"]
    1000000.0
    """
    if base is None:
        return InputAgreement()
    given = {label: config for label, config in experts if config is not None}
    found, notes = _with_class(base, given)
    problems = []
    differences: list[_Difference] = []
    for label, config in given.items():
        part, at = _counterpart(found, config)
        own = list(_differences(label, part, config))
        differences += own
        if take == label:
            found = _patched(found, at, own, config)
    owner = f"as in {words_of(take or 'base')}"
    if decided := [d for d in differences if d.kind == "function"]:
        if take is None:
            problems.append(
                f"config.json: entries that change what the model computes differ: {_listed(decided)}. The output has "
                "one config for all weights. Likely cause: training changed the config, or this is not the expert's "
                f"base. Fix: give the right base, or say whose entries to write: {FIX}"
            )
        else:
            notes.append(f"config.json: {_listed(decided)}; written {owner} (config_from)")
    for kind, reason in KINDS.items():
        if of_kind := [d for d in differences if d.kind == kind]:
            notes.append(f"config.json: {reason}, and are written {owner}: {_listed(of_kind)}")
    if take not in (None, "base", *given):
        problems.append(f"config_from names '{take}', an adapter or a file without a config.json")
    return InputAgreement(tuple(problems), tuple(notes), {} if found == base else _by_path(base, found))


def words_of(label: str) -> str:
    """An input in a sentence."""
    return "the base" if label == "base" else f"expert '{label}'"


def _with_class(base: Mapping[str, Any], experts: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The base's config with the entries that loaders need, where it lacks them and the experts agree; and notes."""
    if "_class_name" in base or base.get("model_type"):
        return dict(base), []
    keys = [k for k in ("model_type", "architectures") if not base.get(k)]
    given = {k: [c[k] for c in experts.values() if c.get(k)] for k in keys}
    added = {key: values[0] for key, values in given.items() if values and all(v == values[0] for v in values)}
    words = " and no ".join(f"{k} {v!r}".replace("'", "") for k, v in added.items())
    note = f"no {words}: written as in the experts" if added else "no model_type, without which no Auto class loads it"
    return {**base, **added}, [f"config.json of the base has {note}"] if added or base else []


def _counterpart(base: Mapping[str, Any], expert: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The part of the base's config that describes what the expert is (a component, a tower, all), and its place."""
    for mark in ("_class_name", "model_type"):
        if expert.get(mark) is None or base.get(mark) == expert[mark]:
            continue
        parts = base.get(NESTED)
        inner: list[tuple[tuple[str, ...], Any]] = [((k,), v) for k, v in base.items()]
        inner += [((NESTED, k), v) for k, v in (parts.items() if isinstance(parts, Mapping) else ())]
        fitting = [(v, at) for at, v in inner if isinstance(v, Mapping) and v.get(mark) == expert[mark]]
        if len(fitting) == 1:
            return fitting[0]
    return base, ()


def _differences(label: str, base: Mapping[str, Any], expert: Mapping[str, Any]) -> Iterator[_Difference]:
    """Entries with other values in an expert; of two classes, those of one file are `class`."""
    ours, theirs = meaning(base), meaning(expert)
    kinds = [c.get("_class_name") or c.get("model_type") or "absent" for c in (base, expert)]
    if kinds[0] != kinds[1]:
        if "absent" not in kinds:  # else the class is known from the other
            yield _Difference("model_type", label, *(ConfigEntry(k, "unknown", ("model_type",)) for k in kinds))
        one, two = ({k for k, e in of_one.items() if e.given} for of_one in (ours, theirs))
        alone = {k for k in one ^ two if (ours.get(k) or theirs[k]).kind in ("function", "unknown")}
        ours, theirs = (
            {k: replace(e, kind="class") if k in alone else e for k, e in of_one.items() if k in alone | (one & two)}
            for of_one in (ours, theirs)
        )
    every = [*ours.values(), *theirs.values()]
    sections = {e.at for e in ours.values()} & {e.at for e in theirs.values()}
    for at in dict.fromkeys(e.at for e in every if e.at not in sections and e.at):
        values = ("given", ABSENT) if any(e.at == at for e in ours.values()) else (ABSENT, "given")
        yield _Difference(".".join(at), label, *(ConfigEntry(v, "unknown", at[-1:], at=at[:-1]) for v in values))
    for key in dict.fromkeys(k for k, e in (*ours.items(), *theirs.items()) if e.at in sections or not e.at):
        a, b = ours.get(key), theirs.get(key)
        if a is None or b is None:
            only = a or b
            nothing = (None, ABSENT, False) if only is not None and only.kind == "class" else (None, ABSENT)
            if only is not None and only.given and only.value not in nothing and only.kind != "token":
                yield _Difference(key, label, a, b)
        elif not same(a.value, b.value):
            yield _Difference(key, label, a, b)


def _listed(found: Sequence[_Difference]) -> str:
    by_key: dict[str, list[_Difference]] = {}
    for difference in found:
        by_key.setdefault(difference.key, []).append(difference)
    words = []
    for key, of_key in by_key.items():
        values: dict[str, list[str]] = {}
        for d in of_key:
            values.setdefault(_shown(d.expert), []).append(f"'{d.label}'")
        others = (f"{', '.join(who[:3])}{' and others' * (len(who) > 3)} {v}" for v, who in values.items())
        words.append(f"{key} (base {_shown(of_key[0].base)}; {'; '.join(others)})")
    return first_of(words, SHOWN)


def _shown(entry: ConfigEntry | None) -> str:
    if entry is None or entry.value is ABSENT:
        return "absent"
    text = str(entry.value)
    return text if len(text) <= 60 else text[:57] + "..."


def _patched(
    config: Mapping[str, Any], at: tuple[str, ...], found: Sequence[_Difference], expert: Mapping[str, Any]
) -> dict[str, Any]:
    """The config with an expert's entries where they differ."""
    out = copy.deepcopy(dict(config))
    for difference in (d for d in found if d.key != "model_type"):
        inside = difference.entry.at
        target, source = _inner(out, (*at, *inside)), _inner(expert, inside)
        for key in dict.fromkeys(k for e in (difference.base, difference.expert) if e is not None for k in e.raw):
            target.pop(key, None)
            if key in source:
                target[key] = copy.deepcopy(source[key])
    return out


def _inner(config: Any, at: Sequence[str]) -> Any:
    for key in at:
        if not isinstance(config.get(key), Mapping):
            if not isinstance(config, dict):
                return {}
            config[key] = {}
        config = config[key]
    return config


def _by_path(base: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Configs that changed, by their paths in an output; those of a pipeline are in folders."""
    before = base.get(NESTED)
    if not isinstance(before, Mapping):
        return {"config.json": found}
    changed = {f"{name}/config.json": c for name, c in found[NESTED].items() if c != before.get(name)}
    others = {k: c for k, c in found.items() if k != NESTED and isinstance(c, Mapping) and c != base.get(k)}
    return changed | {f"{name}/{SCHEDULER_CONFIG}": c for name, c in others.items()}
