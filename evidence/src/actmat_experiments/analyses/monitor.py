"""`DriftMonitor`: Theorem 3.1's quantities along any training loop.

    monitor = DriftMonitor().attach(model)
    for k, batch in enumerate(batches):
        loss = ...
        with monitor.step(k):
            loss.backward()
        optimizer.step()
    with monitor.inputs():
        model(data)
    angles = monitor.angles()

Shapes: `N` tokens, `O` out_features, `I` in_features.

The token is the unit: with the gradient `g_i` of the step's loss at the output of token `i`, and its input `z_i`,

    G  += sum_i g_i z_i^T        S  += N sum_i z_i z_i^T ||g_i||^2        S~ += (sum_i z_i z_i^T)(sum_i ||g_i||^2)

over the `N` tokens of the step. These are the theorem's expectations for a loss that is a mean over tokens
(docs/analyses/theorem1.md). Every layer holds `O x I` three times and `I x I` five times, whatever the number of steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from actmat.errors import MergeError
from actmat_experiments.analyses.angles import DriftAngles, drift_angles
from actmat_experiments.analyses.taps import LinearMap, Tap, find_taps, reading


class _Sums:
    """Sums of one linear map, over all steps and over the current step."""

    def __init__(self, n_out: int, n_in: int, dtype: torch.dtype, device: torch.device) -> None:
        def zeros(rows: int) -> Tensor:
            return torch.zeros(rows, n_in, dtype=dtype, device=device)

        self.gradient_OI, self.step_gradient_OI = zeros(n_out), zeros(n_out)
        self.second_II, self.decoupled_II = zeros(n_in), zeros(n_in)
        self.step_inputs_II, self.step_second_II = zeros(n_in), zeros(n_in)
        self.step_tokens, self.step_size = 0, zeros(1).sum()
        self.gram_II, self.gram_tokens = zeros(n_in), 0

    def add_gradient(self, z_NI: Tensor, g_NO: Tensor) -> None:
        """Some tokens of the step at work."""
        size_N1 = g_NO.square().sum(1, keepdim=True)
        self.step_gradient_OI.addmm_(g_NO.mT, z_NI)
        self.step_inputs_II.addmm_(z_NI.mT, z_NI)
        self.step_second_II.addmm_((z_NI * size_N1).mT, z_NI)
        self.step_tokens += len(z_NI)
        self.step_size += size_N1.sum()

    def end_step(self) -> None:
        """The step's tokens are all there."""
        self.gradient_OI.add_(self.step_gradient_OI)
        self.second_II.add_(self.step_second_II, alpha=self.step_tokens)
        self.decoupled_II.add_(self.step_inputs_II * self.step_size)
        self.forget_step()

    def forget_step(self) -> None:
        """Nothing of a step that did not end is left."""
        for spent in (self.step_gradient_OI, self.step_inputs_II, self.step_second_II, self.step_size):
            spent.zero_()
        self.step_tokens = 0


class DriftMonitor:
    """Sums up what Theorem 3.1 is about while a model is trained; changes no bit of the training.

    Args:
        layers: patterns of weight names, such as `"*.mlp.*"`; default: every linear layer.
        dtype: of the sums. float64 by default: `G` adds up gradients of alternating sign.
        block_tokens: most tokens that are converted to `dtype` at a time.
    """

    def __init__(
        self, *, layers: Sequence[str] | None = None, dtype: torch.dtype = torch.float64, block_tokens: int = 8192
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens is at least 1, got {block_tokens}")
        self._patterns, self._dtype, self._block = layers, dtype, block_tokens
        self._taps: list[Tap] = []
        self._start: dict[str, Tensor] = {}
        self._sums: dict[str, _Sums] = {}
        self._mask: Tensor | None = None
        self._mode: Literal["idle", "step", "inputs", "detached"] = "idle"
        self._stack = contextlib.ExitStack()
        self.not_read: tuple[str, ...] = ()
        self.steps: list[int] = []

    def attach(self, model: nn.Module, config: Mapping[str, Any] | None = None) -> Self:
        """Begin: note the trainable weights as `W_0` and read along from now on; frozen layers are left out.

        Args:
            model: what will be trained, in place.
            config: parsed `config.json` where the model does not carry its own; it tells how weights are packed.

        Raises:
            MergeError: attached already.
            RecipeError: a pattern matches no linear layer.
        """
        if self._taps:
            raise MergeError("The monitor is attached already; detach it, or make another one for another run.")
        taps, missed = find_taps(model, config, layers=self._patterns)
        self._taps = [t for t in taps if t.weight.requires_grad]
        self.not_read = tuple(missed)
        for tap in self._taps:
            self._start[tap.weight_name] = tap.weight.detach().clone()
            for layer, matrix in zip(tap.maps, tap.matrices(tap.weight), strict=True):
                self._sums[layer.name] = _Sums(matrix.shape[0], matrix.shape[1], self._dtype, tap.weight.device)
        self._stack.enter_context(reading(self._taps, self._called))
        return self

    def detach(self) -> None:
        """Stop reading, also in passes under way. Sums so far are kept."""
        self._stack.close()
        self._mode = "detached"

    @contextlib.contextmanager
    def step(self, number: int, *, mask: Tensor | None = None) -> Iterator[None]:
        """Around the backward passes of one optimizer step; several add up to one gradient.

        Args:
            mask: bool `(samples, tokens)`, False where a token is padding; its input is then ignored.
        """
        self.begin_step(mask=mask)
        try:
            yield
        except BaseException:
            self._mode, self._mask = "idle", None
            raise
        self.end_step(number)

    def begin_step(self, *, mask: Tensor | None = None) -> None:
        """Enter the context of `step`, for loops that cannot use a context."""
        if self._mode != "idle":
            raise MergeError(f"The monitor is inside '{self._mode}' already; steps and measurements do not nest.")
        self._mode, self._mask = "step", mask
        for sums in self._sums.values():
            sums.forget_step()

    def end_step(self, number: int) -> None:
        """Leave the context of `step`."""
        self._mode, self._mask = "idle", None
        self.steps.append(number)
        for sums in self._sums.values():
            sums.end_step()

    @contextlib.contextmanager
    def inputs(self, *, mask: Tensor | None = None, more: bool = False) -> Iterator[None]:
        """Forward passes in here give `C = E[z z^T]` at the weights of this moment.

        Args:
            mask: as in `step`, for all passes inside.
            more: add to the last measurement in place of starting a new one.
        """
        if not more:
            for sums in self._sums.values():
                sums.gram_II.zero_()
                sums.gram_tokens = 0
        if self._mode != "idle":
            raise MergeError(f"The monitor is inside '{self._mode}' already; steps and measurements do not nest.")
        self._mode, self._mask = "inputs", mask
        try:
            with torch.no_grad():
                yield
        finally:
            self._mode, self._mask = "idle", None

    def angles(self) -> dict[str, DriftAngles]:
        """Theorem 3.1's angles of every linear map, with `D` and `C` as of now; NaN where a layer got no gradient.

        Raises:
            MergeError: no step yet, or layers (all are listed) whose inputs were not measured.
        """
        problems = [] if self.steps else ["no step yet: run backward inside 'with monitor.step(k)'"]
        problems += [
            f"{name}: no inputs; run the model inside 'with monitor.inputs()', or leave this layer out"
            for name, sums in self._sums.items()
            if not sums.gram_tokens
        ]
        if problems:
            raise MergeError("The monitor lacks measurements that the angles need.", problems)
        found = {}
        for tap in self._taps:
            deltas = tap.matrices(tap.weight.detach() - self._start[tap.weight_name])
            for layer, delta in zip(tap.maps, deltas, strict=True):
                s = self._sums[layer.name]
                found[layer.name] = drift_angles(delta, s.gradient_OI, s.second_II, s.decoupled_II, s.gram_II)
        return found

    @property
    def labels(self) -> list[str]:
        """Names of the linear maps that are watched."""
        return list(self._sums)

    def sums(self, name: str) -> dict[str, Tensor]:
        """`G`, `S`, `S~` and `C` of one linear map, not copied."""
        s = self._sums[name]
        gram_II = s.gram_II / max(1, s.gram_tokens)
        return {"gradient": s.gradient_OI, "second": s.second_II, "decoupled": s.decoupled_II, "gram": gram_II}

    def _called(self, tap: Tap, z: Tensor, y: Tensor) -> None:
        if self._mode == "inputs":
            self._in_blocks(tap, z, None, self._add_input)
        elif y.requires_grad:
            y.register_hook(lambda g: self._gradient(tap, z.detach(), g))  # type: ignore[no-untyped-call]

    def _gradient(self, tap: Tap, z: Tensor, g: Tensor) -> None:
        if self._mode == "detached":
            return
        if self._mode != "step":
            raise MergeError(
                "A backward pass ran outside 'with monitor.step(k)' while the monitor was attached: its gradient would "
                "be missing from the sums. Put it inside, or detach the monitor first."
            )
        self._in_blocks(tap, z, g, self._add_gradient)

    def _in_blocks(
        self, tap: Tap, z: Tensor, g: Tensor | None, add: Callable[[LinearMap, Tensor, Tensor | None], None]
    ) -> None:
        with torch.no_grad():
            rows_NI = token_rows(z, self._mask, tap)
            gradients_NO = None if g is None else token_rows(g, self._mask, tap)
            for start in range(0, len(rows_NI), self._block):
                here = slice(start, start + self._block)
                block_NI = rows_NI[here].to(self._dtype)
                block_NO = None if gradients_NO is None else gradients_NO[here].to(self._dtype)
                for layer in tap.maps:
                    add(layer, block_NI, block_NO)

    def _add_input(self, layer: LinearMap, z_NI: Tensor, _: Tensor | None) -> None:
        sums = self._sums[layer.name]
        sums.gram_II.addmm_(z_NI.mT, z_NI)
        sums.gram_tokens += len(z_NI)

    def _add_gradient(self, layer: LinearMap, z_NI: Tensor, g_NO: Tensor | None) -> None:
        assert g_NO is not None, "gradients come with inputs"
        whole = len(layer.rows_O) == g_NO.shape[1]
        self._sums[layer.name].add_gradient(z_NI, g_NO if whole else g_NO[:, layer.rows_O.to(g_NO.device)])


class MonitorCallback:
    """A monitor as a callback of `actmat.extras.demo.training.descend`: every backward pass of the run is watched.

    Args:
        after: called with the number of finished steps after each; measurements of inputs belong there.
    """

    def __init__(self, monitor: DriftMonitor, after: Callable[[int], object]) -> None:
        self._monitor, self._after = monitor, after
        monitor.begin_step()

    def before_step(self, step: int, loss: Tensor) -> None:
        """The step's gradients are complete."""
        self._monitor.end_step(step)

    def after_step(self, step: int) -> None:
        """Measure, then watch the next step."""
        self._after(step + 1)
        self._monitor.begin_step()


def token_rows(x: Tensor, mask: Tensor | None, tap: Tap) -> Tensor:
    """All tokens of `x` as rows, without those that the mask (`samples, tokens`) leaves out.

    Raises:
        MergeError: the layer sees another number of tokens than the mask has.
    """
    rows = x.reshape(-1, x.shape[-1])
    if mask is None:
        return rows
    flat = (mask.mT if tap.sequence_first else mask).reshape(-1).bool()
    if len(flat) != len(rows):
        raise MergeError(
            f"{tap.weight_name} sees {len(rows)} tokens, the mask is for {len(flat)}: give the mask of this batch, "
            "(samples, tokens), or leave out layers that see only some of the tokens (layers=...)."
        )
    return rows[flat.to(rows.device)]
