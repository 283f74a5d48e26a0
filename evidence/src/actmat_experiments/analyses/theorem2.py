"""`theorem2`: expected negative transfer against its bound (Theorem 3.3), on a network with known Lipschitz constants.

    E[negative transfer] <= sum_l gamma_l E[local error of layer l]
                          + sum_l zeta_l sum_t ||C_t - C^_t||_F ||W^ - W_t||_2

The derivation, and every constant, is in docs/analyses/theorem2.md; the bound with the paper's printed constants stands
beside it. All expectations are means over the samples given,
so both sides are computed, not estimated.

Shapes: `N` samples, `F` outputs of the network, `C` classes, `I` in_features, `O` out_features of a layer, `T` tasks.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from actmat.errors import NumericalError, RecipeError
from actmat_experiments.analyses.printed import PrintedLemma, printed_lemma
from actmat_experiments.analyses.result import Analysis, shown
from actmat_experiments.analyses.theorem1 import MLP, ActivationName, new_mlp
from actmat_experiments.harness.table import new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from actmat.extras.demo.tasks import Examples


EPS = torch.finfo(torch.float64).eps


def least_interference(deltas: Sequence[Tensor], grams: Sequence[Tensor]) -> Tensor:
    """`(sum_t D_t C_t)(sum_t C_t)^+`, of all minimizers of `sum_t tr((D - D_t) C_t (D - D_t)^T)` the smallest, float64.

    For analyses of small layers: plain normal equations with a cut-off at float64's rounding, no options.
    """
    left_OI = _total([d.double() @ c.double() for d, c in zip(deltas, grams, strict=True)])
    merged_OI: Tensor = left_OI @ torch.linalg.pinv(_total(grams), hermitian=True)
    return merged_OI


def best_scale(grams: Sequence[Tensor], estimates: Sequence[Tensor]) -> float:
    """The number `a` for which `sum_t ||C_t - a C^_t||_F^2` is least; multiplying all estimates changes no merge."""
    product = sum(float((c.double() * k.double()).sum()) for c, k in zip(grams, estimates, strict=True))
    square = sum(float(k.double().square().sum()) for k in estimates)
    return product / square if square else 0.0


@dataclass(frozen=True, slots=True)
class MinimizerGap:
    """Distance of two merged deltas, and its bound.

    Args:
        gap: `||D^ - D||_F` on the inputs that the true Gram matrices know.
        bound: `sum_t ||D^ - D_t||_2 ||C_t - C^_t||_F / l_min`, plus the residual's part.
        errors: `||C_t - C^_t||_F` of every expert.
        distances: `||D^ - D_t||_2` of every expert.
        residual: `||sum_t (D^ - D_t) C^_t||_F`, zero for the exact minimizer of the estimated problem.
        smallest: `l_min`, smallest eigenvalue of `sum_t C_t` above rounding; infinite where all inputs are zero.
        trace_inverse: `tr((sum_t C_t)^+)`.
        rounding: what rounding can add to the gap, `I eps ||D||_F l_max / l_min`.
    """

    gap: float
    bound: float
    errors: tuple[float, ...]
    distances: tuple[float, ...]
    residual: float
    smallest: float
    trace_inverse: float
    rounding: float = 0.0

    @property
    def weighted_error(self) -> float:
        """`sum_t ||D^ - D_t||_2 ||C_t - C^_t||_F`, and the residual: the factors of the inverse of `sum_t C_t`."""
        return sum(e * d for e, d in zip(self.errors, self.distances, strict=True)) + self.residual


def minimizer_gap(
    merged_OI: Tensor, deltas: Sequence[Tensor], grams: Sequence[Tensor], estimates: Sequence[Tensor]
) -> MinimizerGap:
    """The lemma: `(D^ - D) S = sum_t (D^ - D_t)(C_t - C^_t) + R`, with `S = sum_t C_t` and the residual `R` of `D^`.

    Both sides of the resulting inequality. It holds for any `D^`, and is of use where `D^` nearly minimizes the
    interference under the estimates `C^_t`, so that `R = sum_t (D^ - D_t) C^_t` is small. docs/analyses/theorem2.md
    derives it.

    Args:
        merged_OI: `D^`.
        deltas: `D_t`.
        grams: `C_t`.
        estimates: `C^_t`, on the scale of the `C_t` (`best_scale`).
    """
    merged = merged_OI.double()
    total_II = _total(grams)
    values_I, vectors_II = torch.linalg.eigh(total_II)
    kept = values_I > values_I[-1] * len(values_I) * EPS
    seen_IR = vectors_II[:, kept]
    errors, distances = [], []
    residual_OI = torch.zeros_like(merged)
    for delta, gram, estimate in zip(deltas, grams, estimates, strict=True):
        difference_OI = merged - delta.double()
        errors.append(float(torch.linalg.matrix_norm(gram.double() - estimate.double())))
        distances.append(float(torch.linalg.matrix_norm(difference_OI, 2)))
        residual_OI += difference_OI @ estimate.double()
    smallest = float(values_I[kept].min()) if bool(kept.any()) else math.inf  # no input, no direction to differ in
    residual = float(torch.linalg.matrix_norm(residual_OI))
    weighted = sum(e * d for e, d in zip(errors, distances, strict=True)) + residual
    least_OI = least_interference(deltas, grams)
    condition = float(values_I[-1]) / smallest
    return MinimizerGap(
        gap=float(torch.linalg.matrix_norm((merged - least_OI) @ seen_IR)),
        bound=weighted / smallest,
        errors=tuple(errors),
        distances=tuple(distances),
        residual=residual,
        smallest=smallest,
        trace_inverse=float((1 / values_I[kept]).sum()),
        rounding=len(values_I) * EPS * condition * float(torch.linalg.matrix_norm(least_OI)),
    )


def _total(terms: Sequence[Tensor]) -> Tensor:
    return torch.stack([x.double() for x in terms]).sum(0)


@dataclass(frozen=True, slots=True)
class Sample:
    """Data of one task.

    Args:
        x: inputs, `N ...`.
        loss_N: from outputs `N O` to the loss of every sample.
        lipschitz: constant of `loss_N` in the outputs (Euclidean norm), for every sample.
    """

    x: Tensor
    loss_N: Callable[[Tensor], Tensor]
    lipschitz: float


@dataclass(frozen=True, slots=True)
class LayerTerms:
    """Terms of the bound from one layer.

    Args:
        gamma: `lambda prod_{m > l} ||W^_m||_2`.
        local_error: `E||(W_l - W_t) z + b - b_t||` of the merge with true Gram matrices, mean over tasks.
        merged_error: the same of the merge at hand.
        zeta: `gamma sqrt(tr(S^+) / T)`, `S = sum_t C_t`.
        gap: the lemma's quantities.
        input: `E||z||`, mean over tasks.
        printed: the paper's own lemma, on weights.
        off: `||W^ - W_m||_F`, distance of the merge at hand from the lemma's.
    """

    gamma: float
    local_error: float
    merged_error: float
    zeta: float
    gap: MinimizerGap
    input: float
    printed: PrintedLemma
    off: float

    @property
    def local_term(self) -> float:
        """`gamma E[local error]`."""
        return self.gamma * self.local_error

    @property
    def estimate_term(self) -> float:
        """`zeta (sum_t ||C_t - C^_t||_F ||W^ - W_t||_2 + residual)`."""
        return self.zeta * self.gap.weighted_error

    @property
    def printed_term(self) -> float:
        """`gamma E||z||` times the bound of Lemma B.3, and `off`."""
        return self.gamma * self.input * (self.printed.bound + self.off)


_TERMS = ("local_term", "estimate_term", "printed_term")


@dataclass(frozen=True)
class Theorem2Result(Analysis):
    """Both sides of Theorem 3.3, layer by layer.

    Args:
        transfer: expected negative transfer, by task.
        absolute: mean of its absolute value over samples, by task: the paper's left side. The bound holds for it too.
    """

    name = "theorem2"
    settings: Mapping[str, Any]
    transfer: Mapping[str, float]
    layers: Sequence[LayerTerms]
    absolute: Mapping[str, float]

    @property
    def left(self) -> float:
        """Expected negative transfer: mean over tasks of the loss of the merged model minus the expert's."""
        return statistics.fmean(self.transfer.values())

    @property
    def propagated(self) -> float:
        """`sum_l gamma_l E[local error of the merge at hand]`, between both sides."""
        return sum(t.gamma * t.merged_error for t in self.layers)

    @property
    def local(self) -> float:
        """First sum of the right side."""
        return sum(t.local_term for t in self.layers)

    @property
    def estimates(self) -> float:
        """Second sum of the right side."""
        return sum(t.estimate_term for t in self.layers)

    @property
    def right(self) -> float:
        """The bound."""
        return self.local + self.estimates

    @property
    def printed(self) -> float:
        """The bound with the constants that the paper prints."""
        return self.local + sum(t.printed_term for t in self.layers)

    def check(self) -> None:
        """Every inequality of the derivation, up to rounding.

        Raises:
            NumericalError: one does not hold, which would be an error of this package.
        """
        chain = [
            ("left side <= propagated", self.left, self.propagated, 0.0),
            ("E|transfer| <= propagated", statistics.fmean(self.absolute.values()), self.propagated, 0.0),
            ("propagated <= right side", self.propagated, self.right, 0.0),
            ("propagated <= printed right side", self.propagated, self.printed, 0.0),
        ]
        chain += [(f"lemma in layer {i}", t.gap.gap, t.gap.bound, t.gap.rounding) for i, t in enumerate(self.layers)]
        wrong = [
            f"{what}: {low:.6g} > {high:.6g}"
            for what, low, high, slack in chain
            if not low <= high * (1 + 1e-9) + 1e-12 + slack
        ]
        if wrong:
            raise NumericalError("Theorem 3.3 is violated. It cannot be: please report it with the settings.", wrong)

    def data(self) -> dict[str, Any]:
        """Both sides and every constant."""
        return {
            "settings": dict(self.settings),
            "left": self.left,
            "propagated": self.propagated,
            "right": {"local": self.local, "estimates": self.estimates, "sum": self.right, "printed": self.printed},
            "transfer": dict(self.transfer),
            "absolute": dict(self.absolute),
            "layers": [{**asdict(t), **{name: getattr(t, name) for name in _TERMS}} for t in self.layers],
        }

    def tables(self) -> list[Table]:
        """The sums, and each layer's part."""
        caption = (
            "gamma: Lipschitz constant behind the layer; local: E||(W - W_t) z + b - b_t||, W merged with\n"
            "true Gram matrices; zeta: gamma sqrt(tr(S^+)/T); error: sum_t ||C_t - C^_t|| ||W^ - W_t||;\n"
            "1st, 2nd sum: gamma local, zeta error;\n"
            "gap <= lemma: distance of the two merges and its bound; B.3: the paper's."
        )
        columns = ("gamma", "local", "zeta", "error", "1st sum", "2nd sum", "gap", "lemma", "B.3")
        table = new_table("Theorem 3.3, layer by layer", caption, "layer", columns)
        for i, t in enumerate(self.layers):
            cells = (t.gamma, t.local_error, t.zeta, t.gap.weighted_error, t.local_term, t.estimate_term)
            table.add_row(str(i), *(f" {shown(c)}" for c in (*cells, t.gap.gap, t.gap.bound, t.printed.bound)))
        sums = new_table("Expected negative transfer and its bound", "", "", ("nats",))
        for label, value in (
            ("left side: E[loss of the merged model - loss of the expert]", self.left),
            ("   its absolute value: E|...|, mean over tasks", statistics.fmean(self.absolute.values())),
            ("between: sum_l gamma_l E[local error of the merged model]", self.propagated),
            ("right side", self.right),
            ("   sum_l gamma_l E[local error with true Gram matrices]", self.local),
            ("   sum_l zeta_l sum_t ||C_t - C^_t|| ||W^ - W_t||", self.estimates),
            ("right side with the paper's printed constants", self.printed),
        ):
            sums.add_row(escape(label), f" {shown(value, '.4g')}")
        return [table, sums]

    def figure(self) -> Figure:
        """Each layer's two terms, and both sides, on a logarithmic scale."""
        from actmat_experiments.harness.figures import COLORS, new_axes

        figure, axes = new_axes("Expected negative transfer and the terms of its bound")
        places = range(len(self.layers))
        axes.bar([p - 0.2 for p in places], [t.local_term for t in self.layers], 0.36, color=COLORS[0],
                 label="γ · E[local error]")  # fmt: skip
        axes.bar([p + 0.2 for p in places], [t.estimate_term for t in self.layers], 0.36, color=COLORS[1], hatch="//",
                 edgecolor="white", label="ζ · Σ‖C − Ĉ‖‖Ŵ − W_t‖")  # fmt: skip
        for value, style, label in (
            (self.right, "-", "right side"),
            (self.propagated, "--", "between: errors of the merged model, propagated"),
            (self.left, ":", "left side: expected negative transfer"),
        ):
            if value > 0:
                axes.axhline(value, color="#000000", linestyle=style, linewidth=1.3, label=f"{label}, {shown(value)}")
        axes.set_yscale("log")
        axes.set_xticks(list(places), [f"layer {p}" for p in places])
        axes.set_ylabel("nats")
        figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
        return figure


@torch.no_grad()
def transfer_bound(
    base: MLP,
    experts: Sequence[MLP],
    merged: MLP,
    samples: Mapping[str, Sample],
    settings: Mapping[str, Any] | None = None,
) -> Theorem2Result:
    """Both sides of Theorem 3.3 for a merge with `C^_t` proportional to `D_t^T D_t`.

    Args:
        experts: one per task, in the order of `samples`.
        merged: any network of the same shape; the bound is meant for the minimizer under the estimates.
        samples: data of every task; expectations are means over it.
    """
    largest = max(s.lipschitz for s in samples.values())
    pairs = list(zip(experts, samples.values(), strict=True))
    inputs = [list(expert.inputs(sample.x)) for expert, sample in pairs]
    norms = [float(torch.linalg.matrix_norm(layer.weight, 2)) for layer in merged.layers]
    terms = []
    for index, (start, end) in enumerate(zip(base.layers, merged.layers, strict=True)):
        own = [expert.layers[index] for expert in experts]
        z_TNI = [z[index] for z in inputs]
        grams = [z_NI.mT @ z_NI / len(z_NI) for z_NI in z_TNI]
        deltas = [layer.weight - start.weight for layer in own]
        found = [delta.mT @ delta for delta in deltas]
        factor = best_scale(grams, found)
        found = [factor * k for k in found]
        gap = minimizer_gap(end.weight - start.weight, deltas, grams, found)
        oracle_OI = start.weight + least_interference(deltas, grams)
        gamma = largest * math.prod(norms[index + 1 :])
        errors = [
            statistics.fmean(
                float(torch.linalg.vector_norm(z_NI @ (w - layer.weight).mT + end.bias - layer.bias, dim=1).mean())
                for z_NI, layer in zip(z_TNI, own, strict=True)
            )
            for w in (oracle_OI, end.weight)
        ]
        zeta = gamma * math.sqrt(gap.trace_inverse / len(pairs))
        length = statistics.fmean(float(torch.linalg.vector_norm(z_NI, dim=1).mean()) for z_NI in z_TNI)
        # float32: the cut-off of `actmat`
        printed, printed_OI = printed_lemma([layer.weight for layer in own], grams, found, dtype=torch.float32)
        off = float(torch.linalg.matrix_norm(end.weight - printed_OI))
        terms.append(LayerTerms(gamma, errors[0], errors[1], zeta, gap, length, printed, off))
    changes = {
        name: s.loss_N(merged(s.x)) - s.loss_N(expert(s.x))
        for (name, s), expert in zip(samples.items(), experts, strict=True)
    }
    transfer = {name: float(change_N.mean()) for name, change_N in changes.items()}
    absolute = {name: float(change_N.abs().mean()) for name, change_N in changes.items()}
    return Theorem2Result(dict(settings or {}), transfer, terms, absolute)


_PIXELS, _OUTPUTS = 64, 16
_RATE, _BATCH = 2e-3, 64


def theorem2(
    *,
    n_tasks: int = 3,
    width: int = 32,
    activation: ActivationName = "relu",
    pretraining_steps: int = 300,
    finetuning_steps: int = 200,
    method: str = "actmat",
    seed: int = 0,
    on_step: Callable[[], object] = lambda: None,
) -> Theorem2Result:
    """Train a base and experts (float64, `64 -> width -> width -> 16`), merge them, and compute both sides.

    Every task reads its logits off the 16 outputs through a frozen head with orthonormal rows, so that the loss has the
    Lipschitz constant `sqrt(2)` of cross-entropy. Expectations are means over the task's test photographs.

    Args:
        n_tasks: 2 to 6 tasks of the demo.
        pretraining_steps: AdamW steps of the base, digits in all looks.
        finetuning_steps: AdamW steps of every expert.
        method: rule that merges the weight matrices; biases are averaged.

    Raises:
        RecipeError: fewer than two tasks, or more than the demo has.
        NumericalError: an inequality does not hold.
        MergeError: scikit-learn is missing.
    """
    from actmat.extras.demo.tasks import TASKS, generator_for, pose_split, split_photographs

    if not 2 <= n_tasks <= len(TASKS):
        raise RecipeError(f"theorem2 merges 2 to {len(TASKS)} tasks; got {n_tasks}.")
    split = split_photographs(1, 600, generator_for(seed, "split"))
    tasks = TASKS[:n_tasks]
    data = {t.name: pose_split(t, split, n_views=1, seed=seed) for t in tasks}
    generator = generator_for(seed, "theorem2")
    heads = {t.name: _orthonormal(t.n_classes, generator) for t in tasks}
    base = new_mlp((_PIXELS, width, width, _OUTPUTS), activation=activation, seed=seed)

    own = {name: (d.train, heads[name]) for name, d in data.items()}
    _train(base, list(own.values()), pretraining_steps, generator, on_step)
    experts = [_train(copy.deepcopy(base), [pair], finetuning_steps, generator, on_step) for pair in own.values()]
    samples = {
        name: Sample(d.test.images_NHW.double(), _losses(heads[name], d.test.labels_N), math.sqrt(2))
        for name, d in data.items()
    }
    settings = {
        "tasks": list(data),
        "widths": [_PIXELS, width, width, _OUTPUTS],
        "activation": activation,
        "pretraining_steps": pretraining_steps,
        "finetuning_steps": finetuning_steps,
        "method": method,
        "seed": seed,
    }
    result = transfer_bound(base, experts, merge_mlps(base, experts, method), samples, settings)
    result.check()
    return result


def _train(
    model: MLP,
    tasks: Sequence[tuple[Examples, Tensor]],
    n_steps: int,
    generator: torch.Generator,
    on_step: Callable[[], object],
) -> MLP:
    """AdamW on batches of the tasks (examples and head) in turn, in place."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.0)
    for step in range(n_steps):
        examples, head_CF = tasks[step % len(tasks)]
        batch = examples.take(torch.randint(len(examples), (_BATCH,), generator=generator))
        loss = _losses(head_CF, batch.labels_N)(model(batch.images_NHW.double())).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        on_step()
    return model


@torch.no_grad()
def merge_mlps(base: MLP, experts: list[MLP], method: str) -> MLP:
    """Weight matrices by the rule, biases by the mean."""
    from actmat import merge_matrices

    merged = copy.deepcopy(base)
    for index, layer in enumerate(merged.layers):
        own = [expert.layers[index] for expert in experts]
        deltas = [o.weight - layer.weight for o in own]
        layer.weight += merge_matrices(method, deltas)
        layer.bias.copy_(torch.stack([o.bias for o in own]).mean(0))
    return merged


def _orthonormal(n_classes: int, generator: torch.Generator) -> Tensor:
    """`C F` with orthonormal rows."""
    square_FF = torch.randn(_OUTPUTS, _OUTPUTS, generator=generator, dtype=torch.float64)
    basis_FF: Tensor = torch.linalg.qr(square_FF).Q
    return basis_FF[:n_classes]


def _losses(head_CF: Tensor, labels_N: Tensor) -> Callable[[Tensor], Tensor]:
    """Cross-entropy of every sample; its gradient in the logits, `p - e_y`, is no longer than `sqrt(2)`."""

    def losses(outputs_NF: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs_NF @ head_CF.mT, labels_N, reduction="none")

    return losses
