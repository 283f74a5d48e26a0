"""Config and architecture family of the tower (text, vision, audio) that a tensor belongs to.

Multimodal configs nest one config per tower (`vision_config`, `audio_config`, `text_config`); the head counts that
split a packed projection must come from the right one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actmat.layout.families import FAMILIES, NO_EXCEPTIONS, Family, recognise
from actmat.layout.packing import first_int

__all__ = ["Tower", "Towers", "text_config_of"]

Config = Mapping[str, Any]

_TEXT_KEYS = ("text_config", "llm_config", "language_config", "decoder")
_TOWERS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("vision_config", re.compile(r"(?:^|\.)(?:visual|vision\w*|image_encoder|vit)\.")),
    ("audio_config", re.compile(r"(?:^|\.)(?:audio\w*|speech_encoder)\.")),
)


@dataclass(frozen=True, slots=True)
class Tower:
    """One tower of a model."""

    config: Config  # its config, completed by the entries of the enclosing config
    family: Family = NO_EXCEPTIONS  # the exceptions of its family (none for a family without an entry)
    listed: bool = False  # True if `families.FAMILIES` has an entry, so that `family` is complete

    @property
    def hidden(self) -> int | None:
        """Width of the residual stream, if the config has it."""
        return first_int(self.config, "hidden_size", "d_model", "n_embd")


class Towers:
    """The towers of a model, looked up by tensor name."""

    def __init__(self, config: Config | None) -> None:
        top: Config = config or {}
        self._text = _tower(top, text_config_of(top))
        self._others = [
            (pattern, _tower({}, sub)) for key, pattern in _TOWERS if isinstance(sub := _nested(top, key), Mapping)
        ]

    def of(self, name: str) -> Tower:
        """The tower of the tensor `name`."""
        return next((tower for pattern, tower in self._others if pattern.search(name)), self._text)


def text_config_of(config: Config) -> Config | None:
    """The nested config of the language model, if there is one."""
    return next((sub for key in _TEXT_KEYS if isinstance(sub := _nested(config, key), Mapping)), None)


def _nested(config: Config, key: str) -> Any:
    """`config[key]`, also below the `thinker_config` of the omni models."""
    if key in config:
        return config[key]
    thinker = config.get("thinker_config")
    return thinker.get(key) if isinstance(thinker, Mapping) else None


def _tower(outer: Config, inner: Config | None) -> Tower:
    for config in (inner, outer):
        family = FAMILIES.get(recognise(config) or "")
        if family is not None:
            return Tower({**outer, **(inner or {})}, family, listed=True)
    return Tower({**outer, **(inner or {})})
