"""Devices that merge matrices: `cuda` (all of them), `cuda:1`, `cuda:0,2`, and `cpu:0,1`, which are simulated.

The engine forms deltas on the host, in chunks, copies them to the device, calls the method there, and adds the result
to the base on the host. A simulated device takes the same way on the CPU, with the same bytes.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from actmat.checkpoints.writing.shards import parse_size
from actmat.engine.memory import available_memory
from actmat.errors import MergeError, RecipeError, format_size, is_memory_error
from actmat.planning.work import HOST, DeviceRoom

FORMS = "'cpu', 'cuda', 'cuda:N', 'cuda:N,M', or for simulated devices 'cpu:N,M'"

USABLE = 0.9
"""Share of a device's memory that plans count on; the rest is for its libraries (context, handles) and fragments."""


ON_HOST = "cpu", None
"""Everything is computed by threads on the host."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device, such as `cuda:0`."""

    name: str

    @property
    def torch_device(self) -> torch.device:
        """The device in torch's form."""
        return torch.device("cpu" if self.name.startswith("cpu") else self.name)

    def total_bytes(self) -> int | None:
        """Memory of the device; None for a simulated one."""
        return None if self.name.startswith("cpu") else int(torch.cuda.mem_get_info(self.torch_device)[1])

    def free_bytes(self) -> int:
        """Memory that could be allocated now; the host's for a simulated device."""
        if self.name.startswith("cpu"):
            return available_memory()
        unused = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return int(torch.cuda.mem_get_info(self.torch_device)[0]) + unused


def parse_devices(text: str) -> tuple[str, tuple[int, ...] | None]:
    """Kind and numbers of the devices that a text names; None: the host for `cpu`, all devices for `cuda`.

    A plan may be made for devices that only another machine has.

    Raises:
        RecipeError: invalid text; lists everything that is wrong with it.

    >>> parse_devices("cuda:0,2")
    ('cuda', (0, 2))
    >>> parse_devices("cpu") == ON_HOST
    True
    """
    kind, colon, listed = text.partition(":")
    words = [word.strip() for word in listed.split(",")] if colon else []
    problems = [] if kind in ("cpu", "cuda") else [f"there is no kind '{kind}'"]
    bad = [word for word in words if not re.fullmatch(r"[0-9]{1,4}", word)]
    problems += [f"'{word}' is not the number of a device" for word in bad]
    counts = Counter(int(word) for word in words if word not in bad)
    problems += [f"{number} is given {count} times" for number, count in counts.items() if count > 1]
    if problems:
        raise RecipeError(f"device is {FORMS}; got '{text}': {'; '.join(problems)}")
    return kind, tuple(counts) if colon else None


def open_devices(text: str) -> list[Device]:
    """The devices of a text such as `cuda:0,2`; empty for the host.

    Raises:
        RecipeError: invalid text.
    """
    kind, numbers = parse_devices(text)
    count = torch.cuda.device_count() if kind == "cuda" else 0
    return [Device(f"{kind}:{n}") for n in (range(count) if numbers is None else numbers)]


def check_device(text: str) -> None:
    """Refuse devices that torch cannot compute on.

    Raises:
        RecipeError: some are missing; names them and the available ones.
    """
    if problem := _missing(text):
        raise RecipeError(problem)


def _missing(text: str) -> str:
    """Problem with devices that a text names and this machine lacks; empty if all are here."""
    kind, numbers = parse_devices(text)
    if kind == "cuda" and not torch.cuda.is_available():
        return f"device '{text}' was given, but torch sees no CUDA device; use --device cpu, or install a CUDA build"
    if kind == "cuda":
        count = torch.cuda.device_count()
        if missing := [f"'cuda:{n}'" for n in numbers or () if n >= count]:
            return f"there is no {', '.join(missing)}: torch sees {count} CUDA device(s), 0 to {count - 1}"
    return ""


def device_room(text: str, memory: str | int | None = None) -> DeviceRoom:
    """Memory per item that plans count on: that of the smallest device; the devices need not be on this machine.

    Args:
        text: see `parse_devices`.
        memory: limit of each; default: nine tenths of its memory, if it is on this machine.

    Raises:
        RecipeError: a limit without devices, or invalid text.
    """
    limit = None if memory is None else parse_size(memory)
    if parse_devices(text) == ON_HOST:
        if limit is not None:
            raise RecipeError(f"device_memory={memory} limits devices, and none is given: add --device")
        return HOST
    sizes = [] if _missing(text) else [device.total_bytes() for device in open_devices(text)]
    known = [int(USABLE * size) for size in sizes if size is not None] + ([] if limit is None else [limit])
    return DeviceRoom(text, min(known, default=None))


@contextlib.contextmanager
def device_memory_errors(device: Device | None, tensor: str, planned: int) -> Iterator[None]:
    """Turn the error of a device that has too little memory for a tensor into a `MergeError` with the fix."""
    try:
        yield
    except RuntimeError as error:
        if device is None or not is_memory_error(error):
            raise
        raise MergeError(
            f"{device.name} ran out of memory at tensor '{tensor}', for which {format_size(planned)} were planned; "
            f"{format_size(device.free_bytes())} are free now. Likely cause: another program uses the device, or the "
            f"estimate is too low. Fix: end that program, or --set device_memory=SIZE below {format_size(planned)}, "
            "which leaves this tensor to the host; the same command goes on where it stopped. "
            f"({' '.join(str(error).split())[:200]})"
        ) from error
