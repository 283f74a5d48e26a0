"""`theorem1`: Theorem 3.1 where it is exact, full-batch gradient descent; and the small network of both theorems.

There `D = -eta G`, the angle of the optimizer is zero, and `angle(D^T D, C) <= e_cross + e_corr + e_drift` is an
inequality between numbers that are all computed. docs/analyses/theorem1.md has the derivation, also for layers that
see several tokens of a sample. The network is a multilayer perceptron whose Lipschitz constants are known:

    z_1 = x,   z_{l+1} = phi(W_l z_l + b_l),   f(x) = W_L z_L + b_L

Shapes: `N` images or samples, `H = W` pixels, `I` in_features, `O` out_features of a layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from actmat.errors import NumericalError
from actmat_experiments.analyses.drift import ROUNDING, DriftResult, Moment, moments_until
from actmat_experiments.analyses.monitor import DriftMonitor

ActivationName = Literal["relu", "tanh"]

ACTIVATIONS: dict[ActivationName, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "tanh": torch.tanh}
"""Lipschitz constant 1, both (GELU has 1.13 and is left out)."""


class MLP(nn.Module):
    """`layers[l]`, stored as `linear.l`, is `W_l, b_l`; no activation after the last."""

    def __init__(self, widths: Sequence[int], activation: ActivationName) -> None:
        super().__init__()
        self.activation: ActivationName = activation
        self.linear = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(widths))

    @property
    def layers(self) -> list[nn.Linear]:
        """In their order."""
        return [layer for layer in self.linear if isinstance(layer, nn.Linear)]

    def forward(self, x: Tensor) -> Tensor:
        """`N I -> N O`; what has more axes is flattened first."""
        z_NI = x.flatten(1)
        for index, layer in enumerate(self.layers):
            z_NI = layer(z_NI)
            if index + 1 < len(self.layers):
                z_NI = ACTIVATIONS[self.activation](z_NI)
        return z_NI

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        """The input `z_l` of every layer, `N I`, in their order."""
        z_NI = x.flatten(1)
        for layer in self.layers:
            yield z_NI
            z_NI = ACTIVATIONS[self.activation](layer(z_NI))


def new_mlp(widths: Sequence[int], *, activation: ActivationName = "relu", seed: int = 0) -> MLP:
    """A new model in float64 that depends only on the seed; the global random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MLP(widths, activation).double()


Network = Literal["mlp", "transformer"]
_PIXELS, _CLASSES = 64, 10


class Theorem1Result(DriftResult):
    """Angles along full-batch gradient descent."""

    name = "theorem1"


def theorem1(
    *,
    network: Network = "mlp",
    n_steps: int = 200,
    rate: float = 0.2,
    n_images: int = 500,
    width: int = 32,
    seed: int = 0,
    on_step: Callable[[], object] = lambda: None,
) -> Theorem1Result:
    """Train a small network on photographs of digits by full-batch gradient descent in float64, and measure.

    Args:
        network: "mlp", `64 -> width -> width -> 10`, one token per image; or "transformer", two layers of the demo's
            model with a frozen random head, 17 tokens per image.
        width: hidden width; a multiple of 4 for the transformer.

    Raises:
        NumericalError: the descent diverged, or the inequality does not hold (which would be an error of this package).
        MergeError: scikit-learn is missing.
    """
    from actmat.extras.demo.tasks import generator_for, load_photographs

    photographs = load_photographs()
    order_N = torch.randperm(len(photographs), generator=generator_for(seed, "theorem1"))[:n_images]
    chosen = photographs.take(order_N)
    model, logits_of = _network(network, width, seed)
    images_NHW = chosen.images_NHW.double()

    def loss() -> Tensor:
        return nn.functional.cross_entropy(logits_of(images_NHW), chosen.labels_N)

    monitor, moments = descend_watched(model, loss, n_steps=n_steps, rate=rate, on_step=on_step)
    settings = {
        "network": network,
        "n_steps": n_steps,
        "rate": rate,
        "n_images": len(chosen),
        "width": width,
        "seed": seed,
        "optimizer": "full-batch gradient descent",
    }
    title = f"{network}, full-batch gradient descent"
    result = Theorem1Result(title, settings, moments, monitor.not_read)
    if not result.worst_excess() <= ROUNDING:
        raise NumericalError(
            f"Theorem 3.1's inequality is violated by {result.worst_excess():.1e} radians. It cannot be, so this is an "
            "error of the measurement: please report it with the settings."
        )
    return result


def descend_watched(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    n_steps: int,
    rate: float,
    on_step: Callable[[], object] = lambda: None,
) -> tuple[DriftMonitor, list[Moment]]:
    """`W <- W - rate * dL/dW` for all weights of `model`, in place, with Theorem 3.1's angles on the way.

    Args:
        model: float64, so that rounding does not turn the delta away from the gradient.
        loss: the full-batch loss at the weights of the moment; called once per step and once per measurement.

    Raises:
        NumericalError: the loss is not finite any more.
    """
    monitor = DriftMonitor().attach(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    wanted = set(moments_until(n_steps))
    moments = []
    try:
        for step in range(n_steps):
            value = loss()
            if not torch.isfinite(value):
                raise NumericalError(
                    f"The loss is {float(value.detach())} after {step} steps: take a smaller rate than {rate}."
                )
            for parameter in parameters:
                parameter.grad = None
            with monitor.step(step):
                torch.autograd.backward(value)
            with torch.no_grad():
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=rate)
            on_step()
            if step + 1 in wanted:
                with monitor.inputs():
                    loss()
                moments.append(Moment(step + 1, float(value.detach()), monitor.angles()))
    finally:
        monitor.detach()
    return monitor, moments


def _network(network: Network, width: int, seed: int) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The model to train, and a function from images to its logits."""
    if network == "mlp":
        mlp = new_mlp((_PIXELS, width, width, _CLASSES), seed=seed)
        return mlp, mlp
    from actmat.extras.demo.model import EncoderConfig, new_encoder

    encoder = new_encoder(EncoderConfig(hidden_size=width, intermediate_size=2 * width), seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    head_CD = torch.randn(_CLASSES, width, generator=generator, dtype=torch.float64) / width**0.5
    return encoder, lambda images_NHW: encoder(images_NHW) @ head_CD.mT
