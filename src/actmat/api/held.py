"""Inputs of a merge that are in memory: modules, state dicts, and adapters of a `PeftModel`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor, nn

from actmat.api.fields import MergeFields, check_names
from actmat.checkpoints.codecs import decoded
from actmat.checkpoints.memory import hold_model
from actmat.checkpoints.model import Model
from actmat.errors import RecipeError, did_you_mean
from actmat.experts.locate import OpenInput
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.config import parse_adapter_config
from actmat.experts.lora.names import canonical
from actmat.methods import AnyMethod
from actmat.progress import Progress, usual_progress
from actmat.recipe.arguments import make_arguments

if TYPE_CHECKING:
    from actmat.extras.models.in_memory import MemoryMerge

MergeInput = str | Path | nn.Module | Mapping[str, Any]
"""A location, a module, or a state dict; of an expert also a mapping with one of these as `path`."""
PLACE = "<memory>"
"""Folder of the names that recipes, plans and errors give to inputs in memory."""


def hold_inputs(
    base: MergeInput | None, experts: Sequence[MergeInput]
) -> tuple[Any, Any, dict[str, Callable[[], OpenInput]]]:
    """Base and experts with places for those in memory, and the inputs at these places.

    Objects of other types are returned unchanged.

    Raises:
        RecipeError: a module that cannot be merged as it is.
    """
    held: dict[str, Callable[[], OpenInput]] = {}

    def place(name: str, given: Any) -> Any:
        if isinstance(given, Mapping) and "path" in given and not isinstance(given["path"], Tensor):
            return {**given, "path": place(given.get("name") or name, given["path"])}
        if (opened := _opener(where := f"{PLACE}/{name}", given)) is None:
            return given
        held[where] = opened
        return where

    is_one = isinstance(experts, str | os.PathLike)  # refused later
    return place("base", base), experts if is_one else [place(f"expert_{n}", e) for n, e in enumerate(experts, 1)], held


def _opener(place: str, given: Any) -> Callable[[], OpenInput] | None:
    """Opens an input in memory; None for anything else."""
    if isinstance(given, Mapping):
        return partial(_model, place, given, None)
    if not isinstance(given, nn.Module):
        return None
    if isinstance(active := getattr(given, "active_adapters", None), list):
        if len(active) != 1:
            raise RecipeError(f"{place}: expected one active adapter, found {len(active)}. Fix: set_adapter, or "
            "actmat.merge_adapters for several.")  # fmt: skip
        return partial(_adapter, place, given, active[0])
    return partial(_model, place, given.state_dict(), _config(given))


def _model(place: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None) -> Model:
    return decoded(hold_model(tensors, location=place, config=config))


def _config(model: nn.Module) -> dict[str, Any] | None:
    """`config.json` as `save_pretrained` would write it; None if the module is not of transformers."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return None
    return {**json.loads(config.to_json_string()), "architectures": [type(model).__name__]}


def _adapter(place: str, model: Any, name: str) -> Adapter:
    """An adapter of a model, as `save_pretrained` would write it, with the scales at which its layers run."""
    from actmat.extras.models.loading import quiet_peft

    with quiet_peft() as peft:
        tensors = peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        fields = {**model.peft_config[name].to_dict(), "peft_version": peft.__version__}
    parsed, problems = parse_adapter_config(json.loads(json.dumps(fields, default=list)))
    adapter = Adapter(canonical(hold_model(tensors, location=place)), parsed, problems)
    layers = ((n, getattr(layer, "scaling", None)) for n, layer in model.named_modules())
    live = {n.removeprefix("base_model.model."): s[name] for n, s in layers if isinstance(s, dict) and name in s}
    modules = {n: replace(m, scaling=float(live.get(n, m.scaling))) for n, m in adapter.modules.items()}
    return Adapter(adapter.model, parsed, problems, replace(adapter.listing, modules=modules))


def merge_adapters(
    model: nn.Module,
    adapters: Sequence[str],
    *,
    name: str,
    method: AnyMethod = "auto",
    weights: Sequence[float] | None = None,
    progress: Progress | None = None,
    **fields: Unpack[MergeFields],
) -> MemoryMerge:
    """Merge adapters of a `PeftModel` into a new one of the same model, in memory, as `add_weighted_adapter` does.

    The new adapter is not activated: `model.set_adapter(name)` does that.

    Args:
        model: the `PeftModel`; gets the adapter.
        adapters: names of its adapters.
        name: of the new adapter.
        method, weights, progress, fields: as for `merge`.

    Returns:
        The merge: its tensors, plan and records.

    Raises:
        RecipeError: no such adapter, or the name is taken.
        MergeError: the errors of `merge`; the model is then unchanged.
    """
    from actmat.extras.models.in_memory import run_in_memory
    from actmat.extras.models.loading import quiet_peft

    check_names(fields, MergeFields)
    known = list(getattr(model, "peft_config", ()))
    if missing := [a for a in adapters if a not in known]:
        hint = did_you_mean(missing[0], known)
        raise RecipeError(f"The model has no adapter '{missing[0]}'.{hint} Its adapters: {', '.join(known) or 'none'}.")
    if name in known:
        raise RecipeError(f"The model has an adapter '{name}' already: give another name, or delete_adapter('{name}').")
    held = {f"{PLACE}/{a}": partial(_adapter, f"{PLACE}/{a}", model, a) for a in adapters}
    experts = [{"path": place, "name": a} for place, a in zip(held, adapters, strict=True)]
    recipe, settings = make_arguments(None, experts, {"method": method, **fields, "held": held}, weights)
    merged = run_in_memory(recipe, settings, progress or usual_progress())
    with quiet_peft() as peft:
        config = peft.PeftConfig.from_peft_type(**(merged.plan.adapter_config or {}))
        model.add_adapter(name, config)  # type: ignore[operator]  # of a PeftModel
        peft.set_peft_model_state_dict(model, dict(merged.tensors), adapter_name=name)
    return merged
