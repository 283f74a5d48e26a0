"""`llm-qwen`: eight adapters of a chat model of half a billion weights, merged without data and by a few prompts.

The base is Qwen2.5-Coder-0.5B-Instruct. Experts are trained in two common ways, by a loss on the answer and by one on
the whole text, and every merge is asked in the words of the training and in other words of the same questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from actmat_experiments.harness.cache import Cache, digest
from actmat_experiments.harness.experiment import Made
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.request import RunRequest
from actmat_experiments.harness.settings import changed
from actmat_experiments.harness.sizes import size_file, store_size
from actmat_experiments.harness.suite import data_folder, refuse_flags, request_fields, score_file
from actmat_experiments.harness.training import Schedule, Start
from actmat_experiments.pretrained.decoder import Coder, write_base
from actmat_experiments.pretrained.qwen.experiment import Loss, Precision, WordedLlm
from actmat_experiments.pretrained.qwen.rows import chosen_rows
from actmat_experiments.pretrained.qwen.tasks import TASKS, load_tasks
from actmat_experiments.pretrained.suite import PUBLIC_TEXTS, chosen_tasks, copied_base, copy_model

ORIGINAL = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
"""The base on the hub. Its head is its embeddings."""
LIBRARIES = ("transformers", "gguf")
"""That read the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenSettings:
    """Settings of the suite, for `--set name=value`.

    Args:
        base: folder of the base, a checkpoint or its only GGUF file; default: the original on the hub. Its name is the
            model's in the scores.
        train, test: largest number of examples per task.
        prompts: of each task, in each wording, for merges by prompts.
        steps, batch_size: of every expert, and examples of each step.
        rate: highest learning rate; it falls to zero.
        rank, alpha: of LoRA on all linear layers.
        start: of LoRA's `A`: drawn `apart`, `shared` by all tasks, or apart and `small`, at 0.05 of its size.
        losses: a set of experts each: the loss is of the `answers`, or of the `whole` text.
        precision: of matrix products: TF32 is a GPU's, of which a CPU makes float32; bfloat16 is by autocast.
    """

    base: str = ""
    train: int = 1200
    test: int = 80
    prompts: int = 8
    steps: int = 96
    batch_size: int = 16
    rate: float = 2e-4
    rank: int = 16
    alpha: int = 32
    start: Start = "apart"
    losses: tuple[Loss, ...] = ("answers", "whole")
    precision: Precision = "tf32"


def run(request: RunRequest) -> None:
    """See `suites.Suite`; seeds and tasks are those of the request, and the regime is LoRA.

    Raises:
        RecipeError: a task, row or setting cannot be, or no data folder was given.
        CheckpointError: base or data cannot be had.
    """
    refuse_flags(request, regime="lora")
    rows = chosen_rows(request.methods)
    with Watch(request.console, request.cache / "logs") as watch:
        for experiment in experiments(request, watch):
            store_size(experiment, size_file(request.cache, request.suite))
            experiment.measure(rows, score_file(request.cache, request.suite))


def experiments(request: RunRequest, watch: Watch) -> Iterator[WordedLlm]:
    """One for each seed and loss; experts are not yet trained."""
    settings = changed(QwenSettings(), request.settings)
    folder = data_folder(request, PUBLIC_TEXTS)
    names = chosen_tasks(request, list(TASKS), "causal language model")
    tasks = load_tasks(folder, names, train=settings.train, validation=settings.prompts, test=settings.test)
    location = settings.base or ORIGINAL
    base = make_base(Cache(request.cache), location)
    decided = {name: value for name, value in asdict(settings).items() if name not in ("base", "losses")}
    name = Path(location).name + " from GGUF" * bool(_quantized(Path(location))) + f", r = {settings.rank}"
    name += f", A {settings.start}" * (settings.start != "apart")
    how, usual = ((x.steps, x.batch_size, x.rate) for x in (settings, QwenSettings()))
    name += f", {how[0]} steps of {how[1]} at {how[2]:g}" * (how != usual)
    for seed in request.seeds:
        for loss in settings.losses:
            yield WordedLlm(
                **request_fields(request, watch),
                model=f"{name}, loss on {_LEARNT[loss]}",
                regime="lora",
                seed=seed,
                digest=digest([decided, base.digest, [[task.name, task.content] for task in tasks]]),
                base=base,
                coder=Coder(base.path),
                tasks=tasks,
                steps_each=settings.steps,
                schedule=Schedule(1, settings.batch_size, settings.rate),
                loss=loss,
                rank=settings.rank,
                alpha=settings.alpha,
                start=settings.start,
                precision=settings.precision,
            )


def make_base(cache: Cache, location: str) -> Made:
    """The base in the cache, as a checkpoint.

    Args:
        location: folder, or place on the hub.
    """
    return copied_base(cache, location, LIBRARIES, _write_base)


_LEARNT = {"answers": "answers", "whole": "whole texts"}


def _write_base(folder: Path, out: Path) -> None:
    """The base as a checkpoint."""
    if _quantized(folder):
        write_base(folder, out, tied=True)
    else:
        copy_model(folder, out)


def _quantized(folder: Path) -> Sequence[Path]:
    return sorted(folder.glob("*.gguf"))
