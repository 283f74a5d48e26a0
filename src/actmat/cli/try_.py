"""`actmat try`: merge in memory and query the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actmat.cli import flags
from actmat.cli.data import ModelClass, ModelDtype
from actmat.cli.flags import FlagFields, RecipeFlags, split_list
from actmat.cli.listing import command
from actmat.cli.screen import console, escape, print_result, showing_progress
from actmat.cli.streams import say
from actmat.flag import Flag, Setting
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.extras.models.loading import Loaded
    from actmat.recipe import Recipe


@dataclass(frozen=True)
class QuestionFlags:
    """Flags and settings of the queries."""

    prompt: Annotated[list[str] | None, Flag(help="Text to continue, or a question, once per text.", repeated=True)] = (
        None
    )
    new_tokens: Annotated[int, Flag(help="Maximum number of tokens per answer.", low=1)] = 64
    images: Annotated[str | None, Flag(help="Folder of images, with or without one subfolder per class.")] = None
    lm_eval: Annotated[str | None, Flag(help="Tasks of lm-eval, such as gsm8k,arc_easy.")] = None
    limit: Annotated[int | None, Flag(help="Questions per lm-eval task; default: all.", low=1)] = None
    written: Annotated[bool, Flag(names=("--self",), help="Only show the prompts that each expert writes itself.")] = (
        False
    )
    compare: Annotated[bool, Flag(help="Also query the base and every expert.")] = False
    plain: Annotated[bool, Setting("Do not use the tokenizer's chat template.")] = False
    classes: Annotated[str, Setting("Classes of images, for CLIP: a,b,c; default: the names of the folders.")] = ""
    template: Annotated[
        str | None, Setting("Around prompts of --self, or a class of CLIP; {} is the place; default: a photo of a {}.")
    ] = None
    model_class: ModelClass = None
    model_dtype: ModelDtype = "auto"

    def check(self) -> None:
        """Raise if there is no query, or a flag that no query uses."""
        if not (self.prompt or self.images or self.lm_eval or self.written):
            raise typer.BadParameter("no query given: pass --prompt TEXT, --images FOLDER, --lm-eval TASK or --self")
        if (self.classes and not self.images) or (self.limit is not None and not self.lm_eval):
            raise typer.BadParameter("classes need --images, and --limit needs --lm-eval")

    def asker(self, recipe: Recipe) -> Callable[[Loaded], dict[str, Any]]:
        """Function from a model to its answers as plain data.

        Raises:
            RecipeError: lm-eval is not installed, or does not know the task.
        """
        from actmat.extras.tune.harness import LmEval
        from actmat.extras.tune.trying import answer, classify, images_of

        tasks, files = split_list(self.lm_eval or ""), recipe.base or recipe.experts[0].path
        scored = LmEval(tasks, files, limit=self.limit) if tasks else None
        if self.images:
            images_of(self.images)  # fail before merging

        def ask(loaded: Loaded) -> dict[str, Any]:
            answers: dict[str, Any] = {}
            if self.prompt:
                chat = False if self.plain else None
                answers["answers"] = [answer(loaded, p, new_tokens=self.new_tokens, chat=chat) for p in self.prompt]
            if self.images:
                rows = classify(loaded, self.images, classes=split_list(self.classes), template=self.template)
                answers["images"] = [asdict(row) for row in rows]
            if scored is not None:
                answers["scores"] = scored.scores(loaded.model)
            return answers

        return ask


@command("choose", "answered", imports_torch=True)
def try_(
    *,
    recipe: flags.RecipeArgument = None,
    fields: Annotated[
        RecipeFlags, FlagFields(without=("out", "blocks"), set=("statistics", "dtype", "to", "rank", "drop"))
    ],
    run: Annotated[
        RunSettings, FlagFields(only=("device", "device_memory", "max_memory", "threads"), set=("max_memory",))
    ],
    question: QuestionFlags,
    shown: flags.JsonQuiet,
) -> None:
    """Merge in memory and query the result; nothing is written.

    actmat try -b BASE -e EXPERT1 -e EXPERT2 --prompt "2 + 2 ="
    actmat try -b BASE -e E1 -e E2 -m ties -m actmat --prompt "2 + 2 ="
    actmat try -b BASE -e E1 -e E2 --images photos/
    actmat try -b BASE -e E1 -e E2 --lm-eval gsm8k --limit 50

    Takes the recipe and the flags of 'actmat merge'. Several methods or option
    values are queried one after the other. --compare also queries the base and
    every expert. Answers are not sampled: the same command gives the same text.
    """
    question.check()
    recipes = fields.recipes(recipe)
    if question.written:
        _show_written(recipes[0], run, question, shown)
        return
    ask = question.asker(recipes[0])
    results = []
    for name, loaded in _models(recipes, run, question, quiet=shown.quiet or shown.json):
        answers = {"model": name, **ask(loaded)}
        results.append(answers)
        if not shown.json:
            _print(answers, question.prompt or [])
    if shown.json:
        print_result("try", {"prompts": question.prompt or [], "models": results})


def _models(
    recipes: Sequence[Recipe], run: RunSettings, question: QuestionFlags, *, quiet: bool
) -> Iterator[tuple[str, Loaded]]:
    """Yield name and model of each merge, and of the inputs with --compare; one at a time is in memory."""
    from actmat.extras.models.in_memory import run_in_memory
    from actmat.extras.models.loading import load_model
    from actmat.extras.tune.memory import place_models
    from actmat.extras.tune.space import MergeChoice
    from actmat.recipe.values import format_value

    place = place_models(run, question.model_dtype)
    options: dict[str, Any] = {"model_class": question.model_class, "place": place}
    base = ""
    for wanted in recipes:
        with showing_progress(quiet=quiet) as progress:
            merged = run_in_memory(wanted, run, progress)
        base, recipe = merged.base, merged.plan.recipe
        loaded = merged.load(**options)
        if loaded.note and not quiet:
            say(f"note: {loaded.note}")
        del merged
        where = "" if recipe.space == "full" else f" --set space={recipe.space}"
        where += "".join(f" -w {format_value(w)}" for w in recipe.weights) if {*recipe.weights} - {1.0} else ""
        yield str(MergeChoice(recipe.method, recipe.options)) + where, loaded
        del loaded
    if question.compare:
        yield "base", load_model(base, **options)
        for expert in recipes[0].experts:
            yield expert.label, load_model(expert.path, adapters_base=base, **options)


def _show_written(recipe: Recipe, run: RunSettings, question: QuestionFlags, shown: flags.OutputFlags) -> None:
    """Print the prompts that each expert writes."""
    from actmat.extras.tune.kept import read_written
    from actmat.extras.tune.sources import InputSettings

    names = ("template", "model_class", "model_dtype")
    settings = InputSettings(**{name: getattr(question, name) for name in names})
    with showing_progress(quiet=shown.quiet or shown.json, lines=True) as progress:
        prompts = read_written(recipe, settings, run, progress)
    rows = [{"model": label, "gain": gain, "written": list(texts)} for label, (texts, gain) in prompts.items()]
    if shown.json:
        print_result("try", {"prompts": [], "models": rows})
        return
    for label, (texts, gain) in prompts.items():
        console.print(f"[bold]{escape(label)}[/bold]: {gain:.2f} nats per token more probable than under the base")
        for text in texts:
            console.print(f"  {escape(text)}", soft_wrap=True)


def _print(answers: dict[str, Any], prompts: Sequence[str]) -> None:

    console.print(f"[bold]{escape(answers['model'])}[/bold]")
    for prompt, text in zip(prompts, answers.get("answers", ()), strict=False):
        if len(prompts) > 1:
            console.print(f"  {escape(prompt)}")
        console.print("\n".join(f"  {escape(line)}" for line in str(text).splitlines()) or "  (nothing)")
    rows = answers.get("images", ())
    for row in rows:
        mark = "" if row["folder"] in (None, row["label"]) else "  [yellow]not its folder[/yellow]"
        console.print(f"  {escape(row['image'])}: {escape(row['label'])} ({100 * row['probability']:.0f} %){mark}")
    if known := [r for r in rows if r["folder"] is not None]:
        right = sum(r["folder"] == r["label"] for r in known)
        console.print(f"  {right} of {len(known)} images are in the folder of their class")
    for task, metrics in answers.get("scores", {}).items():
        shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        console.print(f"  {escape(task)}: {escape(shown)}")


try_.__name__ = "try"  # 'try' is a Python keyword
