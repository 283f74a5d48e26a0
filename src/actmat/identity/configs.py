"""Configs of the inputs of a merge, compared: entries that change what the weights compute must agree.

They are compared as they stand first. Only where entries differ, or one file has them, both configs are read by their
class (`reading`). Where no class can be asked, a short table of spellings decides (`entries`), else the user must.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from actmat.checkpoints.model import COMPONENTS
from actmat.checkpoints.side_files import SCHEDULER_CONFIG, code_files
from actmat.checkpoints.untied import TIE
from actmat.errors import first_of
from actmat.identity.entries import ABSENT, ROPE, Place, is_harmless, is_usage, label_names, same, unequal_entries
from actmat.identity.reading import ConfigReading, read_configs

FIX = "--set config_from=base, or =NAME for those of an expert"
CHOOSE = f"give the right base, or say whose entries to write: {FIX}"
CLASSES = ("_class_name", "model_type")
"""Entries that name the class of a model, of diffusers and of transformers."""
SHOWN = 8
"""Most entries that one sentence names."""
NOTED = "entries that change no weight's meaning, or whose effect is not known, differ, and are written"
_NOTED = re.compile(
    r"token_(id|ids|index)$|max_position_embeddings$"
    r"|^(max_seq(uence)?_len(gth)?|seq_length|n_positions|n_ctx|model_max_length|max_model_len"
    r"|context_length|image_size|sample_size|eval_size)$"
)
"""Ids of special tokens; and lengths up to which a model is meant to be used, which change no output for inputs that
all accept."""
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
_LABELS = ("id2label", "label2id")


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
        kind: `function` if it changes what the model computes, `unread` if it may, else `noted`.
    """

    at: Place
    label: str
    base: Any
    expert: Any
    kind: Literal["function", "unread", "noted"]


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
    head: str = "",
) -> InputAgreement:
    """Compare the config of the base with those of the experts.

    Args:
        base: content of `config.json`; of a pipeline, with those of its components.
        experts: label and config; None without one, as adapters are.
        take: whose entries are written where they differ: 'base' or a label.
        fix: how a user resolves what differs, where the config of the base is a file's header, which lacks entries.
        head: pattern of the merged head whose rows are labels; empty without one.

    >>> llama = {"model_type": "llama"}
    >>> agree_configs(llama, [("long", llama | {"rope_theta": 1e6})], "long").configs["config.json"]["rope_theta"]
    1000000.0
    """
    if base is None:
        return InputAgreement()
    configs = {label: config for label, config in experts if config is not None}
    differences, readings = compare_configs(base, configs)
    if fix:
        differences = [
            replace(d, kind="noted") if d.kind == "unread" and ABSENT in (d.base, d.expert) else d for d in differences
        ]
    if head:
        differences += _unlike_labels(base, configs)
    notes, problems, written = [], [], dict(base)
    owner = f"as in {words_of(take or 'base')}"
    if take is None:
        problems = _problems(differences, readings, fix or CHOOSE, head)
        noted = [d for d in differences if d.kind == "noted"]
        agreed = {} if fix else _agreed_entries(base, configs, noted)  # a header is written as it is
        for whose, of_owner in (
            ("as the experts agree", [d for d in noted if d.at in agreed]),
            (owner, [d for d in noted if d.at not in agreed]),
        ):
            notes += [f"config.json: {NOTED} {whose}: {listed(of_owner)}"] if of_owner else []
        for at, value in agreed.items():
            written = _with_value(written, at, value)
    elif differences:
        notes.append(f"config.json: entries differ: {listed(differences)}; written {owner} (config_from)")
    if releases := dict.fromkeys(r.release for r in readings if r.release):
        notes.append(f"config.json: entries that differ were compared as {' and '.join(releases)} reads them")
    if take in configs:
        written = _patched(written, _pairs(take, written, configs[take]), differences)
    elif take not in (None, "base"):
        problems.append(f"config_from names '{take}', which has no config.json")
    return InputAgreement(tuple(problems), tuple(notes), configs={} if written == base else _by_path(base, written))


def _agreed_entries(
    base: Mapping[str, Any], experts: Mapping[str, Mapping[str, Any]], noted: Sequence[ConfigDifference]
) -> dict[Place, Any]:
    """Entries to note that the files of all experts have alike, by their places; those of another class are not."""
    other_classes = {d.at[:-1] for d in noted if d.at[-1] in CLASSES and d.base is not ABSENT}
    agreed = {}
    for at in dict.fromkeys(d.at for d in noted if d.at[:-1] not in other_classes and d.at[-1] != "auto_map"):
        first, *others = (_entry(config, at) for config in experts.values())
        if first is not None and all(same(first, v) for v in others) and _has_part(base, at):
            agreed[at] = first
    if _LABELS[:1] in agreed:
        agreed[_LABELS[1:]] = _entry(next(iter(experts.values())), _LABELS[1:])
    return agreed


def _entry(config: Any, at: Place) -> Any:
    """The entry at a place; None without one."""
    for key in at:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def _has_part(config: Mapping[str, Any], at: Place) -> bool:
    """True if the entry's part is in the file: one that has all entries at its top must not get a part of a few."""
    return isinstance(_entry(config, at[:-1]), Mapping)


def _with_value(config: Mapping[str, Any], at: Place, value: Any) -> dict[str, Any]:
    """The config with an entry."""
    inner = config.get(at[0])
    rest = _with_value(inner if isinstance(inner, Mapping) else {}, at[1:], value) if at[1:] else value
    return {**config, at[0]: rest}


def _unlike_labels(base: Mapping[str, Any], experts: Mapping[str, Mapping[str, Any]]) -> Iterator[ConfigDifference]:
    """Labels in another order than the base's, or the experts' where it has none."""
    ours = label_names(base)
    named = {label: names for label, config in experts.items() if (names := label_names(config)) not in (None, ours)}
    kind: Literal["function", "noted"] = "noted" if ours is None and len(set(named.values())) == 1 else "function"
    for label, names in named.items():
        yield ConfigDifference(_LABELS[:1], label, ours or ABSENT, names, kind)


def words_of(label: str) -> str:
    """An input in a sentence."""
    return "the base" if label == "base" else f"expert '{label}'"


def compare_configs(
    base: Mapping[str, Any], experts: Mapping[str, Mapping[str, Any]]
) -> tuple[list[ConfigDifference], Sequence[ConfigReading]]:
    """Differences of the base's config and those of experts by label; and the readings that it took to find them."""
    pairs = [pair for label, config in experts.items() for pair in _pairs(label, base, config)]
    unequal = [p for p in pairs if p.base and p.expert and _is_unsure(p)]
    readings = read_configs([config for p in unequal for config in (p.base, p.expert)])
    differences = [difference for pair in pairs for difference in _unlike_marks(pair)]
    for pair, *both in zip(unequal, readings[::2], readings[1::2], strict=True):
        differences += _unlike_entries(pair, *both)
    return differences, readings


def _problems(
    differences: Sequence[ConfigDifference], readings: Sequence[ConfigReading], fix: str, head: str
) -> list[str]:
    changing, unread = ([d for d in differences if d.kind == kind] for kind in ("function", "unread"))
    obstacles = "; ".join(dict.fromkeys(r.obstacle for r in readings if r.obstacle))
    problems = []
    if changing:
        keep = f". Labels: give experts with one order of them, or keep the base's head (--keep '{head}')"
        problems.append(
            f"config.json: entries that change what the model computes differ: {listed(changing)}. The output has one "
            "config for all weights. Likely cause: training changed the config, or this is not the expert's base. "
            f"Fix: {fix}{keep * any(d.at == _LABELS[:1] for d in changing)}"
        )
    if unread:
        problems.append(
            f"config.json: entries differ, and no class can tell whether they mean the same: {listed(unread)}. "
            f"Cause: {obstacles or 'no installed library has the class of this model'}. Fix: remove the cause, or "
            f"{fix}"
        )
    return problems


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
    """Place and value of what a file says of itself: classes, families of architectures, code, ways to use outputs."""
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        yield (*at, "architectures"), _HEAD.sub("", named[0]) + "*"
    if not at:
        yield ("auto_map",), ", ".join(code_files(config, "AutoModel")) or ABSENT
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _marks(value, (*at, str(key)))
        elif value is not None:
            is_tie = bool(at) and key == TIE  # of a part; that of the whole is compared with its heads
            if is_tie or key in CLASSES or is_usage(key, config.get("model_type")):
                yield (*at, str(key)), value


def _is_unsure(pair: _ConfigPair) -> bool:
    """True if only a class can tell whether two configs mean the same; it gives no meaning to ids that both state."""
    return any(ABSENT in (a, b) or not _NOTED.search(at[-1]) for at, a, b in unequal_entries(pair.base, pair.expert))


def _unlike_marks(pair: _ConfigPair) -> Iterator[ConfigDifference]:
    """Differences that no class needs to be asked about."""
    if not (pair.base and pair.expert):
        base, expert = ("given" if config else ABSENT for config in (pair.base, pair.expert))
        yield from [ConfigDifference(pair.at or ("all",), pair.label, base, expert, "noted")] * (base != expert)
        return
    ours = dict(_marks(pair.base))
    for at, theirs in _marks(pair.expert):
        if not same(base := ours.get(at, ABSENT), theirs) and _has_part(pair.base, at):
            is_other = at[-1] == "architectures" and base != ABSENT
            yield ConfigDifference((*pair.at, *at), pair.label, base, theirs, "function" if is_other else "noted")
    if not _is_unsure(pair):
        for at, a, b in unequal_entries(pair.base, pair.expert):
            yield ConfigDifference((*pair.at, *at), pair.label, a, b, "noted")


def _unlike_entries(pair: _ConfigPair, base: ConfigReading, expert: ConfigReading) -> Iterator[ConfigDifference]:
    """Differences between two configs as their classes read them; as they are written, where these cannot be asked."""
    is_read, is_one_class = bool(base.release and expert.release), pair.classes[0] == pair.classes[1]
    has_no_class = not (is_read or base.obstacle or expert.obstacle)
    undeclared = base.undeclared | expert.undeclared
    written = {at for at, *_ in unequal_entries(pair.base, pair.expert)}
    forms = [_with_sizes(r.values) for r in (base, expert)] if is_read else [pair.base, pair.expert]
    for at, a, b in unequal_entries(*forms):
        is_in_one, is_empty = ABSENT in (a, b), all(v in (ABSENT, None, False) for v in (a, b))
        if is_in_one and not is_one_class and (is_empty or at not in written):
            continue  # nothing, or a default of one class
        if is_usage(at[-1], pair.base.get("model_type")):
            continue  # classes drop some of these, and generation reads the file
        if str(pair.classes[0]).endswith("Scheduler"):
            is_noted = not _TRAINED.search(at[-1])
        else:
            is_noted = (
                bool(ROPE not in at and _NOTED.search(at[-1]))
                or not undeclared.isdisjoint(at[:n] for n in range(1, len(at) + 1))
                or (at[-1].endswith("_config") and (is_in_one or None in (a, b)))  # a part of one model only
                # of one class, or what code that is not read may do by itself
                or (is_in_one and ROPE not in at and (has_no_class or not is_one_class))
            )
        yield ConfigDifference(
            (*pair.at, *at), pair.label, a, b, "noted" if is_noted else "function" if is_read else "unread"
        )


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
    out = dict(config)
    for pair in (p for p in pairs if p.base and p.expert):
        places = [d.at for d in differences if d.label == pair.label and d.at[: len(pair.at)] == pair.at]
        if places:
            keys = {key for at in places for key in (_LABELS if at == _LABELS[:1] else at)}
            others = {k: v for k, v in _entry(out, pair.at).items() if k not in pair.base}
            part = {**others, **_with_entries(pair.base, pair.expert, keys)}
            out = _with_value(out, pair.at, part) if pair.at else part
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
            out[key] = source[key]
    return out


def _by_path(base: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Configs that changed, by their paths in an output; those of a pipeline are in folders."""
    before = base.get(COMPONENTS)
    if not isinstance(before, Mapping):
        return {"config.json": written}
    changed = {f"{name}/config.json": c for name, c in written[COMPONENTS].items() if c != before.get(name)}
    others = {k: c for k, c in written.items() if k != COMPONENTS and isinstance(c, Mapping) and c != base.get(k)}
    return changed | {f"{name}/{SCHEDULER_CONFIG}": c for name, c in others.items()}
