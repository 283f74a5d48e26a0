"""`transfer`: Theorem 3.3 on real networks: per task the mean absolute negative transfer, against two sums over layers.

    E|l(f^(x)) - l(f_t(x))|  <=  sum_l gamma_l E||e_l||                                                       (1)
                             <=  sum_l gamma_l E||e*_l||
                               + sum_{l linear} zeta_l ( sum_s ||C_s - C^_s||_F (||D^||_2 + ||D_s||_2) + ||R||_F )   (2)

The layers `l` are the modules in the order of execution. `e_l` is the local error: how much the output of layer `l`
changes when only its parameters are merged, on the inputs that it has in the expert. `e*_l` is that of the merge with
the true Gram matrices, `zeta_l = gamma_l ||S_l^+||_2 E||z_l||`. The bracket of (2) bounds what Lemma B.3 of the paper
bounds, with smaller constants (docs/analyses/theorem2.md).

(1) needs no product of Lipschitz constants, which attention does not have. The layers of the merged model are replaced
by the expert's one by one, from the first to the last, and the loss changes by a telescoping sum; `gamma_l` is the
smallest constant with which each change is at most `gamma_l ||e_l||` on every sample: a Lipschitz constant of what
follows layer `l`, on this data.

Shapes: `N` samples, `O` out_features, `I` in_features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from actmat.errors import NumericalError, RecipeError
from actmat_experiments.analyses.result import Analysis, short_names, shown
from actmat_experiments.analyses.stages import Stage, by_sample, outputs_of, stages_of
from actmat_experiments.analyses.taps import Tap, reading
from actmat_experiments.analyses.theorem2 import MinimizerGap, best_scale, least_interference, minimizer_gap
from actmat_experiments.harness.table import new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

State = Mapping[str, Tensor]
Losses = Callable[[nn.Module], Tensor]
"""From the model to the loss of every sample, `N`, in one forward pass."""


@dataclass(frozen=True, slots=True)
class StageTerms:
    """One stage of one task.

    Args:
        gamma: the smallest constant on this data; NaN for a stage without an output.
        local: `E||e_l||`; of a stage without an output, the mean absolute change of the loss.
        optimum: `E||e*_l||`, of a linear map; else `local`.
        zeta: `gamma ||S^+||_2 E||z||`, zero for a stage that is no linear map.
        estimates: `sum_s ||C_s - C^_s||_F (||D^||_2 + ||D_s||_2) + ||R||_F`.
        input: `E||z_l||`.
    """

    gamma: float
    local: float
    optimum: float
    zeta: float
    estimates: float
    input: float

    @property
    def propagated(self) -> float:
        """The stage's part of (1)."""
        return self.local if math.isnan(self.gamma) else self.gamma * self.local

    @property
    def bound(self) -> float:
        """The stage's part of (2)."""
        if math.isnan(self.gamma):
            return self.local
        return self.gamma * self.optimum + self.zeta * self.estimates


@dataclass(frozen=True, slots=True)
class TaskTransfer:
    """One task: `E|transfer|`, `E[transfer]`, and its stages by name."""

    absolute: float
    signed: float
    stages: Mapping[str, StageTerms]

    @property
    def propagated(self) -> float:
        """The right side of (1)."""
        return sum(s.propagated for s in self.stages.values())

    @property
    def bound(self) -> float:
        """The right side of (2)."""
        return sum(s.bound for s in self.stages.values())


@dataclass(frozen=True)
class TransferResult(Analysis):
    """Tasks by name."""

    name = "transfer"
    title: str
    tasks: Mapping[str, TaskTransfer]

    def check(self) -> None:
        """Both inequalities for every task, up to the rounding of float32 forward passes.

        Raises:
            NumericalError: one does not hold, which would be an error of this package.
        """
        wrong = [
            f"{task}: {what}: {low:.6g} > {high:.6g}"
            for task, t in self.tasks.items()
            for what, low, high in (
                ("E|transfer| <= (1)", t.absolute, t.propagated),
                ("(1) <= (2)", t.propagated, t.bound),
            )
            if not low <= high * (1 + 1e-4) + 1e-6
        ]
        if wrong:
            raise NumericalError("Theorem 3.3 is violated. It cannot be: please report it.", wrong)

    def data(self) -> dict[str, Any]:
        """Both sides, and every stage."""
        return {
            "title": self.title,
            "tasks": {
                n: {"absolute": t.absolute, "signed": t.signed, "propagated": t.propagated, "bound": t.bound,
                    "stages": {s: {**asdict(x), "propagated": x.propagated, "bound": x.bound}
                               for s, x in t.stages.items()}}
                for n, t in self.tasks.items()
            },
        }  # fmt: skip

    def tables(self) -> list[Table]:
        """Sides per task, and the stages' parts, mean over tasks."""
        caption = (
            "nats. |.|: mean absolute transfer; (1): local errors, propagated; (2): the same split into\n"
            "the rest with true Gram matrices, and what the estimates add."
        )
        sums = new_table(f"Negative transfer and its bounds: {self.title}", caption, "task",
                         ("mean", "|.|", "(1)", "(1) / |.|", "(2)", "(2) / |.|"))  # fmt: skip
        for name, t in self.tasks.items():
            low, high = (x / t.absolute if t.absolute else math.nan for x in (t.propagated, t.bound))
            cells = (t.signed, t.absolute, t.propagated, low, t.bound, high)
            sums.add_row(escape(name), *(f" {shown(c)}" for c in cells))
        parts = new_table("The stages' parts, mean over tasks", "", "stage", ("gamma", "E|e|", "E|e*|", "(1)", "(2)"))
        for name in self._stages():
            rows = [t.stages[name] for t in self.tasks.values()]
            values = [
                sum(getattr(r, f) for r in rows) / len(rows)
                for f in ("gamma", "local", "optimum", "propagated", "bound")
            ]
            parts.add_row(escape(short_names([name])[name]), *(f" {shown(v)}" for v in values))
        return [sums, parts]

    def figure(self) -> Figure:
        """Both sides per task on a logarithmic scale."""
        from actmat_experiments.harness.figures import COLORS, MARKERS, new_axes

        figure, axes = new_axes(f"Mean absolute negative transfer and its bounds ({self.title})")
        names = list(self.tasks)
        for index, (field, label) in enumerate((("absolute", "E|transfer|"), ("propagated", "(1)"), ("bound", "(2)"))):
            values = [getattr(self.tasks[n], field) or math.nan for n in names]
            axes.plot(names, values, MARKERS[index], color=COLORS[index], markersize=6, label=label)
        axes.set_yscale("log")
        axes.set_ylabel("nats")
        figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
        return figure

    def _stages(self) -> list[str]:
        return list(next(iter(self.tasks.values())).stages)


@torch.no_grad()
def transfer(
    model: nn.Module,
    base: State,
    experts: Mapping[str, State],
    merged: State,
    losses: Mapping[str, Losses],
    *,
    title: str = "model",
) -> TransferResult:
    """Both sides for every task.

    Args:
        model: of the architecture, in evaluation mode; its parameters are overwritten.
        base: parameters by name, as those of `experts` and `merged`.
        merged: any merge; the bound is meant for one with `C^_t = D_t^T D_t`.
        losses: of every expert on its own task.

    Raises:
        RecipeError: experts and losses have other names.
        NumericalError: an inequality does not hold.
    """
    if experts.keys() != losses.keys() or not experts:
        raise RecipeError(f"Every expert needs its own loss; got {sorted(experts)} and {sorted(losses)}.")
    first = next(iter(experts))
    _load(model, experts[first])
    stages = stages_of(model, lambda: losses[first](model))
    inputs = {task: _inputs(model, stages, experts[task], losses[task]) for task in experts}
    gaps = {
        s.name: _gaps(s.tap, base, experts, merged, {t: z[s.name] for t, z in inputs.items()})
        for s in stages
        if s.tap is not None
    }
    found = {}
    for task, state in experts.items():
        found[task] = _task(model, stages, state, merged, losses[task], inputs[task], gaps, base)
    result = TransferResult(title, found)
    result.check()
    return result


def _load(model: nn.Module, state: State) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(state[name])


def _put(model: nn.Module, names: Sequence[str], state: State) -> None:
    own = dict(model.named_parameters())
    for name in names:
        own[name].data.copy_(state[name])


def _inputs(model: nn.Module, stages: Sequence[Stage], state: State, loss: Losses) -> dict[str, Tensor]:
    """Inputs of every linear map in the expert, `N tokens I` in float64."""
    _load(model, state)
    found: dict[int, Tensor] = {}
    taps = [s.tap for s in stages if s.tap is not None]
    with reading(taps, lambda tap, z, y: found.update({id(tap): z})):
        n = len(loss(model))
    return {s.name: by_sample(found[id(s.tap)], n, s.tap).double() for s in stages if id(s.tap) in found}


@dataclass(frozen=True, slots=True)
class _Gaps:
    """The blocks of one linear map: the merge with true Gram matrices as stored rows, and the lemma's quantities."""

    least: Sequence[Tensor]
    estimates: float
    inverse: float


def _gaps(tap: Tap, base: State, experts: Mapping[str, State], merged: State, inputs: Mapping[str, Tensor]) -> _Gaps:
    grams = [z.flatten(0, 1).mT @ z.flatten(0, 1) / (z.shape[0] * z.shape[1]) for z in inputs.values()]
    start, end = (tap.matrices(state[tap.weight_name].double()) for state in (base, merged))
    own = [tap.matrices(experts[t][tap.weight_name].double()) for t in inputs]
    least, estimates, inverse = [], 0.0, 0.0
    for block, origin in enumerate(start):
        deltas = [matrices[block] - origin for matrices in own]
        found = [d.mT @ d for d in deltas]
        factor = best_scale(grams, found)
        gap: MinimizerGap = minimizer_gap(end[block] - origin, deltas, grams, [factor * k for k in found])
        length = float(torch.linalg.matrix_norm(end[block] - origin, 2))
        lengths = [length + float(torch.linalg.matrix_norm(d, 2)) for d in deltas]
        estimates += sum(e * x for e, x in zip(gap.errors, lengths, strict=True)) + gap.residual
        inverse = 1 / gap.smallest
        least.append(origin + least_interference(deltas, grams))
    return _Gaps(least, estimates, inverse)


def _task(
    model: nn.Module,
    stages: Sequence[Stage],
    expert: State,
    merged: State,
    loss: Losses,
    inputs: Mapping[str, Tensor],
    gaps: Mapping[str, _Gaps],
    base: State,
) -> TaskTransfer:
    """Replace the stages of the merged model by the expert's, one by one from the first."""
    _load(model, merged)
    before_N, changes = loss(model).double(), {}
    whole_N = before_N
    for stage in stages:
        with outputs_of(stage) as outputs:
            loss(model)
            _put(model, stage.parameters, expert)
            after_N = loss(model).double()
        changes[stage.name] = _terms(stage, before_N - after_N, outputs, inputs, gaps, expert, merged)
        before_N = after_N
    transfer_N = whole_N - before_N
    return TaskTransfer(float(transfer_N.abs().mean()), float(transfer_N.mean()), changes)


def _norms(change: Tensor, n: int) -> Tensor:
    """Norm per sample; what all samples share (positions, biases between them) changes for each by the whole."""
    rows = change.reshape(1, -1).expand(n, -1) if change.shape[0] % n else change.reshape(n, -1)
    found: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return found


def _terms(
    stage: Stage,
    change_N: Tensor,
    outputs: Sequence[Tensor],
    inputs: Mapping[str, Tensor],
    gaps: Mapping[str, _Gaps],
    expert: State,
    merged: State,
) -> StageTerms:
    size_N = change_N.abs()
    if len(outputs) != 2:
        value = float(size_N.mean())
        return StageTerms(math.nan, value, value, 0.0, 0.0, math.nan)
    n = len(size_N)
    local_N = _norms(outputs[0].double() - outputs[1].double(), n)
    if stage.tap is not None and stage.tap.sequence_first:
        local_N = by_sample(outputs[0].double() - outputs[1].double(), n, stage.tap).reshape(n, -1).norm(dim=1)
    moved_N = local_N > 0
    gamma = float((size_N[moved_N] / local_N[moved_N]).max()) if bool(moved_N.any()) else 0.0
    local = float(local_N.mean())
    if stage.tap is None or stage.name not in gaps:
        return StageTerms(gamma, local, local, 0.0, 0.0, math.nan)
    gap, z = gaps[stage.name], inputs[stage.name]
    shift = [merged[p].double() - expert[p].double() for p in stage.parameters[1:]]
    own = stage.tap.matrices(expert[stage.tap.weight_name].double())
    parts = [z @ (best - mine).mT for best, mine in zip(gap.least, own, strict=True)]
    if shift:
        rows = [layer.rows_O for layer in stage.tap.maps]
        parts = [part + shift[0][r] for part, r in zip(parts, rows, strict=True)]
    optimum = float(torch.cat(parts, dim=-1).reshape(n, -1).norm(dim=1).mean())
    size = float(z.reshape(n, -1).norm(dim=1).mean())
    return StageTerms(gamma, local, optimum, gamma * gap.inverse * size, gap.estimates, size)
