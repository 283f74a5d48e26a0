"""Configs as their own classes of transformers and diffusers read them, where these are installed.

A class fills in what a config leaves out and turns older spellings into its own, so that two configs which it reads
alike mean the same. `reader` is the program that asks it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actmat.identity import reader

SECONDS = 120
"""Time for the configs of a merge on a busy machine, where the process is not stopped by `reader.MOST_SECONDS`."""


@dataclass(frozen=True, slots=True)
class ConfigReading:
    """A config as its class reads it.

    Args:
        values: all its entries.
        undeclared: places of entries that the class keeps and does not know.
        float32: parts of names, as regular expressions, of tensors that it keeps in float32 in a coarser dtype, and
            whether also in bfloat16.
        release: of the library with the class; empty if the config was not read.
        obstacle: why its class could not read it; empty if no library has its class.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    undeclared: frozenset[tuple[str, ...]] = frozenset()
    float32: tuple[tuple[str, bool], ...] = ()
    release: str = ""
    obstacle: str = ""


MOST_READINGS = 256
_readings: dict[str, ConfigReading] = {}
"""Config in JSON -> its reading."""


def read_configs(configs: Sequence[Mapping[str, Any]]) -> list[ConfigReading]:
    """The configs as the classes that they name read them; those that were not read before in one process.

    >>> read_configs([{"hidden_size": 8}])
    [ConfigReading(values={}, undeclared=frozenset(), float32=(), release='', obstacle='')]
    """
    texts = [json.dumps(config, default=str) for config in configs]
    if len(_readings) > MOST_READINGS:
        _readings.clear()
    missing = [text for text in dict.fromkeys(texts) if text not in _readings]
    answers, obstacle = _ask(missing)
    for text, answer in zip(missing, answers, strict=False):
        places, float32 = (map(tuple, answer.pop(key, ())) for key in ("undeclared", "float32"))
        _readings[text] = ConfigReading(undeclared=frozenset(places), float32=tuple(float32), **answer)
    return [_readings.get(text, ConfigReading(obstacle=obstacle)) for text in texts]


def _ask(texts: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
    """The reader's answers on configs in JSON, and why there is none on the later ones, if it had to be stopped."""
    if not texts:
        return [], ""
    obstacle = (
        f"it took its class more than {reader.MOST_SECONDS} s of a core or {reader.MOST_BYTES >> 20} MiB to read it"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-P", reader.__file__],
            input=f"[{','.join(texts)}]".encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
        )
        lines: bytes | None = done.stdout
    except subprocess.TimeoutExpired as stopped:
        lines = stopped.stdout
    except OSError as error:
        lines, obstacle = b"", f"no process could be started to read it ({error})"
    return [json.loads(line) for line in (lines or b"").split(b"\n")[:-1]], obstacle
