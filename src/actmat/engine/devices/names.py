"""Names of devices: `cpu`, `cuda` (all of them), `cuda:1`, `cuda:0,2`, `mps`, and `cpu:0,1`, which are simulated."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import torch

from actmat.errors import RecipeError

FORMS = "'cpu', 'cuda', 'cuda:N', 'cuda:N,M', 'mps', or for simulated devices 'cpu:N,M'"


@dataclass(frozen=True, slots=True)
class DeviceNames:
    """Devices that one text names.

    Args:
        kind: `cpu`, `cuda` or `mps`.
        numbers: of the devices; None where none is given: the host for `cpu`, all that there are for `cuda`.
    """

    kind: str
    numbers: tuple[int, ...] | None = None

    @property
    def is_host(self) -> bool:
        """True if everything is computed by threads on the host."""
        return self.kind == "cpu" and self.numbers is None


def parse_devices(text: str) -> DeviceNames:
    """The devices that a text names; a plan may be made for devices that only another machine has.

    Raises:
        RecipeError: it names none; says everything that is wrong with it.

    >>> parse_devices("cuda:0,2")
    DeviceNames(kind='cuda', numbers=(0, 2))
    >>> parse_devices("cpu").is_host
    True
    """
    kind, colon, listed = text.partition(":")
    words = [word.strip() for word in listed.split(",")] if colon else []
    problems = [] if kind in ("cpu", "cuda", "mps") else [f"there is no kind '{kind}'"]
    if kind == "mps" and colon:
        problems.append("there is one 'mps', which has no number")
    bad = [word for word in words if not re.fullmatch(r"[0-9]{1,4}", word)]
    problems += [f"'{word}' is no number of a device" for word in bad]
    counts = Counter(int(word) for word in words if word not in bad)
    problems += [f"{number} is given {count} times" for number, count in counts.items() if count > 1]
    if problems:
        raise RecipeError(f"device is {FORMS}; got '{text}': {'; '.join(problems)}")
    return DeviceNames(kind, tuple(counts) if colon else None)


def check_device_name(device: str) -> None:
    """Refuse text that names no device.

    Raises:
        RecipeError: says what names there are.
    """
    parse_devices(device)


def check_device(device: str) -> None:
    """Refuse devices that torch cannot compute on.

    Raises:
        RecipeError: some are not here; names all of them, and says what there is.
    """
    names = parse_devices(device)
    problem = None
    if names.kind == "cuda" and not torch.cuda.is_available():
        problem = (
            f"device '{device}' was asked for, but torch sees no CUDA device; use --device cpu, or install a CUDA build"
        )
    elif names.kind == "cuda" and names.numbers is not None:
        count = torch.cuda.device_count()
        if missing := [f"'cuda:{n}'" for n in names.numbers if n >= count]:
            problem = f"there is no {', '.join(missing)}: torch sees {count} CUDA device(s), 0 to {count - 1}"
    elif names.kind == "mps" and not torch.backends.mps.is_available():
        problem = "device 'mps' was asked for, but this torch has no Metal support"
    if problem:
        raise RecipeError(problem)
