"""Inputs of a merge that are in memory: modules, state dicts, and adapters of a `PeftModel`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor, nn

from actmat.api.fields import MergeFields, check_names
from actmat.checkpoints.codecs import decoded
from actmat.checkpoints.memory import LABEL, hold_model
from actmat.checkpoints.model import GENERATION, Model
from actmat.checkpoints.resolve import open_model
from actmat.errors import RecipeError, did_you_mean
from actmat.experts.locate import OpenInput
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.config import parse_adapter_config
from actmat.experts.lora.names import canonical
from actmat.methods import AnyMethod
from actmat.progress import Progress, usual_progress
from actmat.recipe import Recipe
from actmat.recipe.arguments import Location, list_experts, make_arguments
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.extras.models.in_memory import MemoryMerge

MergeInput = str | Path | nn.Module | Mapping[str, Any]
"""A location, a module, or a state dict; of an expert also a mapping with one of these as `path`."""
MergeInputs = Sequence[MergeInput] | Mapping[str, MergeInput]
"""Experts in order, or by name."""


@dataclass(frozen=True)
class HeldInputs:
    """Base and experts, with places for those in memory.

    Args:
        base: a location, a place, or an object of another type unchanged.
        experts: fields of each, with such a `path`.
        openers: by place.
        modules: those among the inputs in memory, by place.
    """

    base: Any
    experts: list[dict[str, Any]]
    openers: dict[str, Callable[[], OpenInput]]
    modules: dict[str, nn.Module]

    def arguments(
        self,
        fields: Mapping[str, Any],
        weights: Sequence[float] | None,
        statistics: Mapping[str, Location] | Sequence[Location] | None,
    ) -> tuple[Recipe, RunSettings]:
        """The recipe and the settings that arguments describe; `blocks` become weights by pattern.

        Raises:
            MergeError: they are invalid; carries all problems.
        """
        rest = {**fields, "held": self.openers}
        blocks = rest.pop("blocks", ())
        recipe, settings = make_arguments(self.base, self.experts, rest, weights, statistics)
        if blocks:
            from actmat.extras.diffusion.blocks import with_blocks

            recipe = with_blocks(recipe, [blocks] if isinstance(blocks, str) else blocks, self.openers)
        return recipe, settings


def hold_inputs(base: MergeInput | None, experts: MergeInputs) -> HeldInputs:
    """Give places to the inputs in memory.

    Raises:
        RecipeError: the experts are no list, or a module cannot be merged as it is.
    """
    held = HeldInputs(None, [], {}, {})

    def place(name: str, source: Any) -> Any:
        source = _unwrapped(source)
        if (opener := _opener(where := f"{LABEL}/{name}", source)) is None:
            return source
        held.openers[where] = opener
        if isinstance(source, nn.Module):
            held.modules[where] = source
        return where

    for number, expert in enumerate(list_experts(experts), 1):
        path = place(expert.get("name") or f"expert_{number}", expert["path"])
        held.experts.append({**expert, "path": path})
    return replace(held, base=place("base", base))


def _unwrapped(source: Any) -> Any:
    """The module inside of those that `torch.compile` and parallel training put around it."""
    while isinstance(source, nn.Module) and {*dict(source.named_children())} in ({"_orig_mod"}, {"module"}):
        source = next(source.children())
    return source


def _opener(place: str, source: Any) -> Callable[[], OpenInput] | None:
    """Opens an input in memory; None for anything else."""
    if isinstance(source, Mapping):
        return partial(_model, place, source, None)
    if not isinstance(source, nn.Module):
        return None
    if isinstance(active := getattr(source, "active_adapters", None), list):
        if len(active) != 1:
            raise RecipeError(f"{place}: expected one active adapter, found {len(active)}. Fix: set_adapter, or "
            "actmat.merge_adapters for several.")  # fmt: skip
        return partial(_adapter, place, source, active[0])
    return partial(_model, place, source.state_dict(), source)


def _model(place: str, tensors: Mapping[str, Tensor], module: nn.Module | None) -> Model:
    """A model in memory, with its settings, and the files, such as a tokenizer's, of the folder it was loaded from."""
    model = decoded(hold_model(tensors, location=place, config=None if module is None else _config(module)))
    origin = str(getattr(module, "name_or_path", ""))
    generation: Any = getattr(module, "generation_config", None)
    folder = model.folder
    if hasattr(generation, "to_json_string"):
        folder = replace(folder, texts={GENERATION: generation.to_json_string()})
    if os.path.isdir(origin):
        with open_model(origin) as stored:
            folder = replace(folder, files=stored.folder.files, merged=stored.folder.merged)
    return Model(model.tensors, folder)


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
    held = {f"{LABEL}/{a}": partial(_adapter, f"{LABEL}/{a}", model, a) for a in adapters}
    experts = [{"path": place, "name": a} for place, a in zip(held, adapters, strict=True)]
    recipe, settings = make_arguments(None, experts, {"method": method, **fields, "held": held}, weights)
    merged = run_in_memory(recipe, settings, progress or usual_progress())
    with quiet_peft() as peft:
        config = peft.PeftConfig.from_peft_type(**(merged.plan.adapter_config or {}))
        model.add_adapter(name, config)  # type: ignore[operator]  # of a PeftModel
        peft.set_peft_model_state_dict(model, dict(merged.tensors), adapter_name=name)
    return merged
