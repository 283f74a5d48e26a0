"""Extract an adapter from a fine-tuned model: a merge of one expert, written as factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat.api.merging import merge_recipes
from actmat.errors import RecipeError
from actmat.experts.locate import stored_of
from actmat.foreign import html_table, terminal
from actmat.progress import Progress, usual_progress
from actmat.recipe import Recipe, make_recipe
from actmat.recipe.output import with_output
from actmat.run import MergeReport
from actmat.run.locate import locate_inputs
from actmat.settings import RunSettings

LABEL = "model"
"""Name of the fine-tuned model in plans and records."""

SHOWN_LAYERS = 10
"""Number of layers of an extraction shown in a notebook."""


@dataclass(frozen=True, repr=False)
class ExtractReport:
    """Result of an extraction.

    Args:
        merge: the report of the run, as of any other merge.
        record: `relative_error`, `notes` and, for every examined tensor, a row in `tensors`.
    """

    merge: MergeReport
    record: Mapping[str, Any]

    def __repr__(self) -> str:
        layers = sum(row["kind"] == "factored" for row in self.record["tensors"])
        return terminal(f"<ExtractReport {self.out}: {layers} layers; relative error {self.relative_error:.3g}>")

    def _repr_html_(self) -> str:
        rows = [r for r in self.record["tensors"] if r["kind"] == "factored"]
        worst = sorted(rows, key=lambda r: -float(r["relative_error"]))[:SHOWN_LAYERS]
        cells = [(r["name"], r["rank"], f"{r['relative_error']:.3g}") for r in worst]
        return str(html_table(repr(self), ("layers of largest error", "rank", "relative error"), cells))

    @property
    def out(self) -> Path | str:
        """Folder of the adapter, or its URL."""
        return self.merge.out

    @property
    def was_finished(self) -> bool:
        """True if an earlier call with the same inputs finished the output, so that it was only verified."""
        return self.merge.was_finished

    @property
    def relative_error(self) -> float:
        """`||D - B A||_F / ||D||_F` over all factored layers."""
        return float(self.record["relative_error"])


def extract(
    base: str | Path,
    model: str | Path,
    *,
    out: str | Path,
    rank: int | None = None,
    others: str = "save",
    dtype: str | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> ExtractReport:
    """Write the best low-rank approximation of `W - W_0` as a LoRA adapter for PEFT, layer by layer.

    Args:
        base: directory, file, hub id or URL of the checkpoint `W_0`.
        model: the same for the fine-tuned model: a full checkpoint, or an adapter of any family except LoRA.
        out: directory to write, or its URL; must be missing or empty, unless `overwrite` is set.
        rank: rank of every layer.
        others: changed tensors that LoRA cannot hold (norms, tables, convolutions, biases) are kept whole in the
        adapter (`save`), or left out (`leave`).
        dtype: dtype of the adapter: float64, float32, bfloat16 or float16; default: the base's, tensor by tensor.
        progress: see `Progress`; None: a line in a notebook, nothing elsewhere.
        settings: of the run (`threads`, `max_memory`, `overwrite`, `diagnose`, ...; see `settings.RunSettings`).

    Returns:
        The report, with the error of every layer in `record["tensors"]`.

    Raises:
        MergeError: see `actmat.errors`; nothing is left at `out`.
    """
    recipe = extract_recipe(base, model, out=out, rank=rank, others=others, dtype=dtype)
    (report,) = merge_recipes([recipe], RunSettings(**settings), progress or usual_progress())
    return report_of(report)


def extract_recipe(base: str | Path, model: str | Path, **fields: Any) -> Recipe:
    """The recipe of an extraction, from the arguments of `extract`.

    Raises:
        RecipeError: no rank is given, a value is out of range, or the model is already LoRA.
    """
    given = {name: str(value) if name == "out" else value for name, value in fields.items() if value is not None}
    if (rank := fields.get("rank")) is None:
        raise RecipeError("The size of the adapter is not given: pass a rank (--rank 64).")
    experts = [{"path": str(model), "name": LABEL}]
    made = {"base": str(base), "experts": experts, "method": "average", "output": "extracted"}
    recipe = make_recipe(with_output(made, given))
    with locate_inputs(recipe) as inputs:
        if inputs.have_factors:
            raise RecipeError(
                f"{model} is a LoRA adapter; its rank is reduced without a base. Fix: actmat merge -e {model} "
                f"--rank {rank} --out OUT"
            )
        specs = {} if inputs.base is None else stored_of(inputs.base).specs
        wide = any(s.dtype == "float64" for s in specs.values())
    return recipe.model_copy(update={"compute_dtype": "float64"}) if wide else recipe


def report_of(report: MergeReport) -> ExtractReport:
    """The extraction report of a merge whose output is an extracted adapter, with its rows."""
    manifest = report.manifest
    notes, error = list(manifest["notes"]), manifest["output"]["relative_error"]
    return ExtractReport(report, {"relative_error": error, "notes": notes, "tensors": extracted_rows(manifest)})


def extracted_rows(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per tensor of an extraction: `name`, `module`, `kind`, `reason`, and for factored ones rank and errors.

    `kind`: factored, saved, left out, or unchanged.
    """
    rows = []
    for row in manifest["modules"]:
        same = row["unchanged"] or row["stats"].get("norm") == 0.0
        kind, reason = ("unchanged", "the same as in the base") if same else (row["kind"], row["why"])
        rows.append({"name": row["name"], "module": row["module"], "kind": kind, "reason": reason, **row["stats"]})
    return rows
