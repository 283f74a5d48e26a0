"""`actmat tune`: find the best merge from unlabeled inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from actmat.cli import flags
from actmat.cli.data import COMPARED, InputFlags, pairs_of
from actmat.cli.flags import FlagFields, RecipeFlags, split_list, split_name
from actmat.cli.listing import command
from actmat.cli.merge import refuse_no_output
from actmat.cli.screen import print_result, showing_progress
from actmat.flag import Flag, Setting
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.extras.tune.evaluate import Score
    from actmat.extras.tune.space import SearchSpace
    from actmat.recipe import Recipe


@dataclass(frozen=True)
class SearchFlags:
    """Flags and settings of the search."""

    methods: Annotated[
        str | None, Flag(help="Methods to try, such as ties,actmat@pico, or 'all'; default: five, of adapters three.")
    ] = None
    scales: Annotated[str | None, Flag(help="Scales to try, such as 0.3,0.5,1.")] = None
    score: Annotated[
        str, Flag(help="divergence, disagreement, perplexity, accuracy (with labels), or lm-eval:TASK,TASK.")
    ] = "divergence"
    minutes: Annotated[
        float | None, Flag(help="Minutes for refining after the first merge; default: until all is tried.", low=0)
    ] = None
    budget: Annotated[int | None, Flag(help="Number of merges to try at most.", low=1)] = None
    least_agreement: Annotated[
        float, Setting("Share of its predictions that every expert must keep, 0 to 1.", low=0, high=1)
    ] = 0.0
    limit: Annotated[int | None, Setting("Questions per lm-eval task; default: all.", low=1)] = None
    classes: Annotated[
        tuple[str, ...], Setting("Classes of images, for CLIP: [EXPERT=]a,b,c or a file; default: the folders' names.")
    ] = ()
    keep_work: Annotated[bool, Setting("Keep the merges that were tried.")] = False

    def chosen_space(self) -> SearchSpace:
        """The search space from the flags.

        Raises:
            RecipeError: the space is not valid.
        """
        from actmat.extras.tune.space import make_space

        listed = {"methods": self.methods, "scales": self.scales}
        return make_space({name: split_list(text) for name, text in listed.items() if text})

    def chosen_score(self, recipe: Recipe, batch_size: int) -> Score:
        """The score from the flags.

        Raises:
            RecipeError: lm-eval is not installed, or does not know the task.
        """
        from actmat.extras.tune.evaluate import ScoreName
        from actmat.extras.tune.harness import PREFIX, LmEval

        if self.score.startswith(PREFIX):
            tasks, files = split_list(self.score.removeprefix(PREFIX)), recipe.base or recipe.experts[0].path
            return LmEval(tasks, files, limit=self.limit, batch_size=batch_size)
        if self.limit is not None:
            raise typer.BadParameter("limit needs --score lm-eval:TASK,TASK; samples is the number of inputs")
        if self.score not in get_args(ScoreName):
            expected = f"{', '.join(get_args(ScoreName))}, or lm-eval:TASK,TASK"
            raise typer.BadParameter(f"--score is one of {expected}; got '{self.score}'")
        return cast("Score", self.score)


def _named_classes(texts: Sequence[str], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Expert -> names of its classes; classes without a name apply to all experts."""
    out: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, listed = split_name(text)
        if name and name not in names:
            raise typer.BadParameter(f"classes of '{name}': no expert has this name; experts: {', '.join(names)}")
        if (path := Path(listed)).is_file():
            listed = ",".join(path.read_text(encoding="utf-8").splitlines())
        out |= dict.fromkeys([name] if name else names, tuple(split_list(listed)))
    return out


@command("choose", "found and merged", imports_torch=True)
def tune(
    *,
    recipe: flags.RecipeArgument = None,
    fields: Annotated[
        RecipeFlags, FlagFields(without=("method", "options", "scale", "space", "blocks"), set=("statistics", "drop"))
    ],
    run: Annotated[RunSettings, FlagFields(without=("diagnose",))],
    asked: Annotated[InputFlags, COMPARED],
    search: SearchFlags,
    shown: flags.OutputFlags,
) -> None:
    """Find the best merge from a few unlabeled inputs of each expert.

    actmat tune -b BASE -e math=M --data math=math.jsonl
           -e code=C --data code=code.jsonl --out BEST

    Begins with RegMean on some of the inputs, as 'actmat merge --data', and
    says what it keeps; then tries other methods and scales, as long as allowed
    by --minutes. The score is the distance of the merged model's predictions
    from each expert's, on that expert's inputs. No labels are needed. Half of
    the inputs are held out to test whether the winner is better than the
    average. Adapters become an adapter, with -b a model. BEST.tune has the
    recipe, all trials (tune.json) and a page (tune.html). To continue an
    interrupted search, repeat the command.
    """
    from actmat.cli.searching import print_search
    from actmat.extras.tune.settings import TuneSettings
    from actmat.extras.tune.tuning import READ, tune_recipe

    wanted, *others = fields.recipes(recipe)
    if others:
        raise typer.BadParameter("tune takes one merge: one weight per expert")
    refuse_no_output([wanted])
    if not asked.data:
        raise typer.BadParameter("no inputs given: pass unlabeled inputs as --data NAME=INPUTS, once per expert")
    named = pairs_of(asked.data)
    places = dict.fromkeys(wanted.labels, named) if isinstance(named, str) else named
    classes = _named_classes(search.classes, list(places))
    around = asked.settings().templates(wanted)
    sources = {
        name: asked.options(place, READ, classes=classes.get(name, ()), template=around.get(name))
        for name, place in places.items()
    }
    shared = {n: getattr(search, n) for n in ("minutes", "budget", "least_agreement", "keep_work")}
    names = ("model_class", "model_dtype", "new_tokens")
    shared |= {name: value for name in names if (value := getattr(asked, name)) is not None}
    settings = TuneSettings(score=search.chosen_score(wanted, asked.batch_size), **shared)
    with showing_progress(quiet=shown.quiet or shown.json, lines=True) as progress:
        report = tune_recipe(wanted, search.chosen_space(), sources, settings, run, progress)
    if shown.json:
        print_result("tune", report.to_json(), long=("trials",), full=shown.full)
    elif shown.quiet:
        from actmat.cli.summary import print_warnings

        print_warnings(report.merged.plan)
    else:
        print_search(report)
