"""Merge in memory: the tensors of an output and its model; nothing is written."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.model import CONFIG, GENERATION
from actmat.checkpoints.raw import raw_bytes
from actmat.engine.executors import THREADS, computes_here
from actmat.engine.memory import available_memory
from actmat.engine.record import Record
from actmat.errors import OutputError, RecipeError, format_size, memory_errors
from actmat.extras.models.layered import ON_CPU, Placement
from actmat.extras.models.loading import Loaded, extra, load_tensors
from actmat.foreign import terminal
from actmat.identity.inventory import matches
from actmat.identity.tokens import TOKENIZERS
from actmat.planning import MergePlan
from actmat.progress import Progress
from actmat.recipe import Recipe
from actmat.recipe.output import ExtractedOutput
from actmat.run.driver import execute
from actmat.run.inputs import open_inputs
from actmat.run.output import Output
from actmat.run.run import prepare
from actmat.settings import RunSettings


class _TensorSink:
    """Sink that fills one tensor."""

    digest = ""

    def __init__(self, tensor: Tensor) -> None:
        self._memory, self._done = raw_bytes(tensor), 0

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        self._memory[self._done : self._done + len(data)] = data
        self._done += len(data)


class _MemoryWriter:
    """Creates sinks that fill tensors; aliases share memory."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = {s.name: s for s in specs}
        self.tensors: dict[str, Tensor] = {}

    def sink(self, name: str, aliases: Sequence[str] = ()) -> _TensorSink:
        """Sink of the tensor `name`, shared with `aliases`."""
        tensor = self._specs[name].empty()
        self.tensors |= dict.fromkeys((name, *aliases), tensor)
        return _TensorSink(tensor)


@dataclass(frozen=True, repr=False)
class MemoryMerge:
    """Result of a merge in memory.

    Args:
        plan: the executed plan.
        tensors: output tensors by name, in their dtypes; tied tensors share memory.
        config: `config.json` of the model; for an adapter, of its base, which is not loaded yet.
        seconds: wall time.
        records: of every item, by name.
        module: the base as it was given; may be a module.
        generation: `generation_config.json` of the model; empty without one.
    """

    plan: MergePlan
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    seconds: float
    records: Mapping[str, Record] = field(default_factory=dict)
    module: object = None
    generation: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        size = format_size(sum(t.nbytes for t in {id(t): t for t in self.tensors.values()}.values()))
        of = f"{self.plan.recipe.method} over {len(self.plan.experts)} experts"
        return terminal(f"<MemoryMerge: {of}; {len(self.tensors)} tensors, {size}; {self.seconds:.1f} s>")

    @property
    def base(self) -> str:
        """Location of the base; for an adapter without a base, the one named in its config, else ''."""
        config = self.plan.adapter_config or {}
        return self.plan.recipe.base or str(config.get("base_model_name_or_path") or "")

    @cached_property
    def model(self) -> nn.Module:
        """The merged model: a copy of a base that was given as a module; else, and for adapters, as `load` makes it."""
        base = self.module
        if not isinstance(base, nn.Module) or getattr(base, "is_quantized", False) or self.plan.output != "model":
            return self.load().model
        stored = (*base.named_parameters(remove_duplicate=False), *base.named_buffers(remove_duplicate=False))
        merged: dict[int, Any] = {}  # stands for the parameters, which are not copied
        for name, old in stored:
            if name in self.tensors:
                new = self.tensors[name].to(old.device)
                merged[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        model = copy.deepcopy(base, merged)
        return self._generating(model)

    def _generating(self, model: nn.Module) -> nn.Module:
        """The model with its settings of generation."""
        if self.generation:
            kind = extra("transformers").GenerationConfig
            model.generation_config = kind.from_dict(dict(self.generation))
        return model

    def load(self, *, model_class: str | None = None, place: Placement = ON_CPU) -> Loaded:
        """Load the model, ready to run; a merged adapter is applied to its base.

        Args:
            model_class: transformers class; default: the config's architecture.
            place: where it runs.

        Raises:
            StatisticsError: transformers or PEFT cannot load it.
        """
        recipe, base = self.plan.recipe, self.base
        of_tokenizer = (label for path, label in self.plan.files.items() if matches(path, TOKENIZERS))
        label = next(of_tokenizer, recipe.model.files_of)
        files = {"base": base, **{e.label: e.path for e in recipe.experts}}[label]
        loaded = load_tensors(
            self.tensors,
            base,
            files,
            config=self.config,
            adapter=self.plan.adapter_config,
            model_class=model_class,
            place=place,
        )
        return replace(loaded, model=self._generating(loaded.model))


@memory_errors()
def run_in_memory(
    recipe: Recipe,
    settings: RunSettings | None = None,
    progress: Progress | None = None,
    *,
    module: object = None,
) -> MemoryMerge:
    """Run a recipe in memory; its `out` is ignored.

    Needs the memory of the merge plus the whole output in its dtypes.

    Args:
        recipe, settings, progress: as for `run_recipes`.
        module: the base as it was given; may be a module.

    Raises:
        MergeError: the errors of `run_recipes`.
        OutputError: the output exceeds the free memory.
        RecipeError: the executor uses other machines.
    """
    settings = settings or RunSettings()
    executor = settings.executor or recipe.executor or THREADS
    if not computes_here(executor):
        raise RecipeError(f"The executor '{executor}' merges on other machines: give --out to merge into a folder.")
    with open_inputs([recipe], settings) as (inputs, places):
        if isinstance(inputs.recipes[0].output, ExtractedOutput):
            raise RecipeError("Adapters of full models are extracted into a folder only (actmat merge ... --out OUT); "
            "in memory, merge to a model (--to model).")  # fmt: skip
        run = prepare(inputs, places, measured=False)
        (plan,) = run.plans
        if plan.write_bytes > (free := available_memory()):
            raise OutputError(
                f"The merged model needs {format_size(plan.write_bytes)}, but {format_size(free)} of memory are free: "
                "merge into a folder (actmat merge ... --out OUT), or give --dtype bfloat16."
            )
        writer = _MemoryWriter(plan.specs)
        output = Output(plan, writer)
        execute([output], run, progress or Progress())
        base, source = inputs.base, plan.files.get(GENERATION, recipe.model.files_of)
        folders = {label: e.model.folder for label, e in zip(inputs.labels, inputs.experts, strict=True)}
        folders |= {} if base is None else {"base": base.folder}
        generation = folders[source].object(GENERATION) if plan.output == "model" else {}
        config = {} if base is None else base.folder.written.get(CONFIG, base.config or {})
        config = dict(plan.configs.get(CONFIG, config))
        if recipe.dtype is not None and config:
            config["dtype"] = recipe.dtype
    tensors = {s.name: writer.tensors[s.name] for s in plan.specs}
    return MemoryMerge(plan, tensors, config, time.perf_counter() - inputs.began, output.records, module, generation)
