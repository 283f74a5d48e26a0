"""Extract an adapter from a fine-tuned model: a merge of one expert, written as factors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

from actmat.api.fields import RunFields, check_names
from actmat.api.merging import merge_recipes
from actmat.errors import RecipeError
from actmat.experts.locate import stored_of
from actmat.progress import Progress, usual_progress
from actmat.recipe import Recipe, make_recipe
from actmat.recipe.output import with_output
from actmat.recipe.schema import OutputDtype
from actmat.run import MergeReport
from actmat.run.locate import locate_inputs
from actmat.settings import RunSettings

LABEL = "model"
"""Name of the fine-tuned model in plans and records."""


def extract(
    base: str | Path,
    model: str | Path,
    *,
    out: str | Path,
    rank: int | None = None,
    others: Literal["save", "leave"] = "save",
    dtype: OutputDtype | None = None,
    drop: Sequence[str] = (),
    progress: Progress | None = None,
    **settings: Unpack[RunFields],
) -> MergeReport:
    """Write the best low-rank approximation of `W - W_0` as a LoRA adapter for PEFT, layer by layer.

    Args:
        base: directory, file, hub id or URL of the checkpoint `W_0`.
        model: the same for the fine-tuned model: a full checkpoint, or an adapter of any family except LoRA.
        out: directory to write, or its URL; must be missing or empty, unless `overwrite` is set.
        rank: rank of every layer.
        others: changed tensors that LoRA cannot hold (norms, tables, convolutions, biases) are kept whole in the
        adapter (`save`), or left out (`leave`).
        dtype: dtype of the adapter: float64, float32, bfloat16 or float16; default: the base's, tensor by tensor.
        drop: patterns of the model's tensors to leave out.
        progress: see `Progress`; None: a line in a notebook, nothing elsewhere.
        settings: of the run (`threads`, `max_memory`, `overwrite`, `diagnose`, ...; see `settings.RunSettings`).

    Returns:
        The report: `totals.relative_error` is `||D - B A||_F / ||D||_F` over all layers and what is left out;
        `manifest["modules"]` has the error of each.

    Raises:
        MergeError: see `actmat.errors`; nothing is left at `out`.
    """
    check_names(settings, RunFields)
    recipe = extract_recipe(base, model, out=out, rank=rank, others=others, dtype=dtype, drop=drop)
    return merge_recipes([recipe], RunSettings(**settings), progress or usual_progress())[0]


def extract_recipe(base: str | Path, model: str | Path, **fields: Any) -> Recipe:
    """The recipe of an extraction, from the arguments of `extract`.

    Raises:
        RecipeError: no rank is given, a value is out of range, or the model is already LoRA.
    """
    output = {name: str(value) if name == "out" else value for name, value in fields.items() if value is not None}
    if (rank := fields.get("rank")) is None:
        raise RecipeError("The size of the adapter is not given: pass a rank (--rank 64).")
    experts = [{"path": str(model), "name": LABEL}]
    made = {"base": str(base), "experts": experts, "method": "average", "output": "extracted"}
    recipe = make_recipe(with_output(made, output))
    with locate_inputs(recipe) as inputs:
        if inputs.have_factors:
            raise RecipeError(
                f"{model} is a LoRA adapter; its rank is reduced without a base. Fix: actmat merge -e {model} "
                f"--rank {rank} --out OUT"
            )
        specs = {} if inputs.base is None else stored_of(inputs.base).specs
        wide = any(s.dtype == "float64" for s in specs.values())
    return recipe.model_copy(update={"compute_dtype": "float64"}) if wide else recipe
