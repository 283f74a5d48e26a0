"""Configs of the inputs of a merge, compared: entries that change what the weights compute must agree.

They are compared as they stand first. Only where entries differ, or one file has them, both configs are read by their
class (`reading`). Where no class can be asked, a short table of spellings decides (`entries`), else the user must.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actmat.checkpoints.side_files import SCHEDULER_CONFIG, code_files
from actmat.errors import first_of
from actmat.identity.entries import ABSENT, ROPE, Place, is_harmless, is_usage, same, unequal_entries
from actmat.identity.reading import ConfigReading, read_configs

FIX = "--set config_from=base, or =NAME for those of an expert"
CHOOSE = f"give the right base, or say whose entries to write: {FIX}"
COMPONENTS = "components"
"""Entry of a pipeline's config with the configs of its components."""
CLASSES = ("_class_name", "model_type")
"""Entries that name the class of a model, of diffusers and of transformers."""
SHOWN = 8
"""Most entries that one sentence names."""
NOTED = {
    "length": "lengths and sizes for which the inputs are meant differ",
    "token": "ids of special tokens differ",
    "code": "files with the model's code differ, so that the same weights may mean another function",
    "sampling": "entries that choose how images are sampled differ",
    "usage": "entries that choose how outputs are used differ",
    "unknown": "entries whose effect is not known differ",
}
"""Kind of differences that are notes -> words for them. The others, `function` and `unread`, must be decided."""
_LENGTHS = re.compile(
    r"max_position_embeddings$|^(max_seq(uence)?_len(gth)?|seq_length|n_positions|n_ctx|model_max_length|max_model_len"
    r"|context_length|image_size|sample_size|eval_size)$"
)
"""Lengths up to which a model is meant to be used: they change no output for inputs that all accept."""
_TOKENS = re.compile(r"token_(id|ids|index)$")
_TRAINED = re.compile(
    r"^(prediction_type|rescale_betas_zero_snr|beta_(schedule|start|end)|trained_betas|num_train_timesteps|shift"
    r"|use_dynamic_shifting)$"
)
"""Entries of the schedulers of diffusers that tell what a model was trained to predict."""
_HEAD = re.compile(
    "(?<=.)(Base|MT|Sparse|VL|Video|Tracker|Text|Vision|Audio|Encoder|Decoder|Backbone|WithLM|LMHead|DoubleHeads"
    "|PreTrained|Model|For(?=[A-Z])).*"
)
"""End of a class's name: its head, or the part of a model that it is."""


@dataclass(frozen=True)
class InputAgreement:
    """Outcome of a comparison of inputs.

    Args:
        problems: differences that must be decided.
        notes: differences that are not.
        warnings: trained weights that are not read.
        configs: path in the output -> config to be written there in place of the base's.
        files: path in the output -> label of the expert whose file is written there, see `files.FileAgreement`.
    """

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConfigDifference:
    """An entry that differs between the base and an expert.

    Args:
        at: its place in the base's config.
        label: of the expert.
        base: its value there.
        expert: its value in the expert's config.
        kind: a key of `NOTED`; `function` if it changes what the model computes, `unread` if it may.
    """

    at: Place
    label: str
    base: Any
    expert: Any
    kind: str


@dataclass(frozen=True, slots=True)
class _ConfigPair:
    """The config of an expert, and the part of the base's that describes the same thing."""

    label: str
    at: Place
    base: Mapping[str, Any]
    expert: Mapping[str, Any]

    @property
    def classes(self) -> list[Any]:
        """Classes of base and expert."""
        return [c.get("_class_name") or c.get("model_type") for c in (self.base, self.expert)]


def agree_configs(
    base: Mapping[str, Any] | None,
    experts: Sequence[tuple[str, Mapping[str, Any] | None]],
    take: str | None = None,
    fix: str = "",
) -> InputAgreement:
    """Compare the config of the base with those of the experts.

    Args:
        base: content of `config.json`; of a pipeline, with those of its components.
        experts: label and config; None without one, as adapters are.
        take: whose entries are written where they differ: 'base' or a label.
        fix: how a user resolves what differs, where the config of the base is a file's header, which lacks entries.

    >>> llama = {"model_type": "llama"}
    >>> agree_configs(llama, [("long", llama | {"rope_theta": 1e6})], "long").configs["config.json"]["rope_theta"]
    1000000.0
    """
    if base is None:
        return InputAgreement()
    configs = {label: config for label, config in experts if config is not None}
    written, notes = _with_class(base, configs)
    differences, readings = compare_configs(written, configs)
    if fix:
        differences = [
            replace(d, kind="unknown") if d.kind == "unread" and ABSENT in (d.base, d.expert) else d
            for d in differences
        ]
    owner = f"as in {words_of(take or 'base')}"
    decided = [d for d in differences if d.kind not in NOTED]
    problems = _problems(decided, readings, fix or CHOOSE) if take is None else []
    if decided and take is not None:
        notes.append(f"config.json: {listed(decided)}; written {owner} (config_from)")
    agreed = _agreed_entries(written, configs, differences) if take is None else {}
    for kind, reason in NOTED.items():
        of_kind = [d for d in differences if d.kind == kind]
        if theirs := [d for d in of_kind if d.at in agreed]:
            notes.append(f"config.json: {reason}, and are written as the experts agree: {listed(theirs)}")
        if others := [d for d in of_kind if d.at not in agreed]:
            notes.append(f"config.json: {reason}, and are written {owner}: {listed(others)}")
    if releases := dict.fromkeys(r.release for r in readings if r.release):
        notes.append(f"config.json: entries that differ were compared as {' and '.join(releases)} reads them")
    if take in configs:
        written = _patched(written, _pairs(take, written, configs[take]), differences)
    elif take not in (None, "base"):
        problems.append(f"config_from names '{take}', which has no config.json")
    for at, value in agreed.items():
        written = _with_value(written, at, value)
    return InputAgreement(tuple(problems), tuple(notes), configs={} if written == base else _by_path(base, written))


def _agreed_entries(
    base: Mapping[str, Any], experts: Mapping[str, Mapping[str, Any]], differences: Sequence[ConfigDifference]
) -> dict[Place, Any]:
    """Entries to note that all experts have alike, by their places in the base's config."""
    values: dict[Place, list[Any]] = {}
    other_classes = {d.at[:-1] for d in differences if d.at[-1] in CLASSES}
    for difference in (d for d in differences if d.kind in NOTED and d.kind != "code"):
        if difference.at[:-1] in other_classes:
            continue  # an entry of another class
        values.setdefault(difference.at, []).append(difference.expert)
    alike = {at: of[0] for at, of in values.items() if len(of) == len(experts) and all(same(v, of[0]) for v in of)}
    return {at: v for at, v in alike.items() if v not in (ABSENT, None) and _holds(experts.values(), at, v)}


def _holds(experts: Iterable[Mapping[str, Any]], at: Place, value: Any) -> bool:
    """True if the files of all experts have the entry there, as their classes read it."""
    for config in experts:
        entry: Any = config
        for key in at:
            entry = entry.get(key, ABSENT) if isinstance(entry, Mapping) else ABSENT
        if not same(entry, value):
            return False
    return True


def _with_value(config: Mapping[str, Any], at: Place, value: Any) -> dict[str, Any]:
    """The config with an entry."""
    inner = config.get(at[0])
    rest = _with_value(inner if isinstance(inner, Mapping) else {}, at[1:], value) if at[1:] else value
    return {**config, at[0]: rest}


def words_of(label: str) -> str:
    """An input in a sentence."""
    return "the base" if label == "base" else f"expert '{label}'"


def compare_configs(
    base: Mapping[str, Any], experts: Mapping[str, Mapping[str, Any]]
) -> tuple[list[ConfigDifference], Sequence[ConfigReading]]:
    """Differences of the base's config and those of experts by label; and the readings that it took to find them."""
    pairs = [pair for label, config in experts.items() for pair in _pairs(label, base, config)]
    compared = [p for p in pairs if p.base and p.expert]
    unequal = [p for p in compared if _lone_tokens(p) or any(unequal_entries(p.base, p.expert))]
    readings = read_configs([config for p in unequal for config in (p.base, p.expert)])
    differences = [difference for pair in pairs for difference in _unlike_marks(pair)]
    for pair, *both in zip(unequal, readings[::2], readings[1::2], strict=True):
        differences += _unlike_entries(pair, *both)
    return differences, readings


def _problems(decided: Sequence[ConfigDifference], readings: Sequence[ConfigReading], fix: str) -> list[str]:
    changing, unread = ([d for d in decided if d.kind == kind] for kind in ("function", "unread"))
    obstacles = "; ".join(dict.fromkeys(r.obstacle for r in readings if r.obstacle))
    problems = []
    if changing:
        problems.append(
            f"config.json: entries that change what the model computes differ: {listed(changing)}. The output has one "
            "config for all weights. Likely cause: training changed the config, or this is not the expert's base. "
            f"Fix: {fix}"
        )
    if unread:
        problems.append(
            f"config.json: entries differ, and no class can tell whether they mean the same: {listed(unread)}. "
            f"Cause: {obstacles or 'no installed library has the class of this model'}. Fix: remove the cause, or "
            f"{fix}"
        )
    return problems


def _with_class(base: Mapping[str, Any], experts: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The base's config with the entries that loaders need, where it lacks them and the experts agree; and notes."""
    if not base or "_class_name" in base or base.get("model_type"):
        return dict(base), []
    added: dict[str, Any] = {}
    for key in (k for k in ("model_type", "architectures") if not base.get(k)):
        first, *others = [c[key] for c in experts.values() if c.get(key)] or [None]
        added |= {key: first} if first is not None and all(v == first for v in others) else {}
    words = " and no ".join(f"{k} {v!r}".replace("'", "") for k, v in added.items())
    note = f"no {words}: written as in the experts" if added else "no model_type, without which no Auto class loads it"
    return {**base, **added}, [f"config.json of the base has {note}"]


def _pairs(label: str, base: Mapping[str, Any], expert: Mapping[str, Any]) -> list[_ConfigPair]:
    """An expert's config beside its part of the base's; components and schedulers of a pipeline each by themselves."""
    part, at = _counterpart(base, expert)
    ours, theirs = _members(part), _members(expert)
    places = dict.fromkeys((*ours, *theirs))
    return [_ConfigPair(label, (*at, *place), ours.get(place, {}), theirs.get(place, {})) for place in places]


def _members(config: Mapping[str, Any]) -> dict[Place, Mapping[str, Any]]:
    """Configs of a pipeline, its components and its schedulers, by their places; or of one model."""
    if not isinstance(parts := config.get(COMPONENTS), Mapping):
        return {(): config}
    members: dict[Place, Mapping[str, Any]] = {(): {k: v for k, v in config.items() if not isinstance(v, Mapping)}}
    members |= {(COMPONENTS, k): v for k, v in parts.items()}
    return members | {(k,): v for k, v in config.items() if isinstance(v, Mapping) and k != COMPONENTS}


def _counterpart(base: Mapping[str, Any], expert: Mapping[str, Any]) -> tuple[Mapping[str, Any], Place]:
    """The part of the base's config that describes what the expert is (a component, a tower, all), and its place."""
    for mark in CLASSES:
        if expert.get(mark) is None or base.get(mark) == expert[mark]:
            continue
        inner = {(k,): v for k, v in base.items()} | {at: c for at, c in _members(base).items() if at}
        fitting = [(v, at) for at, v in inner.items() if isinstance(v, Mapping) and v.get(mark) == expert[mark]]
        if len(fitting) == 1:
            return fitting[0]
    return base, ()


def _marks(config: Mapping[str, Any], at: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Place and value of what a file says of itself: classes, families of architectures, code, ids of tokens."""
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        yield (*at, "architectures"), _HEAD.sub("", named[0]) + "*"
    if not at:
        yield ("auto_map",), ", ".join(code_files(config, "AutoModel")) or ABSENT
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _marks(value, (*at, str(key)))
        elif value is not None and (key in CLASSES or _TOKENS.search(key)):
            yield (*at, str(key)), value


def _tokens(config: Mapping[str, Any]) -> dict[Place, Any]:
    """Ids of tokens by their places."""
    return {at: value for at, value in _marks(config) if _TOKENS.search(at[-1])}


def _lone_tokens(pair: _ConfigPair) -> list[Place]:
    """Places of ids of tokens that one of two configs of a class states."""
    return sorted(_tokens(pair.base).keys() ^ _tokens(pair.expert)) if pair.classes[0] == pair.classes[1] else []


def _unlike_marks(pair: _ConfigPair) -> Iterator[ConfigDifference]:
    """Differences that no class needs to be asked about."""
    if not (pair.base and pair.expert):
        base, expert = ("given" if config else ABSENT for config in (pair.base, pair.expert))
        yield from [ConfigDifference(pair.at or ("all",), pair.label, base, expert, "unknown")] * (base != expert)
        return
    ours, theirs = dict(_marks(pair.base)), dict(_marks(pair.expert))
    for at in (at for at in ours if at in theirs and not same(ours[at], theirs[at])):
        kinds = {"architectures": "function", "auto_map": "code", **dict.fromkeys(CLASSES, "unknown")}
        yield ConfigDifference((*pair.at, *at), pair.label, ours[at], theirs[at], kinds.get(at[-1], "token"))


def _unlike_entries(pair: _ConfigPair, base: ConfigReading, expert: ConfigReading) -> Iterator[ConfigDifference]:
    """Differences between two configs as their classes read them; as they are written, where these cannot be asked."""
    is_read, is_one_class = bool(base.release and expert.release), pair.classes[0] == pair.classes[1]
    has_no_class = not (is_read or base.obstacle or expert.obstacle)
    undeclared = base.undeclared | expert.undeclared
    written = {at: values for at, *values in unequal_entries(pair.base, pair.expert)}
    for at, (a, b) in written.items():
        if is_usage(at[-1], pair.base.get("model_type")) and b not in (ABSENT, None):
            yield ConfigDifference((*pair.at, *at), pair.label, a, b, "usage")
    forms = [_with_sizes(r.values) for r in (base, expert)] if is_read else [pair.base, pair.expert]
    ours, theirs = map(_tokens, forms)
    pairs = [(at, ours.get(at, ABSENT), theirs.get(at, ABSENT)) for at in _lone_tokens(pair)]
    yield from (ConfigDifference((*pair.at, *at), pair.label, a, b, "token") for at, a, b in pairs if not same(a, b))
    for at, a, b in unequal_entries(*forms):
        is_in_one, is_empty = ABSENT in (a, b), all(v in (ABSENT, None, False) for v in (a, b))
        if is_in_one and not is_one_class and (is_empty or at not in written):
            continue  # nothing, or a default of one class
        kind = "function" if is_read else "unread"
        if is_usage(at[-1], pair.base.get("model_type")):
            continue  # classes drop some of these, and generation reads the file
        if str(pair.classes[0]).endswith("Scheduler"):
            kind = kind if _TRAINED.search(at[-1]) else "sampling"
        elif ROPE not in at and _LENGTHS.search(at[-1]):
            kind = "length"
        elif not undeclared.isdisjoint(at[:n] for n in range(1, len(at) + 1)):
            kind = "unknown"
        elif at[-1].endswith("_config") and (is_in_one or None in (a, b)):
            kind = "unknown"  # a part of one model only
        elif is_in_one and ROPE not in at and (has_no_class or not is_one_class):
            kind = "unknown"  # of one class, or what code that is not read may do by itself
        yield ConfigDifference((*pair.at, *at), pair.label, a, b, kind)


def _with_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with sizes that some classes leave to the model to compute."""
    out = {k: _with_sizes(v) if isinstance(v, Mapping) else v for k, v in config.items()}
    heads, width = out.get("num_attention_heads"), out.get("hidden_size")
    if isinstance(heads, int) and heads > 0 and isinstance(width, int):
        sizes = {"num_key_value_heads": heads, "head_dim": width // heads}
        out |= {k: v for k, v in sizes.items() if k in out and out[k] is None}
    return out


def listed(differences: Sequence[ConfigDifference], base: str = "base") -> str:
    """Entries with their values in the base and in the experts."""
    by_place: dict[Place, list[ConfigDifference]] = {}
    for difference in differences:
        by_place.setdefault(difference.at, []).append(difference)
    words = []
    for at, of_place in by_place.items():
        labels: dict[str, list[str]] = {}
        for d in of_place:
            labels.setdefault(_shown(d.expert), []).append(f"'{d.label}'")
        others = (f"{', '.join(of[:3])}{' and others' * (len(of) > 3)} {v}" for v, of in labels.items())
        words.append(f"{'.'.join(at)} ({base} {_shown(of_place[0].base)}; {'; '.join(others)})")
    return first_of(words, SHOWN)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _patched(
    config: Mapping[str, Any], pairs: Sequence[_ConfigPair], differences: Sequence[ConfigDifference]
) -> dict[str, Any]:
    """The config with the entries of an expert in those parts that differ."""
    out = copy.deepcopy(dict(config))
    for pair in (p for p in pairs if p.base and p.expert):
        places = [d.at for d in differences if d.label == pair.label and d.at[: len(pair.at)] == pair.at]
        if places:
            part = out
            for key in pair.at:
                part = part[key]
            entries = _with_entries(pair.base, pair.expert, {key for at in places for key in at})
            for key in pair.base:
                part.pop(key, None)
            part.update(entries)
    return out


def _with_entries(base: Mapping[str, Any], expert: Mapping[str, Any], also: set[str]) -> dict[str, Any]:
    """The expert's entries; the base's that are harmless and not in `also`, such as the size of a vocabulary."""
    out: dict[str, Any] = {}
    for key in dict.fromkeys((*base, *expert)):
        a, b = base.get(key), expert.get(key)
        stays = is_harmless(key) and key not in also
        if not stays and isinstance(a, Mapping) and isinstance(b, Mapping):
            out[key] = _with_entries(a, b, also)
        elif key in (source := base if stays else expert):
            out[key] = copy.deepcopy(source[key])
    return out


def _by_path(base: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Configs that changed, by their paths in an output; those of a pipeline are in folders."""
    before = base.get(COMPONENTS)
    if not isinstance(before, Mapping):
        return {"config.json": found}
    changed = {f"{name}/config.json": c for name, c in found[COMPONENTS].items() if c != before.get(name)}
    others = {k: c for k, c in found.items() if k != COMPONENTS and isinstance(c, Mapping) and c != base.get(k)}
    return changed | {f"{name}/{SCHEDULER_CONFIG}": c for name, c in others.items()}
