"""`actmat analyze NAME`: the paper's analyses, each as a table, a JSON file and a figure."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from actmat.cli import flags
from actmat.cli.flags import with_flags
from actmat.cli.listing import BAD_INPUTS, command
from actmat.errors import RecipeError
from actmat_experiments.commands.own import OwnCheckpoints, named, numbered, numbers, shape_of

app = typer.Typer(
    name="analyze",
    no_args_is_help=True,
    help="Measure the assumptions of the theorems behind ACTMat; each analysis gives a table, JSON and a figure.",
)
command("research", "measured and saved", f"there are results already; {BAD_INPUTS}")(app)

Demo = Annotated[Path, typer.Option("--demo", help="Output folder of 'actmat demo' to analyze.")]
Task = Annotated[str, typer.Option("--task", help="Task of the demo, such as digit or parity.")]
Moments = Annotated[int, typer.Option("--moments", min=1, help="Number of measurements.")]
Permutations = Annotated[int, typer.Option("--permutations", min=1, help="Permutations for the chance level.")]
At = Annotated[Literal["base", "expert"], typer.Option("--at", help="Weights: 'base', or 'expert' of the task.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of all random numbers.")]
Layers = Annotated[list[str] | None, typer.Option("--layer", help="Only weights of this pattern, such as '*up_proj*'.")]
DEMO = Path("demo-output")


@dataclass(frozen=True)
class Saving:
    """Where the result of an analysis goes."""

    out: Annotated[Path, typer.Option("--out", help="Folder of NAME.json, NAME.png and NAME.svg.")] = Path("analyses")
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace earlier results there.")] = False
    json: flags.Json = False
    quiet: flags.Quiet = False


def _analysis(work: Callable[..., Any]) -> Callable[..., None]:
    """Register a command that saves and shows the `Analysis` of a function."""

    @functools.wraps(work)
    def command(*, saving: Saving, **given: Any) -> None:
        _finish(work(**given), saving)

    parameters = inspect.signature(work, eval_str=True).parameters.values()
    added = inspect.Parameter("saving", inspect.Parameter.KEYWORD_ONLY, annotation=Saving)
    command.__dict__["__signature__"] = inspect.Signature([*parameters, added])
    command.__annotations__ = {p.name: p.annotation for p in (*parameters, added)}
    return app.command()(with_flags(command))


@_analysis
def theorem1(
    network: Annotated[
        Literal["mlp", "transformer"], typer.Option("--network", help="mlp, or transformer (17 tokens per image).")
    ] = "mlp",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of gradient descent.")] = 200,
    rate: Annotated[float, typer.Option("--rate", help="The fixed step.")] = 0.2,
    images: Annotated[int, typer.Option("--images", min=2, help="Photographs in the batch.")] = 500,
    width: Annotated[int, typer.Option("--width", min=4, help="Hidden width.")] = 32,
    seed: Seed = 0,
) -> Any:
    """Theorem 3.1 where it is exact: full-batch gradient descent on a small network."""
    from actmat_experiments.analyses import theorem1 as run

    with _working("descending", steps) as step:
        return run(network=network, n_steps=steps, rate=rate, n_images=images, width=width, seed=seed, on_step=step)


@_analysis
def drift(demo: Demo = DEMO, task: Task = "digit", layer: Layers = None, moments: Moments = 10) -> Any:
    """Theorem 3.1's angles along the fine-tuning run of a demo's expert: AdamW, minibatches."""
    from actmat_experiments.analyses import drift as again

    with _working("fine-tuning", None) as step:
        return again(demo, task=task, layers=layer, n_moments=moments, on_step=step)


@_analysis
def trajectory(
    demo: Demo = DEMO,
    task: Task = "digit",
    layer: Layers = None,
    moments: Moments = 10,
    statistics: Annotated[
        list[str] | None,
        typer.Option("--statistics", help="STEP=FOLDER of a saved checkpoint's Gram matrices, once per checkpoint."),
    ] = None,
) -> Any:
    """Angles of every layer's Gram matrix with the one at the end of training; from any family's checkpoints, too."""
    from actmat_experiments.analyses import drift as again
    from actmat_experiments.analyses.trajectory import KeptGrams, trajectory_of_statistics

    if statistics:
        return trajectory_of_statistics(numbered(statistics, "--statistics"))
    with _working("fine-tuning", None) as step, KeptGrams() as kept:
        done = again(demo, task=task, layers=layer, n_moments=moments, on_step=step, on_moment=kept.keep)
        return kept.result(done.title)


@_analysis
def scale(demo: Demo = DEMO, *, own: OwnCheckpoints) -> Any:
    """Compare the scales of the estimates D^T D over the experts."""
    from actmat_experiments.analyses import scale as run
    from actmat_experiments.analyses.demo import demo_scale

    with _working("measuring inputs", None), own.open() as given:
        return run(*given) if given else demo_scale(demo)


@_analysis
def cosine(
    demo: Demo = DEMO,
    sizes: Annotated[str, typer.Option("--samples", help="Sizes of the small samples.")] = "1,10,100",
    draws: Annotated[int, typer.Option("--draws", min=1, help="Small samples per size.")] = 5,
    *,
    own: OwnCheckpoints,
) -> Any:
    """Cosines of D^T D with the Gram matrix of the inputs, next to the identity and few samples (of a demo)."""
    from actmat_experiments.analyses import cosine as run
    from actmat_experiments.analyses.demo import demo_cosine

    wanted = numbers(sizes, "--samples")
    with _working("measuring inputs", None), own.open() as given:
        return run(*given) if given else demo_cosine(demo, sizes=wanted, n_draws=draws)


@_analysis
def correlation(
    demo: Demo = DEMO,
    task: Task = "digit",
    at: At = "base",
    sizes: Annotated[str, typer.Option("--samples", help="Numbers of samples.")] = "16,64,256,900",
    permutations: Permutations = 20,
    layer: Layers = None,
) -> Any:
    """Correlation of the size of a token's gradient with its input, against the level of chance."""
    from actmat_experiments.analyses.demo import demo_correlation

    wanted = numbers(sizes, "--samples")
    with _working("sample sizes", len(wanted)) as step:
        return demo_correlation(
            demo, task=task, at=at, sizes=wanted, n_permutations=permutations, layers=layer, on_size=step
        )


@_analysis
def distribution(
    demo: Demo = DEMO,
    task: Task = "digit",
    at: At = "base",
    samples: Annotated[int, typer.Option("--samples", min=2, help="Samples in the batch.")] = 100,
    permutations: Permutations = 5,
    layer: Layers = None,
) -> Any:
    """Distribution of the absolute correlations of input products with gradient sizes, against chance."""
    from actmat_experiments.analyses.demo import demo_distribution

    with _working("correlations", None):
        return demo_distribution(demo, task=task, at=at, n_samples=samples, n_permutations=permutations, layers=layer)


@_analysis
def theorem2(
    tasks: Annotated[int, typer.Option("--tasks", help="Number of tasks, 2 to 6.")] = 3,
    width: Annotated[int, typer.Option("--width", min=4, help="Hidden width.")] = 32,
    activation: Annotated[Literal["relu", "tanh"], typer.Option("--activation", help="relu or tanh.")] = "relu",
    method: Annotated[str, typer.Option("--method", "-m", help="Merge rule.")] = "actmat",
    seed: Seed = 0,
) -> Any:
    """Expected negative transfer and its bound, on a network with known Lipschitz constants."""
    from actmat_experiments.analyses import theorem2 as run

    with _working("training", 300 + 200 * tasks) as step:
        return run(n_tasks=tasks, width=width, activation=activation, method=method, seed=seed, on_step=step)


@_analysis
def transfer(
    demo: Demo = DEMO,
    method: Annotated[str, typer.Option("--method", "-m", help="One of the demo's merges.")] = "actmat",
) -> Any:
    """Theorem 3.3 on real networks: mean absolute negative transfer of every task, and its bounds."""
    from actmat_experiments.analyses.demo_bounds import demo_transfer

    with _working("replacing layers", None):
        return demo_transfer(demo, method=method)


@_analysis
def interference(
    demo: Demo = DEMO,
    method: Annotated[list[str] | None, typer.Option("--method", "-m", help="Only these of the demo's merges.")] = None,
    merged: Annotated[list[str] | None, typer.Option("--merged", help="NAME=PATH of a further merge.")] = None,
    *,
    own: OwnCheckpoints,
) -> Any:
    """Changes of every expert's layer outputs by merges, on the expert's own inputs."""
    from actmat_experiments.analyses import interference as run
    from actmat_experiments.analyses.demo import demo_interference

    others = named(merged, "--merged")
    with _working("measuring inputs", None), own.open() as given:
        if not given:
            return demo_interference(demo, methods=method, merged=others)
        if method:
            raise RecipeError("--method chooses among the merges of a demo; name your own merges with --merged.")
        base, experts, grams = given
        return run(base, experts, others, grams)


@_analysis
def packed(
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Cache folder of 'actmat experiment run'; shows its scores, too.")
    ] = None,
) -> Any:
    """The paper's ablation of packed attention: RegMean with and without the split of q, k and v."""
    from actmat_experiments.analyses.packed import packed as run

    with _working("reading scores", None):
        return run(cache)


@_analysis
def cost(
    shape: Annotated[
        list[str] | None, typer.Option("--shape", help="OxI of a layer; 1024x1024 if none is given.")
    ] = None,
    experts: Annotated[int, typer.Option("--experts", min=1, help="Number of experts.")] = 7,
    method: Annotated[list[str] | None, typer.Option("--method", "-m", help="Only these methods.")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")] = "cpu",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Measurements per median.")] = 3,
    seed: Seed = 0,
) -> Any:
    """Operations and measured time of every method on given layer shapes."""
    from actmat_experiments.analyses import cost as run
    from actmat_experiments.core import all_methods

    shapes = [shape_of(s) for s in shape or ["1024x1024"]]
    with _working("timing", len(shapes) * len(method or all_methods())) as step:
        return run(shapes, n_experts=experts, methods=method, device=device, repeats=repeats, seed=seed, on_method=step)


@contextlib.contextmanager
def _working(what: str, total: int | None) -> Iterator[Callable[[], None]]:
    """A bar on stderr; gives what advances it. Without matplotlib nothing begins that would end as a figure."""
    from rich.progress import Progress

    from actmat.cli.screen import note_console
    from actmat_experiments.analyses.result import need_matplotlib

    need_matplotlib()
    with Progress(console=note_console, transient=True, disable=not note_console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def _finish(result: Any, saving: Saving) -> None:
    """Save an `Analysis`, then show it."""
    from actmat.cli.screen import console, print_result
    from actmat_experiments.analyses import save_analysis

    paths = save_analysis(result, saving.out, overwrite=saving.overwrite)
    if saving.json:
        print_result("analyze", {**result.to_json(), "files": [str(path) for path in paths]})
    elif not saving.quiet:
        for table in result.tables():
            console.print(table)
        console.print(f"Saved {paths[0]}, .png, .svg", soft_wrap=True)
