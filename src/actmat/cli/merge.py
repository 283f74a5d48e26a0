"""`actmat merge`: merge fine-tuned checkpoints or adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actmat.cli import flags
from actmat.cli.flags import FlagFields, InputFlags, RecipeFlags
from actmat.cli.listing import BAD_INPUTS, command
from actmat.cli.streams import optional_stdout
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.cli.screen import MergeProgress
    from actmat.recipe import Recipe
    from actmat.run import MergeReport


OF_AVERAGE = ("out", "dtype", "compute_dtype", "max_shard_size", "allow_nonfinite", "ties")
"""Recipe fields that `--average` accepts as flags."""


@dataclass(frozen=True)
class MergeFlags:
    """Flags for the kind of merge and for steps after it."""

    plan: Annotated[bool, typer.Option("--plan", help="Show the plan and write nothing, like 'actmat plan'.")] = False
    average: Annotated[
        str | None,
        typer.Option(
            "--average",
            metavar="WEIGHTS",
            help="Average checkpoints of one training run, without a base. Weights: uniform, linear, ema:DECAY such as "
            "ema:0.9, wsd, or a number per checkpoint.",
        ),
    ] = None
    strict: flags.StrictOption = False

    def refuse_contradictions(
        self, recipes: Sequence[Recipe], given: RecipeFlags, run: RunSettings, inputs: InputFlags
    ) -> None:
        """Raise `typer.BadParameter` for flags that contradict each other."""
        if self.strict and not run.diagnose:
            raise typer.BadParameter("--strict needs --diagnose, which runs the checks")
        if any(r.out is None for r in recipes):
            raise typer.BadParameter("no output given: pass --out OUT, or set 'out' in the recipe")
        if (inputs.data or inputs.check) and self.average is not None:
            raise typer.BadParameter("--data and --check run experts of a base, which --average has not: remove them")
        if inputs.tune_scale and (not inputs.data or inputs.check or "scale" in given):
            raise typer.BadParameter("--set tune_scale=true chooses the scale by --data: remove --scale and --check")


@command(
    "merge",
    "merged, or already complete and intact",
    f"{BAD_INPUTS}; with `--strict`, a check of severity issue found something (the output stays)",
    imports_torch=True,
)
def merge(
    *,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE.yaml", help="A recipe file; flags replace its fields. With --average: the checkpoints."
        ),
    ] = None,
    given: RecipeFlags,
    run: RunSettings,
    how: MergeFlags,
    asked: Annotated[InputFlags, FlagFields(only=("data", "check"))],
    shown: Annotated[flags.OutputFlags, FlagFields(without=("full",))],
) -> None:
    """Merge fine-tuned models of one base, best with a prompt of each task.

    actmat merge -e math=ADAPTER1 -e code=ADAPTER2 --out MERGED
           --data math='A typical question.' --data code=prompts.jsonl
    actmat merge -b BASE -e EXPERT1 -e EXPERT2 --out MERGED   (without inputs)
    actmat merge -b BASE -e E1 -e E2 -m ties -o density=0.3 --out MERGED
    actmat merge recipe.yaml --out MERGED
    actmat merge --average uniform step-*/ --out MERGED (of one training run)

    Give one prompt of each expert's task, better eight, in the words of its
    use: the merge is then made for these inputs, and the summary begins with
    the answers that it kept.
    Several --method, or several values of an --option, write one output each,
    below OUT. An output is a directory that from_pretrained loads. It appears
    when it is complete; to continue an interrupted merge, repeat the command.
    'actmat tune' also searches methods and scales.
    """
    recipes = _recipes(inputs, given, how.average)
    if how.plan:
        from actmat.cli.plan import show_plans

        show_plans(recipes, run, asked, json=shown.json, quiet=shown.quiet)
        return
    how.refuse_contradictions(recipes, given, run, asked)
    quiet = shown.quiet or shown.json
    if asked.tune_scale:
        from actmat.cli.searching import tune_scales

        reports = tune_scales(recipes, asked.data or [], run, quiet=quiet)
    else:
        reports = _merge(recipes, run, asked, as_adapter=not inputs and "to" not in given, quiet=quiet)
        if shown.quiet:
            from actmat.cli.summary import print_warnings

            for report in reports[:1]:
                print_warnings(report.plan)
    if shown.json:
        from actmat.cli.screen import print_result
        from actmat.cli.summary import merge_data

        with optional_stdout("The merge is complete."):
            print_result("merge", {"outputs": [merge_data(r) for r in reports]})
    if how.strict and any(r.diagnosis is not None and r.diagnosis.issues for r in reports):
        raise typer.Exit(1)


def _recipes(inputs: list[str] | None, given: RecipeFlags, average: str | None) -> list[Recipe]:
    """Recipes from the flags, or the recipe of an average."""
    if average is None:
        if inputs and len(inputs) > 1:
            fix = "name the output with --out OUT"
            if not inputs[0].endswith(flags.RECIPE_SUFFIXES):
                fix += ", and each expert with a flag of its own: -e A -e B"
            raise typer.BadParameter(f"unexpected extra arguments ({' '.join(inputs[1:])}); {fix}")
        return given.recipes(Path(inputs[0]) if inputs else None)
    if others := sorted(given.given.keys() - set(OF_AVERAGE)):
        raise typer.BadParameter(f"--average takes checkpoints only: remove {', '.join(others)}")
    from actmat.extras.averaging.recipe import average_recipe

    return [average_recipe(inputs or [], average, **given.given)]


def _merge(
    recipes: Sequence[Recipe], run: RunSettings, asked: InputFlags, *, as_adapter: bool, quiet: bool
) -> list[MergeReport]:
    """Merge with a progress bar and print a summary; `as_adapter`: see `merge_by`."""
    from actmat.api.merging import merge_recipes

    if asked.data or asked.check:
        from actmat.cli.searching import merge_by

        reports = merge_by(asked, recipes, run, as_adapter=as_adapter, quiet=quiet)
    else:
        with _showing(recipes, quiet=quiet) as progress:
            reports = merge_recipes(recipes, run, progress)
    if not quiet:
        from actmat.cli.outputs import print_outputs

        with optional_stdout("The merge is complete."):
            print_outputs(reports)
    return reports


@contextmanager
def _showing(recipes: Sequence[Recipe], *, quiet: bool) -> Iterator[MergeProgress | None]:
    """Show a bar over the tensors, and the hub library's bars if an output goes to the hub."""
    from actmat.cli.screen import hub_bars, showing_progress

    to_hub = any(str(r.out).startswith("hf://") for r in recipes)
    with hub_bars(quiet=quiet) if to_hub else nullcontext(), showing_progress(quiet=quiet) as progress:
        yield progress
