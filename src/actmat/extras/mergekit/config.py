"""Structure of a mergekit configuration, and its problems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actmat.errors import did_you_mean

FILES = ("tokenizer_source", "tokenizer", "chat_template")
TOP = ("merge_method", "base_model", "models", "slices", "modules", "parameters", "dtype", "out_dtype", *FILES)
IGNORED = ("name", "random_seed")
MODEL, SOURCE = ("model", "parameters"), ("model", "layer_range", "parameters")
SLICE, MODULE = ("sources", "base_model", "parameters"), ("slices", "models", "parameters")
TOKENIZER, TOKEN = ("source", "tokens", "pad_to_multiple_of"), ("source", "force")
TOKEN_SOURCE = ("kind", "model", "token", "token_id")
FORMS = ("models", "slices", "modules")


@dataclass
class ConfigFindings:
    """Problems, notes and warnings of one conversion.

    Args:
        where: dotted field path -> "file:line".
    """

    where: Mapping[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def problem(self, path: str, text: str) -> None:
        """Add a problem for a field."""
        self.problems.append(self._at(path, text))

    def note(self, text: str, *, warns: bool = False) -> None:
        """Add a note or a warning, once."""
        known = self.warnings if warns else self.notes
        if text not in known:
            known.append(text)

    def remarks(self, kind: str) -> dict[str, list[str]]:
        """Fields of the recipe, with a first note on the kind of the file."""
        return {"notes": [kind, *self.notes], **({"warnings": self.warnings} if self.warnings else {})}

    def ignored(self, path: str, keys: Iterable[str], known: Sequence[str]) -> None:
        """Add notes on keys that mergekit does not read."""
        for key in keys:
            if key not in known:
                at = f"{path}." if path else ""
                hint = did_you_mean(key, known)
                self.note(f"'{at}{key}' is ignored, as mergekit ignores it.{hint}", warns=bool(hint))

    def _at(self, path: str, text: str) -> str:
        parts = path.split(".")
        place = next((self.where[p] for n in range(len(parts), 0, -1) if (p := ".".join(parts[:n])) in self.where), "")
        said = f"{path}: {text}" if path else text
        return f"{place}: {said}" if place else said


@dataclass(frozen=True)
class SliceSource:
    """One model of a slice; `layers` None means all layers, `path` is its field path in the file."""

    model: str
    layers: tuple[int, int] | None
    parameters: Mapping[str, Any]
    path: str


@dataclass(frozen=True)
class ConfigSlice:
    """Models merged layer by layer into consecutive layers of the output."""

    sources: tuple[SliceSource, ...]
    parameters: Mapping[str, Any]
    base: str | None
    path: str

    @property
    def n_layers(self) -> int:
        """Number of layers; 0 if not given."""
        layers = self.sources[0].layers if self.sources else None
        return layers[1] - layers[0] if layers else 0


@dataclass(frozen=True)
class MergekitConfig:
    """A configuration with a valid structure.

    Args:
        method: mergekit's method name.
        base: `base_model`.
        slices: for the form `models`, one slice without layer ranges.
        parameters: global parameters, overridden by those of the module.
        rest: the other top-level fields.
    """

    method: str
    base: str | None
    slices: tuple[ConfigSlice, ...]
    parameters: tuple[Mapping[str, Any], Mapping[str, Any]]
    rest: Mapping[str, Any]

    @property
    def is_stacked(self) -> bool:
        """True for the form `slices`."""
        return any(s.layers is not None for part in self.slices for s in part.sources)


def read_config(data: Mapping[str, Any], findings: ConfigFindings) -> MergekitConfig | None:
    """Read the structure of a configuration; None if invalid, with the reason among the problems."""
    findings.ignored("", data, (*TOP, *IGNORED))
    for key in IGNORED:
        if key in data:
            findings.note(f"'{key}' is ignored, as mergekit ignores it in the file; 'seed' is the recipe's seed")
    forms = [f for f in FORMS if data.get(f) is not None]
    if len(forms) != 1:
        findings.problem(
            "", f"expected exactly one of 'models', 'slices' and 'modules', found {' and '.join(forms) or 'none'}"
        )
        return None
    base = model_at(data.get("base_model"), "base_model", findings) if data.get("base_model") is not None else None
    whole: Mapping[str, Any] = data
    module_parameters: Mapping[str, Any] = {}
    prefix = ""
    if forms == ["modules"]:
        modules = data["modules"]
        if not isinstance(modules, Mapping) or len(modules) != 1:
            findings.problem("modules", "models with several modules have no counterpart; merge each module separately")
            return None
        ((name, whole),) = modules.items()
        prefix = f"modules.{name}."
        if not isinstance(whole, Mapping) or len([f for f in FORMS[:2] if whole.get(f) is not None]) != 1:
            findings.problem(prefix[:-1], "expected exactly one of 'models' and 'slices'")
            return None
        findings.ignored(prefix[:-1], whole, MODULE)
        module_parameters = _parameters(whole, prefix[:-1], findings)
    if whole.get("models") is not None:
        slices = [_slice_of_models(whole["models"], base, f"{prefix}models", findings)]
    else:
        slices = _slices(whole["slices"], f"{prefix}slices", findings)
    levels = (_parameters(data, "", findings), module_parameters)
    return MergekitConfig(str(data["merge_method"]), base, tuple(s for s in slices if s), levels, data)


def _slice_of_models(listed: Any, base: str | None, path: str, findings: ConfigFindings) -> ConfigSlice | None:
    """A slice of all layers of all models; an unlisted base model is appended, as in mergekit."""
    sources = [_source(m, f"{path}.{i}", MODEL, findings) for i, m in enumerate(list_at(listed, path, findings))]
    known = [s for s in sources if s is not None]
    if base is not None and base not in [s.model for s in known]:
        known.append(SliceSource(base, None, {}, "base_model"))
    return _checked(ConfigSlice(tuple(known), {}, None, path), findings)


def _slices(listed: Any, path: str, findings: ConfigFindings) -> list[ConfigSlice | None]:
    out: list[ConfigSlice | None] = []
    for i, entry in enumerate(list_at(listed, path, findings)):
        at = f"{path}.{i}"
        if not isinstance(entry, Mapping):
            findings.problem(at, "expected a mapping with 'sources'")
            continue
        findings.ignored(at, entry, SLICE)
        listed_sources = list_at(entry.get("sources"), f"{at}.sources", findings)
        sources = [_source(s, f"{at}.sources.{k}", SOURCE, findings) for k, s in enumerate(listed_sources)]
        base = (
            model_at(entry["base_model"], f"{at}.base_model", findings) if entry.get("base_model") is not None else None
        )
        known = tuple(s for s in sources if s is not None)
        out.append(_checked(ConfigSlice(known, _parameters(entry, at, findings), base, at), findings))
    return out


def _checked(part: ConfigSlice, findings: ConfigFindings) -> ConfigSlice | None:
    models = [s.model for s in part.sources]
    if twice := sorted({m for m in models if models.count(m) > 1}):
        findings.problem(part.path, f"{', '.join(twice)} is listed twice; a model may appear once per slice")
    lengths = {s.layers[1] - s.layers[0] for s in part.sources if s.layers is not None}
    if len(lengths) > 1:
        listed = ", ".join(f"{s.model} {list(s.layers)}" for s in part.sources if s.layers is not None)
        findings.problem(part.path, f"all sources of a slice need the same number of layers; found {listed}")
    return part if part.sources else None


def _source(data: Any, path: str, known: Sequence[str], findings: ConfigFindings) -> SliceSource | None:
    if not isinstance(data, Mapping) or "model" not in data:
        findings.problem(path, "expected a mapping with 'model'")
        return None
    findings.ignored(path, data, known)
    layers = None
    if "layer_range" in known:
        layers = _range(data.get("layer_range"), path, findings)
        if layers is None:
            return None
    return SliceSource(
        model_at(data["model"], f"{path}.model", findings), layers, _parameters(data, path, findings), path
    )


def _range(value: Any, path: str, findings: ConfigFindings) -> tuple[int, int] | None:
    pair = value if isinstance(value, list | tuple) else []
    whole = [v for v in pair if isinstance(v, int) and not isinstance(v, bool)]
    if len(pair) != 2 or len(whole) != 2 or not 0 <= whole[0] < whole[1]:
        findings.problem(path, f"expected 'layer_range: [first, end]', the end is excluded; found {str(value)[:80]!r}")
        return None
    return whole[0], whole[1]


def model_at(value: Any, path: str, findings: ConfigFindings) -> str:
    """Location of a model, `MODEL+ADAPTER`; mergekit also accepts mappings with `path` and `revision`."""
    if isinstance(value, Mapping) and value.get("model") is not None:
        named = [_path(value["model"]), *([_path(value["lora"])] if value.get("lora") is not None else [])]
        value = "+".join(named) if all(isinstance(n, str) for n in named) else value
    value = _path(value)
    if not isinstance(value, str) or not value.strip():
        findings.problem(path, f"expected the path or hub id of a model, found {str(value)[:80]!r}")
        return ""
    return value.strip()


def _path(value: Any) -> Any:
    """Text form of a mapping with path and revision; other values are returned unchanged."""
    if isinstance(value, Mapping) and isinstance(value.get("path"), str) and set(value) <= {"path", "revision"}:
        return value["path"] + (f"@{value['revision']}" if value.get("revision") else "")
    return value


def _parameters(data: Mapping[str, Any], path: str, findings: ConfigFindings) -> Mapping[str, Any]:
    value = data.get("parameters") or {}
    if not isinstance(value, Mapping):
        findings.problem(f"{path}.parameters" if path else "parameters", "expected a mapping of names to values")
        return {}
    return value


def list_at(value: Any, path: str, findings: ConfigFindings) -> list[Any]:
    """A list with at least one entry; anything else gives an empty list and a problem."""
    if isinstance(value, list) and value:
        return value
    findings.problem(path, f"expected a list with at least one entry, found {str(value)[:80]!r}")
    return []
