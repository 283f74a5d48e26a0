"""Convert a mergekit configuration to recipe fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from actmat.errors import RecipeError, did_you_mean
from actmat.extras.mergekit.config import (
    TOKEN,
    TOKEN_SOURCE,
    TOKENIZER,
    ConfigFindings,
    ConfigSlice,
    MergekitConfig,
    SliceSource,
    read_config,
)
from actmat.extras.mergekit.methods import METHODS, Arrangement, Method, MethodMapping
from actmat.extras.mergekit.parameters import Parameters
from actmat.recipe.experts import RESERVED, ExpertRef

DTYPES = ("float64", "float32", "bfloat16", "float16")


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
    "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Chat template of the form ChatML."""


def is_mergekit(data: Mapping[str, Any]) -> bool:
    """True if the data is a configuration of mergekit, or of mergekit-moe, which `convert` refuses.

    >>> is_mergekit({"merge_method": "slerp"}), is_mergekit({"method": "slerp"})
    (True, False)
    """
    experts = data.get("experts")
    listed = [e for e in experts if isinstance(e, Mapping)] if isinstance(experts, list) else []
    return "merge_method" in data or "gate_mode" in data or any("source_model" in e for e in listed)


def convert(data: Mapping[str, Any], where: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Fields of the recipe equivalent to a mergekit configuration; remarks are in its `notes`.

    >>> fields = convert({"merge_method": "slerp", "base_model": "a", "models": [{"model": "a"}, {"model": "b"}],
    ...                   "parameters": {"t": [0, 1]}})
    >>> fields["base"], fields["experts"], fields["method"], fields["options"]
    ('a', [{'path': 'b'}], 'slerp', {'t': [0, 1]})

    Args:
        data: the configuration as plain data.
        where: dotted field path -> "file:line", for messages.

    Raises:
        RecipeError: fields without a counterpart, or invalid also in mergekit; lists all.
    """
    findings = ConfigFindings(where or {})
    fields: dict[str, Any] = {}
    if "merge_method" not in data:
        findings.problem(
            "",
            "a configuration of mergekit-moe puts models behind a router and merges no weights. Fix: build the mixture "
            "with 'mergekit-moe CONFIG OUT'; actmat merges such models like any others",
        )
    else:
        method = _method(str(data["merge_method"]), findings)
        config = read_config(data, findings)
        if config is not None and config.slices and method is not None and not findings.problems:
            fields = _RecipeConversion(config, method, findings).fields()
    if findings.problems:
        n = len(findings.problems)
        raise RecipeError(
            f"The mergekit configuration cannot be converted: {n} problem{'s' * (n > 1)}.",
            dict.fromkeys([*findings.problems, *findings.warnings]),
        )
    return fields


def _method(name: str, findings: ConfigFindings) -> Method | None:
    if name in METHODS:
        return METHODS[name]
    findings.problem(
        "merge_method", f"mergekit has no method '{name}'.{did_you_mean(name, METHODS)} Known: {', '.join(METHODS)}"
    )
    return None


@dataclass
class _RecipeConversion:
    """Conversion of one configuration."""

    config: MergekitConfig
    method: Method
    found: ConfigFindings

    def fields(self) -> dict[str, Any]:
        """Fields of the recipe, in the usual order."""
        self._check_parameters()
        pairs = [self._arranged(part) for part in self.config.slices]
        if self.found.problems:
            return {}
        n_experts = max(len(experts) for _, experts in pairs)
        rows = [[experts[k] if k < len(experts) else None for _, experts in pairs] for k in range(n_experts)]
        if any(None in row for row in rows) and not self.method.weighted:
            self.found.problem(
                "slices", f"slices with different numbers of models have no counterpart for '{self.name}'"
            )
            return {}
        choice = self.method.convert(Arrangement(rows, Parameters(self.config, self.found)))
        if self.config.is_stacked and len(self.config.slices) > 1:
            self.found.note("embeddings are those of the first slice, final norm and head those of the last")
        out: dict[str, Any] = {"base": self._location([base for base, _ in pairs])}
        out |= {"experts": self._experts(rows, [base for base, _ in pairs], choice)}
        out |= {"method": choice.method}
        if choice.options and out["experts"]:
            out["options"] = choice.options
        out |= {"normalize": True} if choice.normalize else {}
        out |= {"scale": choice.scale} if choice.scale != 1.0 else {}
        out["scope"] = "all"
        own = [ExpertRef.model_validate(e).label for e in out["experts"] if e["path"] == out["base"]]
        out |= {"measured_from": own[0]} if own else {}  # without a base, the first model stands in for it
        if not out["experts"]:
            del out["experts"], out["method"]
        out |= self._dtypes() | self._files(out.get("experts", []))
        return out | self.found.remarks(f"converted from a mergekit configuration ({self.name})")

    @property
    def name(self) -> str:
        """mergekit's name of the method."""
        return self.config.method

    def _arranged(self, part: ConfigSlice) -> tuple[SliceSource, list[SliceSource]]:
        """Base and experts of a slice."""
        sources = list(part.sources)
        count = self.method.models
        wanted = part.base or self.config.base
        of_base = next((s for s in sources if s.model == wanted), None)
        has_base = self.method.needs_base or (self.method.takes_base and wanted is not None)
        if has_base and of_base is None:
            what = f"'{wanted}' is not a source of this slice" if wanted else "it is missing"
            self.found.problem(part.path, f"method '{self.name}' needs a base model: {what}; name one ('base_model')")
            return sources[0], sources[1:]
        if count is not None and len(sources) - (has_base and self.method.takes_base) != count:
            listed = ", ".join(s.model for s in sources)
            base = ", including the base model" if self.method.needs_base else ""
            self.found.problem(
                part.path, f"method '{self.name}' takes exactly {count} model(s){base}; found {len(sources)}: {listed}"
            )
        if has_base and of_base is not None:
            return of_base, [s for s in sources if s is not of_base]
        plain = [s for s in sources if "+" not in s.model]
        return of_base or (plain or sources)[0], sources

    def _location(self, sources: Sequence[SliceSource]) -> str:
        """A model, or a stack of layers of models."""
        if not self.config.is_stacked:
            return sources[0].model
        parts: list[tuple[str, int, int]] = []
        for source in sources:
            assert source.layers is not None
            start, stop = source.layers
            if parts and parts[-1][0] == source.model and parts[-1][2] == start:
                parts[-1] = (source.model, parts[-1][1], stop)
            else:
                parts.append((source.model, start, stop))
        return " + ".join(f"{m}[{a}:{b}]" for m, a, b in parts)

    def _experts(
        self, rows: Sequence[Sequence[SliceSource | None]], bases: Sequence[SliceSource], choice: MethodMapping
    ) -> list[dict[str, Any]]:
        """The experts with their weights and options; empty if the base is only copied."""
        if self.name == "passthrough" and not choice.weights:
            return [] if self.config.is_stacked else [{"path": bases[0].model, "name": "copy"}]
        out, names = [], set[str]()
        for k, row in enumerate(rows):
            filled = [base if s is None else s for s, base in zip(row, bases, strict=True)]
            adapter = None if self.config.is_stacked else _adapter(filled[0], bases[0])
            expert: dict[str, Any] = {"path": adapter or self._location(filled)}
            models = dict.fromkeys(_name(s.model) for s in filled)
            label, plain = "+".join(models), "+".join(models)
            while label in names or label in RESERVED:
                label = f"{plain}-{len(names) + 1}"
            names.add(label)
            if label != plain:
                expert["name"] = label
            if choice.weights and choice.weights[k] != 1.0:
                expert["weight"] = choice.weights[k]
            if of_model := {n: values[k] for n, values in choice.own.items()}:
                expert["options"] = of_model
            out.append(expert)
        return out

    def _dtypes(self) -> dict[str, Any]:
        """Dtypes of the output and of the computation."""
        names = {}
        for key in ("dtype", "out_dtype"):
            text = self.config.rest.get(key)
            name = str(text).removeprefix("torch.") if text is not None else None
            if name is not None and name not in DTYPES:
                self.found.problem(key, f"expected one of {', '.join(DTYPES)}, found '{text}'")
            names[key] = name
        if names["dtype"] in ("bfloat16", "float16"):
            self.found.note(
                f"computed in float32 and rounded to {names['out_dtype'] or names['dtype']} once; most of mergekit's "
                f"methods compute in {names['dtype']}"
            )
        written = names["out_dtype"] or names["dtype"]
        out = {} if written is None else {"dtype": written}
        return out | ({"compute_dtype": "float64"} if names["dtype"] == "float64" else {})

    def _files(self, experts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Fields of the vocabulary and the chat template."""
        vocabulary, template = self._tokens(experts), self._template()
        if template is None:
            return vocabulary
        return {**vocabulary, "output": {"kind": "model", **vocabulary.get("output", {}), "chat_template": template}}

    def _template(self) -> str | None:
        """Jinja text of the chat template; None for that of the tokenizer's files."""
        named = self.config.rest.get("chat_template")
        if named in (None, "auto"):
            return named
        text = CHATML if named == "chatml" else str(named)
        if "{" not in text:
            self.found.problem("chat_template", f"expected Jinja text, chatml or auto, found {text[:80]!r}")
        return text

    def _tokens(self, experts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Fields of the vocabulary."""
        rest = self.config.rest
        tokenizer = rest.get("tokenizer")
        if tokenizer is not None and rest.get("tokenizer_source") is not None:
            self.found.problem("tokenizer", "'tokenizer' and 'tokenizer_source' are both given; use only one")
        source = rest.get("tokenizer_source")
        if tokenizer is not None and not isinstance(tokenizer, Mapping):
            self.found.problem("tokenizer", f"expected a mapping with 'source', found {str(tokenizer)[:80]!r}")
        if not isinstance(tokenizer, Mapping):
            return {} if source is None else _vocabulary(self._tokens_of(str(source), "tokenizer_source", experts))
        self.found.ignored("tokenizer", tokenizer, TOKENIZER)
        vocabulary: dict[str, Any] = {
            "source": self._tokens_of(str(tokenizer.get("source", "union")), "tokenizer.source", experts)
        }
        if tokenizer.get("pad_to_multiple_of"):
            vocabulary["pad_to_multiple_of"] = tokenizer["pad_to_multiple_of"]
        tokens = tokenizer.get("tokens") or {}
        if not isinstance(tokens, Mapping):
            self.found.problem("tokenizer.tokens", f"expected a mapping of tokens, found {str(tokens)[:80]!r}")
            tokens = {}
        rows = {str(t): self._row(str(t), entry, experts) for t, entry in tokens.items()}
        return _vocabulary(vocabulary | ({"tokens": rows} if rows else {}))

    def _row(self, token: str, entry: Any, experts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Source row of one token: from a model, zeros, or another token of a model."""
        path = f"tokenizer.tokens.{token}"
        source = entry.get("source") if isinstance(entry, Mapping) else None
        self.found.ignored(path, entry if isinstance(entry, Mapping) else (), TOKEN)
        self.found.ignored(f"{path}.source", source if isinstance(source, Mapping) else (), TOKEN_SOURCE)
        row: dict[str, Any] = {}
        if isinstance(source, str):
            row = {"model": self._tokens_of(source, path, experts)}
        elif isinstance(source, Mapping) and source.get("kind") == "model_token":
            row = {"model": self._tokens_of(str(source.get("model")), path, experts)}
            row |= {k: source[k] for k in ("token", "token_id") if source.get(k) is not None}
        elif not isinstance(source, Mapping) or source.get("kind") != "zero":
            self.found.problem(path, "expected 'source': a model, {kind: zero} or {kind: model_token, model, token}")
        return row | ({"force": True} if isinstance(entry, Mapping) and entry.get("force") else {})

    def _tokens_of(self, model: str, path: str, experts: Sequence[Mapping[str, Any]]) -> str:
        """Name of a model in the recipe: `base`, `union` or an expert's name."""
        bases = {self.config.base, *(s.base for s in self.config.slices)}
        if model in ("base", "union") or model in bases:
            return model if model in ("base", "union") else "base"
        for expert in experts:
            if expert["path"] == model:
                return str(expert.get("name") or _name(model))
        self.found.problem(path, f"'{model}' is not one of the merged models")
        return "base"

    def _check_parameters(self) -> None:
        """Add notes on parameters that this method does not read."""
        config = self.config
        places = [("", config.parameters[0]), ("modules", config.parameters[1])]
        places += [(part.path, part.parameters) for part in config.slices]
        places += [(s.path, s.parameters) for part in config.slices for s in part.sources]
        of_models = ("weight", "density", "gamma", "epsilon", "scale")
        for path, parameters in places:
            in_source = any(path == s.path for part in config.slices for s in part.sources)
            known = [n for n in self.method.reads if not in_source or n in of_models]
            self.found.ignored(f"{path}.parameters" if path else "parameters", parameters, known)
            if "int8_mask" in parameters:
                self.found.note("'int8_mask' saves memory in mergekit and does not change values; it is ignored")


def _adapter(source: SliceSource, base: SliceSource) -> str | None:
    """Location of the adapter if an expert is the base plus an adapter, so that only factors are read."""
    model, plus, adapter = source.model.partition("+")
    return adapter if plus and model == base.model else None


def _name(model: str) -> str:
    """Short name of a model: the last part of its path or its adapter's path."""
    text = model.rpartition("+")[2].partition("@")[0]
    return PurePath(text).name or text


def _vocabulary(chosen: str | Mapping[str, Any]) -> dict[str, Any]:
    """Output fields with this vocabulary."""
    return {"output": {"kind": "model", "vocabulary": chosen}}
