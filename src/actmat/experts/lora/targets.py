"""The modules of a model that PEFT adapts, as the config of an adapter names them.

PEFT builds factors for these modules only, and ignores others in the file without a word. Of several numbers in a name,
as T5 has them, `layers_to_transform` is about the first one, until PEFT 0.19 about the last one; with
`ensure_weight_tying`, PEFT 0.19 adapts table and head if one is named: files of all these versions are read.

Source: PEFT (https://github.com/huggingface/peft), `check_target_module_exists`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from actmat.checkpoints.folder import ADAPTER_CONFIG
from actmat.errors import first_names
from actmat.layout.patterns import MatchError, Regex
from actmat.layout.ties import is_output_head, is_token_table


class Targets:
    """Selection of modules by the fields of an adapter's config; `problem` is a pattern that cannot be matched."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.problem = ""
        self._targeted, self._excluded = (self._names(f, fields.get(f)) for f in ("target_modules", "exclude_modules"))
        of_layers = ("modules_to_save", "layers_to_transform", "layers_pattern")
        self._saved, self._layers, self._lists = (_listed(fields.get(f)) for f in of_layers)
        self._adds_tied = bool(fields.get("ensure_weight_tying"))

    def _names(self, field: str, value: Any) -> frozenset[str] | Regex:
        """Ends of names, or a pattern; none if the field leaves the choice to PEFT."""
        try:
            if isinstance(value, str) and value.lower() != "all-linear":
                return Regex(value)
        except MatchError as error:
            self.problem = f"{field} of {ADAPTER_CONFIG} is not a pattern that can be matched: {error}"
        return frozenset(map(str, value)) if isinstance(value, list | tuple) else frozenset()

    def has(self, module: str) -> bool:
        """True for a module that `target_modules` names, in whichever layer."""
        return _matches(self._targeted, module)

    def _ignored_by(self, module: str) -> str:
        """The field for which PEFT does not adapt a module; empty for a module that it adapts."""
        if _matches(self._excluded, module):
            return "exclude_modules"
        if any(f".{name}." in f".{module}." for name in self._saved):
            return "modules_to_save"
        if self._targeted and not self.has(module):
            is_tied = is_token_table(f"{module}.weight") or is_output_head(f"{module}.weight")
            return "" if self._adds_tied and is_tied else "target_modules"
        if not self._layers or isinstance(self._targeted, Regex) or module in self._targeted:
            return ""
        parts, first = module.split("."), 1 if self._lists else 2
        pairs = zip(parts[first - 1 :], parts[first:-1], strict=False)
        numbers = [int(n) for above, n in pairs if n.isdecimal() and (above in self._lists or not self._lists)]
        return "" if any(n in self._layers for n in (*numbers[:1], *numbers[-1:])) else "layers_to_transform"

    def problems(self, modules: Iterable[str]) -> list[str]:
        """One sentence for each field by which PEFT ignores some of these modules, which have factors."""
        ignored: dict[str, list[str]] = {}
        for module in modules:
            ignored.setdefault(self._ignored_by(module), []).append(module)
        return [
            f"{field} leaves out {len(names)} modules that have factors in the file: "
            f"{first_names(names)}. PEFT ignores their factors. Likely cause: a config that was edited, or that of "
            "another adapter. Fix: correct the field, or remove the factors"
            for field, names in ignored.items()
            if field
        ]


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else () if value in (None, "") else (value,)


def _matches(names: frozenset[str] | Regex, module: str) -> bool:
    if isinstance(names, Regex):
        return names.matches(module)
    return any(module[i:] in names for i in (0, *(i + 1 for i, c in enumerate(module) if c == ".")))
