"""`actmat merge`: merge fine-tuned checkpoints or adapters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import typer

from actmat.cli import flags
from actmat.cli.data import InputFlags
from actmat.cli.flags import RecipeFlags
from actmat.cli.listing import command
from actmat.cli.screen import hub_bars, print_result, showing_progress
from actmat.cli.streams import optional_stdout
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.recipe import Recipe
    from actmat.run import MergeReport


@command("merge", "merged, or already complete", imports_torch=True)
def merge(
    *,
    recipe: flags.RecipeArgument = None,
    fields: RecipeFlags,
    run: RunSettings,
    asked: InputFlags,
    shown: flags.JsonQuiet,
) -> None:
    """Merge fine-tuned models of one base, best with a prompt of each task.

    actmat merge -e math=ADAPTER1 --data math='A typical question.'
           -e code=ADAPTER2 --data code=prompts.jsonl --out MERGED
    actmat merge -b BASE -e EXPERT1 -e EXPERT2 --out MERGED   (without inputs)
    actmat merge -b BASE -e E1 -e E2 -m ties -o density=0.3 --out MERGED
    actmat merge recipe.yaml --out MERGED

    Give one prompt of each expert's task, better eight, in the words of its
    use: the merge is made for them, and the summary says what it kept.
    Several --method, values of an --option or of one --weight write an output
    each, below OUT. An output is a directory that from_pretrained loads. It
    appears when it is complete; to continue an interrupted merge, repeat the
    command. 'actmat plan' shows every decision, 'actmat tune' searches more.
    """
    recipes = fields.recipes(recipe)
    if not (asked.data or asked.check or asked.tune_scale):
        carry_out(recipes, run, shown, plan=False)
        return
    refuse_no_output(recipes)
    quiet = shown.quiet or shown.json
    if asked.tune_scale:
        if not asked.data or asked.check or "scale" in fields:
            raise typer.BadParameter("--set tune_scale=true chooses the scale by --data: remove --scale and --check")
        from actmat.cli.searching import tune_scales

        print_reports(tune_scales(recipes, asked, run, quiet=quiet), shown, printed=True)
    else:
        from actmat.cli.searching import merge_by

        print_reports(merge_by(asked, recipes, run, quiet=quiet), shown)


def refuse_no_output(recipes: Sequence[Recipe]) -> None:
    """Raise `typer.BadParameter` for a recipe without an output."""
    if any(r.out is None for r in recipes):
        raise typer.BadParameter("no output given: pass --out OUT, or set 'out' in the recipe")


def carry_out(
    recipes: Sequence[Recipe],
    run: RunSettings,
    shown: flags.OutputFlags,
    *,
    plan: bool,
    layout: str = "merge",
) -> None:
    """Merge with a bar over the tensors, or print the plans; `layout`: of the JSON."""
    if plan:
        from actmat.cli.plan import show_plans

        show_plans(recipes, run, None, shown)
        return
    refuse_no_output(recipes)
    from actmat.api.merging import merge_recipes

    quiet = shown.quiet or shown.json
    to_hub = any(str(r.out).startswith("hf://") for r in recipes)
    with hub_bars(quiet=quiet) if to_hub else nullcontext(), showing_progress(quiet=quiet) as progress:
        reports = merge_recipes(recipes, run, progress)
    print_reports(reports, shown, layout)


def print_reports(
    reports: Sequence[MergeReport], shown: flags.OutputFlags, layout: str = "merge", *, printed: bool = False
) -> None:
    """Print the results of merges: JSON, warnings only, or summaries unless these are `printed`."""
    from actmat.cli.summary import merge_data, print_summary, print_warnings

    if shown.quiet:
        print_warnings(reports[0].plan)
    with optional_stdout("The merge is complete."):
        if shown.json:
            print_result(layout, {"outputs": [merge_data(r) for r in reports]})
        for report in () if shown.json or shown.quiet or printed else reports:
            print_summary(report)
