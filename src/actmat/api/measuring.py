"""Measure merged models and experts on data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actmat.diagnostics.model import AgreementRow, DataResidual
from actmat.progress import Progress, usual_progress
from actmat.recipe.arguments import Location
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from torch import nn

    from actmat.extras.collect.staged import Batches


def agreement(
    directory: str | Path,
    data: Any,
    *,
    base: str | Path | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
    new_tokens: int = 32,
    model_class: str | None = None,
    model_dtype: str = "auto",
) -> tuple[AgreementRow, ...]:
    """Answers that a merge on disk kept of each of its experts, on a few inputs of the expert's task.

    An input is kept if the merge predicts the expert's class, or would write the expert's own greedy answer, with its
    end. What `auto` makes without inputs, and the plain average, are compared too where they can be made. One model is
    in memory at a time.

    Args:
        directory: output of `merge`, a model or an adapter; its manifest names the experts.
        data: a data set or a prompt for all experts, or expert -> its own (better: inputs of each expert's own task);
            experts that are not named are left out. A location means its first 64 samples, `DataOptions` says more.
        base: the checkpoint under adapters; default: as the manifest, else the adapter, says.
        device: of the models.
        progress: receives callbacks.
        new_tokens: tokens of an expert's own answer to a text, at most.
        model_class, model_dtype: transformers class (default: the config's) and dtype of the models.

    Raises:
        CheckpointError: no manifest there.
        RecipeError: data for an expert that the merge does not have.
        StatisticsError: data or a model that cannot be used, or answers that cannot be compared.
    """
    from actmat.extras.tune.kept import measure_agreement
    from actmat.extras.tune.sources import InputSettings

    settings = InputSettings(new_tokens=new_tokens, model_class=model_class, model_dtype=model_dtype)
    progress = progress or usual_progress()
    run = RunSettings(device=device)
    return measure_agreement(directory, data, settings, base=base, run=run, progress=progress)


def residual_on_data(
    directory: str | Path,
    statistics: Mapping[str, str | Path] | Sequence[str | Path],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[DataResidual, ...]:
    """Distance of a merged model from its experts on the inputs that their layers see, `rho_t` of measured inputs.

    `rho_t^2 = sum_l E||(W* - W_t) z||^2 / sum_l E||D_t z||^2` over the merged matrices `l` with a Gram matrix: 0 is as
    the expert, 1 as the base. A few tensors are in memory at a time, and no model is run.

    Args:
        directory: output of `merge`, a full model.
        statistics: expert -> what `actmat statistics collect` wrote for it, or one for each in their order.
        progress: called with tensors done and of how many.

    Raises:
        CheckpointError: no manifest there, or inputs that are gone.
        RecipeError: statistics for an expert that the merge does not have.
        StatisticsError: statistics of another model, or a merged adapter.
    """
    from actmat.extras.collect.on_data import measure_residuals

    return measure_residuals(directory, statistics, progress)


def staged_statistics(
    model: nn.Module,
    base: Location,
    experts: Mapping[str, Location],
    batches: Mapping[str, Batches],
    *,
    out: str | Path,
    blocks: str | None = None,
    off_diagonal: float = 0.95,
    compute_dtype: str = "float32",
) -> dict[str, Path]:
    """Measure the experts block by block, each block on the output of the merged blocks before it.

    The model starts as the average of the experts. For each block in turn, every expert's own block is put in, its
    task's batches are run and the Gram matrices of the block are stored; then the block is merged by `regmean` and
    stays in. One block of one expert is in memory beside the model. Blocks that are stored are not measured again, so
    that an interrupted call goes on. `merge(..., method="regmean", options={"off_diagonal": ...}, statistics=...)`
    with the result is RegMean++: layers outside the blocks have no statistics and are averaged, as there.

    Args:
        model: holds the weights of the `base`, and those of the last stage when this returns.
        experts: full checkpoints by name.
        batches: by the experts' names; called once per block.
        out: folder for the statistics, one folder per expert, and for the stages (`stages/`, may be deleted).
        blocks: name of the module whose children are the blocks, such as "model.layers"; default: the only
            `nn.ModuleList` that is in no other.
        off_diagonal: see `regmean`; 0.95 as published for vision, 0.1 for language.
        compute_dtype: of Gram matrices and merges, "float32" or "float64".

    Returns:
        The folder of every expert's statistics.

    Raises:
        StatisticsError: an expert is an adapter, has no batches, or an earlier call with other inputs was at `out`.
    """
    from actmat.extras.collect.staged import measure_blocks

    return measure_blocks(model, base, experts, batches, Path(out), blocks, off_diagonal, compute_dtype)
