"""`actmat tune`: find the best merge from unlabeled inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from actmat.cli import flags
from actmat.cli.data import pairs_of
from actmat.cli.flags import DataFlags, FlagFields, RecipeFlags, split_name
from actmat.cli.listing import command
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.extras.tune.evaluate import Score
    from actmat.extras.tune.space import SearchSpace
    from actmat.recipe import Recipe


def _option(flag: str, text: str, **more: Any) -> Any:
    return typer.Option(flag, help=text, rich_help_panel="Search", **more)


@dataclass(frozen=True)
class SearchFlags:
    """Flags of the search."""

    methods: Annotated[
        str | None,
        _option("--methods", "Methods to try, such as ties,actmat@pico, or 'all' (default: five, of adapters three)."),
    ] = None
    scales: Annotated[str | None, _option("--scales", "Scales to try, such as 0.3,0.5,1.")] = None
    score: Annotated[
        str,
        _option("--score", "divergence, disagreement, perplexity, accuracy (with labels), or lm-eval:TASK,TASK."),
    ] = "divergence"
    limit: Annotated[int | None, _option("--limit", "Questions per lm-eval task (default: all).", min=1)] = None
    label_column: Annotated[str | None, _option("--label-column", "Column of labels, for --score accuracy.")] = None
    classes: Annotated[
        list[str] | None,
        _option("--classes", "Classes of images, for CLIP: [NAME=]a,b,c or a file (default: the folders' names)."),
    ] = None
    template: Annotated[
        str | None, _option("--template", "Prompt for CLIP; {} is the class (default: a photo of a {}.).")
    ] = None
    minutes: Annotated[
        float | None,
        _option("--minutes", "Minutes for refining after the first merge (default: until all is tried).", min=0),
    ] = None
    budget: Annotated[int | None, _option("--budget", "Number of merges to try at most.", min=1)] = None
    least_agreement: Annotated[
        float,
        _option("--least-agreement", "Share of its predictions that every expert must keep, 0 to 1.", min=0, max=1),
    ] = 0.0
    inputs: Annotated[
        int,
        _option(
            "--samples",
            "Inputs per expert: half for the search, half for the final comparison.",
            min=2,
        ),
    ] = 128
    model_dtype: Annotated[flags.RunDtype, _option("--model-dtype", "Dtype of the models while they run.")] = "float32"
    keep_work: Annotated[bool, _option("--keep-work", "Keep the merges that were tried.")] = False

    def chosen_space(self) -> SearchSpace:
        """The search space from the flags.

        Raises:
            RecipeError: the space is not valid.
        """
        from actmat.extras.tune.space import make_space

        listed = {"methods": self.methods, "scales": self.scales}
        return make_space({k: [x.strip() for x in v.split(",") if x.strip()] for k, v in listed.items() if v})

    def chosen_score(self, recipe: Recipe, batch_size: int) -> Score:
        """The score from the flags.

        Raises:
            RecipeError: lm-eval is not installed, or does not know the task.
        """
        from actmat.extras.tune.evaluate import ScoreName
        from actmat.extras.tune.harness import PREFIX, LmEval

        if self.score.startswith(PREFIX):
            tasks = [t.strip() for t in self.score.removeprefix(PREFIX).split(",") if t.strip()]
            files = recipe.base or recipe.experts[0].path
            return LmEval(tasks, files, limit=self.limit, batch_size=batch_size)
        if self.limit is not None:
            raise typer.BadParameter("--limit needs --score lm-eval:TASK,TASK; to limit inputs, use --samples")
        if self.score not in get_args(ScoreName):
            raise typer.BadParameter(
                f"--score is one of {', '.join(get_args(ScoreName))}, or lm-eval:TASK,TASK; got '{self.score}'"
            )
        return cast("Score", self.score)


def _named_classes(given: Sequence[str], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Expert -> names of its classes; classes without a name apply to all experts."""
    out: dict[str, tuple[str, ...]] = {}
    for text in given:
        name, listed = split_name(text)
        path = Path(listed)
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else listed.split(",")
        classes = tuple(c.strip() for c in lines if c.strip())
        if name and name not in names:
            raise typer.BadParameter(f"--classes names '{name}', which is not an expert; experts: {', '.join(names)}")
        out |= dict.fromkeys([name] if name else names, classes)
    return out


def _places(wanted: Recipe, data: Sequence[str] | None) -> dict[str, str]:
    """Expert -> its data; raises `typer.BadParameter` without an output or data."""
    if wanted.out is None:
        raise typer.BadParameter("no output given: pass --out OUT, or set 'out' in the recipe")
    if not data:
        raise typer.BadParameter("no inputs given: pass unlabeled inputs as --data NAME=DATA, once per expert")
    named = pairs_of(data)
    return dict.fromkeys(wanted.labels, named) if isinstance(named, str) else named


@command("choose", "found and merged", imports_torch=True)
def tune(
    *,
    recipe: flags.RecipeArgument = None,
    given: Annotated[RecipeFlags, FlagFields(without=("method", "options", "scale", "space"))],
    run: Annotated[RunSettings, FlagFields(without=("diagnose",))],
    data: Annotated[DataFlags, FlagFields(without=("samples", "dtype"))],
    search: SearchFlags,
    json: flags.Json = False,
    full: Annotated[bool, typer.Option("--full", help="With --json: include every trial.")] = False,
    quiet: flags.Quiet = False,
) -> None:
    """Find the best merge from a few unlabeled inputs of each expert.

    actmat tune -b BASE -e math=M -e code=C
           --data math=math.jsonl --data code=code.jsonl --out BEST

    Begins with RegMean on some of the inputs, as 'actmat merge --data', and
    says what it keeps; then tries other methods and scales, as long as
    --minutes allows. The score is the distance of the merged model's
    predictions from each expert's, on that expert's inputs. No labels are
    needed. Half of the inputs are held out to test whether the winner is
    better than the average. Adapters become an adapter. BEST.tune has the
    recipe, all trials (tune.json) and a page (tune.html). To continue an
    interrupted search, repeat the command.
    """
    from actmat.cli.searching import print_search, showing_search
    from actmat.extras.tune.settings import TuneSettings
    from actmat.extras.tune.tuning import tune_recipe

    (wanted, *_) = given.recipes(recipe)
    places = _places(wanted, data.data)
    settings = TuneSettings(
        score=search.chosen_score(wanted, data.batch_size),
        minutes=search.minutes,
        budget=search.budget,
        least_agreement=search.least_agreement,
        model_class=data.model_class,
        dtype=search.model_dtype,
        new_tokens=data.new_tokens,
        keep=search.keep_work,
        as_adapter=recipe is None and "to" not in given,
    )
    classes = _named_classes(search.classes or (), list(places))
    more = {"max_samples": search.inputs, "label_column": search.label_column, "template": search.template}
    sources = {n: data.options(place, classes=classes.get(n, ()), **more) for n, place in places.items()}
    with showing_search(quiet=quiet or json) as progress:
        report = tune_recipe(wanted, search.chosen_space(), sources, settings, run, progress)
    if json:
        from actmat.cli.screen import print_result

        print_result("tune", report.to_json(), long=("trials",), full=full)
    elif quiet:
        from actmat.cli.summary import print_warnings

        print_warnings(report.merged.plan)
    else:
        print_search(report)
