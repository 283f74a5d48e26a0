"""Convert mergekit parameters (levels, filters, gradients) to recipe values.

A parameter is looked up in the source, then its slice, the module, the file; if a list of filters matches no tensor,
the next level applies. Filters are substrings of names. Gradients are interpolated over the layers of one slice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actmat.extras.mergekit.config import ConfigFindings, MergekitConfig, SliceSource

REQUIRED = object()
"""Marks a parameter without a default."""

_LAYER = re.compile(r"(?P<stack>(?:^|\.)(?:layers|layer|h|blocks|block)\.)(?P<number>\d+)(?P<end>\.|$)")
_SPECIAL = re.compile(r"([*?\[\]{}\\])")


@dataclass(frozen=True)
class _ParameterPart:
    """Entries for one slice: filter (None: all tensors) and value, with the first layer in output and source."""

    entries: tuple[tuple[str | None, Any], ...]
    start: int
    stop: int
    offset: int = 0


def _glob(text: str) -> str:
    """Pattern of names that contain this text."""
    return "*" + _SPECIAL.sub(r"\\\1", text) + "*"


@dataclass(frozen=True)
class Parameters:
    """Parameters of a configuration as recipe values.

    Args:
        config: the configuration.
        found: receives problems.
    """

    config: MergekitConfig
    found: ConfigFindings

    def shared(self, name: str, default: Any) -> Any:
        """Value of a merge-wide parameter; filters match the output's names."""
        parts, start = [], 0
        for part in self.config.slices:
            entries = self._levels(name, (part.parameters, *self._common), default, part.path)
            parts.append(_ParameterPart(entries, start, start + part.n_layers))
            start += part.n_layers
        return self._joined(parts)

    def plain(self, name: str, default: Any) -> Any:
        """A number or a switch that must be equal for all tensors."""
        first, *others = _leaves(self.shared(name, default))
        if any(value != first for value in others):
            self.found.problem("parameters", f"'{name}' differs between tensors, which has no counterpart")
        return first

    def own(self, name: str, sources: Sequence[SliceSource | None], default: Any, absent: Any) -> Any:
        """Value of an expert's parameter; filters match the expert's own tensor names.

        Args:
            name: name of the parameter.
            sources: the expert's source per slice; None if it is not in the slice: the value is `absent`.
            default: value if no level has the parameter.
            absent: see `sources`.
        """
        parts, start = [], 0
        for part, source in zip(self.config.slices, sources, strict=True):
            entries: tuple[tuple[str | None, Any], ...] = ((None, absent),)
            offset = 0
            if source is not None:
                levels = (source.parameters, part.parameters, *self._common)
                entries = self._levels(name, levels, default, source.path)
                offset = source.layers[0] - start if source.layers is not None else 0
            parts.append(_ParameterPart(entries, start, start + part.n_layers, offset))
            start += part.n_layers
        last = parts[-1]
        if self._drops_after(sources):
            last = _ParameterPart(((None, absent),), last.start, last.stop)
        return self._joined(parts, last)

    def _drops_after(self, sources: Sequence[SliceSource | None]) -> bool:
        """True if mergekit omits the expert from norm and head.

        There it uses only as many sources of the last slice as the first slice has.
        """
        first, last = self.config.slices[0], self.config.slices[-1]
        source = sources[-1]
        if source is None or len(last.sources) <= len(first.sources):
            return False
        dropped = source not in last.sources[: len(first.sources)]
        if dropped:
            self.found.note(
                f"final norm and head omit {source.model} of the last slice: mergekit uses only as many sources "
                f"there as the first slice has ({len(first.sources)}), which is reproduced"
            )
        return dropped

    @property
    def _common(self) -> tuple[Mapping[str, Any], ...]:
        whole, module = self.config.parameters
        return module, whole

    def _levels(
        self, name: str, levels: Sequence[Mapping[str, Any]], default: Any, path: str
    ) -> tuple[tuple[str | None, Any], ...]:
        """Entries of all levels, highest priority first, up to the first that matches every tensor."""
        out: list[tuple[str | None, Any]] = []
        for level in levels:
            if level.get(name) is None:
                continue
            for text, value in self._entries(name, level[name], path):
                out.append((text, value))
                if text is None:
                    return tuple(out)
        if default is REQUIRED:
            open_end = ", and its filters leave some without: end them with '- value: ...'" if out else ""
            self.found.problem(path, f"method '{self.config.method}' needs '{name}' for every tensor{open_end}")
            return (*out, (None, 0.0))
        return (*out, (None, default))

    def _entries(self, name: str, value: Any, path: str) -> list[tuple[str | None, Any]]:
        if isinstance(value, Mapping):
            value = [value]
        if isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
            entries = []
            for entry in value:
                text = entry.get("filter")
                every = text in (None, "", "*")
                entries.append((None if every else str(text), self._scalars(name, entry.get("value"), path)))
            return entries
        return [(None, self._scalars(name, value, path))]

    def _scalars(self, name: str, value: Any, path: str) -> Any:
        """A scalar, or a gradient (a list of scalars; a list of one becomes the scalar)."""
        listed = value if isinstance(value, list) else [value]
        read = [_number(v) for v in listed]
        if not read or any(v is None for v in read):
            self.found.problem(
                f"{path}.parameters.{name}", f"expected a number or a list of numbers, found {str(value)[:80]!r}"
            )
            return 0.0
        return read if len(read) > 1 else read[0]

    def _joined(self, parts: Sequence[_ParameterPart], last: _ParameterPart | None = None) -> Any:
        """Combine the parts into one value for all slices."""
        last = last or parts[-1]
        alike = len({str(p.entries) for p in (*parts, last)}) == 1
        moved = any(p.offset and any(_LAYER.search(text or "") for text, _ in p.entries) for p in parts)
        gradients = any(isinstance(v, list) for p in parts for _, v in p.entries)
        if alike and not moved and (len(parts) == 1 or not gradients):
            return _value([_entry(text, value) for text, value in parts[0].entries])
        out = [_entry(text, _first(value), "before") for text, value in _of_all(parts[0].entries)]
        for part in parts:
            out += [e for text, value in part.entries for e in _of_layers(part, text, value)]
        return out + [_entry(text, _first(value), "after") for text, value in _of_all(last.entries)]


def _of_all(entries: Sequence[tuple[str | None, Any]]) -> list[tuple[str | None, Any]]:
    """Entries that can match a tensor outside all layers."""
    return [(text, value) for text, value in entries if not _LAYER.search(text or "")]


def _of_layers(part: _ParameterPart, text: str | None, value: Any) -> list[dict[str, Any]]:
    """Entries for the layers of a slice; layer numbers in filters are mapped from source to output."""
    match = _LAYER.search(text or "")
    if not part.offset or text is None or match is None:
        return [_entry(text, value, [part.start, part.stop])]
    out = []
    for layer in range(part.start, part.stop):
        source = str(layer + part.offset)
        whole = match["end"] == "."
        if source == match["number"] if whole else source.startswith(match["number"]):
            here = f"{text[: match.start('number')]}{layer}."
            rest = text[match.end() :] if whole else ""
            out.append(_entry(here + rest, _at(value, layer - part.start, part.stop - part.start), [layer, layer + 1]))
    return out


def _entry(text: str | None, value: Any, layers: Any = None) -> dict[str, Any]:
    match = {} if text is None else {"match": _glob(text)}
    return match | ({} if layers is None else {"layers": layers}) | {"value": value}


def _value(entries: list[dict[str, Any]]) -> Any:
    """The entries, or the first value if it matches every tensor."""
    return entries[0]["value"] if "match" not in entries[0] else entries


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _at(value: Any, layer: int, count: int) -> Any:
    """Interpolate a gradient at one layer of a slice."""
    if not isinstance(value, list):
        return value
    x = (layer / (count - 1) if count > 1 else 1.0) * (len(value) - 1)
    low = min(math.floor(x), len(value) - 1)
    return (1 - (x - low)) * value[low] + (x - low) * value[min(low + 1, len(value) - 1)]


def _number(value: Any) -> Any:
    """A number or a boolean, also from numeric text; None for anything else."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return value if isinstance(value, bool | int | float) else None


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [leaf for v in value for leaf in _leaves(v["value"] if isinstance(v, Mapping) else v)]
    return [value]
