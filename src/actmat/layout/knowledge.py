"""What the config says about the part of the model that a tensor belongs to.

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

__all__ = ["Knowledge", "Towers", "text_config_of"]

Config = Mapping[str, Any]

_TEXT_KEYS = ("text_config", "llm_config", "language_config", "decoder")
_TOWERS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("vision_config", re.compile(r"(?:^|\.)(?:visual|vision\w*|image_encoder|vit)\.")),
    ("audio_config", re.compile(r"(?:^|\.)(?:audio\w*|speech_encoder)\.")),
)


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Config numbers and family exceptions that hold for one tower.

    Args:
        config: the tower's config, completed by the entries of the config around it.
        family: its exceptions (none for a family without an entry).
        listed: whether `families.FAMILIES` has an entry, that is, whether `family` may be trusted to be complete.
    """

    config: Config
    family: Family = NO_EXCEPTIONS
    listed: bool = False

    @property
    def hidden(self) -> int | None:
        """Width of the residual stream, where the config tells."""
        return first_int(self.config, "hidden_size", "d_model", "n_embd")


class Towers:
    """The knowledge about each tower of a model, looked up by tensor name."""

    def __init__(self, config: Config | None) -> None:
        top: Config = config or {}
        self.text = _knowledge(top, text_config_of(top))
        self.others = [
            (pattern, _knowledge({}, sub)) for key, pattern in _TOWERS if isinstance(sub := _nested(top, key), Mapping)
        ]

    def of(self, name: str) -> Knowledge:
        """What is known about the tower of the tensor `name`."""
        for pattern, knowledge in self.others:
            if pattern.search(name):
                return knowledge
        return self.text


def text_config_of(config: Config) -> Config | None:
    """The nested config of the language model, if there is one."""
    for key in _TEXT_KEYS:
        sub = _nested(config, key)
        if isinstance(sub, Mapping):
            return sub
    return None


def _nested(config: Config, key: str) -> Any:
    """`config[key]`, also below the `thinker_config` of the omni models."""
    if key in config:
        return config[key]
    thinker = config.get("thinker_config")
    return thinker.get(key) if isinstance(thinker, Mapping) else None


def _knowledge(outer: Config, inner: Config | None) -> Knowledge:
    for config in (inner, outer):
        family = FAMILIES.get(recognise(config) or "")
        if family is not None:
            return Knowledge({**outer, **(inner or {})}, family, listed=True)
    return Knowledge({**outer, **(inner or {})})
