"""The device of models that run, and the memory of a search, from headers before the first model is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.writing.shards import parse_size
from actmat.engine.devices import check_device, open_devices, parse_devices
from actmat.engine.memory import available_memory
from actmat.errors import RecipeError, format_size
from actmat.extras.models.layered import Placement, model_bytes
from actmat.settings import RunSettings

USABLE = 0.9
"""Share of the free memory that is planned with, if no limit is given."""
COPIES = 3
"""Models in the memory of a search: the base, the merged delta, and the model that runs; of adapters only the last."""


def planned_memory(
    specs: Mapping[str, TensorSpec], place: Placement, *, merges: int, factors: bool, statistics: int
) -> str:
    """The bytes that a search will hold, estimated without activations, in words of at most 80 columns.

    Args:
        specs: tensors of the base.
        place: of the models while they run, with a limit.
        merges: that are made, and kept on disk until the end.
        factors: they are adapters.
        statistics: experts whose Gram matrices are measured.

    Raises:
        RecipeError: they do not fit.
    """
    assert place.limit is not None
    model = model_bytes(specs, place.running)
    disk = (0 if factors else merges * model) + statistics * gram_bytes(specs)
    needed = place.peak(specs) if factors else COPIES * model
    if needed > place.limit:
        raise RecipeError(
            f"The search needs about {format_size(needed)} ({format_size(model)} for a model), and "
            f"{format_size(place.limit)} may be used ({place.source}). Use --set model_dtype=bfloat16, or more "
            "memory; 'actmat merge --data' needs one model at a time."
        )
    return (
        f"memory: {format_size(needed)} of {format_size(place.limit)} that may be used; disk: about {format_size(disk)}"
    )


def place_models(run: RunSettings, dtype: str) -> Placement:
    """The place of models that run.

    Args:
        dtype: of the models.

    Raises:
        RecipeError: a limit that is no size, or a device that is not there.
    """
    device, _ = model_device(run.device)
    return Placement(device, dtype, *_limit(run, device))


def gram_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Gram matrices of the inputs of all matrices, stored as triangles; matrices of one module share theirs."""
    inputs = {(s.name.rpartition(".")[0].rpartition(".")[0], s.shape[1]) for s in specs.values() if len(s.shape) == 2}
    return sum(2 * width * (width + 1) for _, width in inputs)


def _limit(run: RunSettings, device: str) -> tuple[int, str]:
    if device != "cpu":
        if run.device_memory is not None:
            return parse_size(run.device_memory), f"device_memory, of {device}"
        check_device(device)
        return int(USABLE * open_devices(device)[0].free_bytes()), f"nine tenths of the free memory on {device}"
    if run.max_memory is not None:
        return parse_size(run.max_memory), "--max-memory"
    return int(USABLE * available_memory()), "nine tenths of the free memory"


def model_device(text: str) -> tuple[str, str]:
    """The device that models run on, and a note if it is one of several; merges use all of them.

    >>> model_device("cuda:1,2")
    ('cuda:1', 'models run on cuda:1, the first of cuda:1,2; merges use all of these')
    >>> model_device("cpu")
    ('cpu', '')

    Raises:
        RecipeError: the text names no device.
    """
    kind, numbers = parse_devices(text)
    if kind != "cuda":
        return kind, ""
    if numbers is None:
        return "cuda:0", "models run on cuda:0; merges use all GPUs"
    first = f"cuda:{numbers[0]}"
    if len(numbers) == 1:
        return first, ""
    return first, f"models run on {first}, the first of {text}; merges use all of these"
