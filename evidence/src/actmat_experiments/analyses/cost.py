"""`cost`: floating-point operations and measured time of every method on given layer shapes.

Operations are counted as in the paper's table: a product of `N x N` matrices is `N^3`. The machine's own rate for such
the time of a product of the same shapes is printed too, so that a time can be read as a number of matrix products.

Shapes: `T` experts, `O` out_features, `I` in_features.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from torch import Tensor

from actmat import merge_matrices
from actmat.errors import RecipeError
from actmat_experiments.analyses.cost_table import RULES, rule_table
from actmat_experiments.analyses.result import Analysis, shown
from actmat_experiments.core import MergeMethod, all_methods, get_method
from actmat_experiments.harness.table import new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = {rule.method: rule for rule in RULES}
"""The paper's rules by the name of the method."""


@dataclass(frozen=True, slots=True)
class MethodCost:
    """One method on one shape.

    Args:
        seconds: median time of a merge of one layer.
        declared: multiply-adds by the method's own declaration.
        paper: operations by the paper's formula, or None where it has none.
        products: `seconds` in units of one `N x N` product on this machine.
    """

    method: str
    shape: tuple[int, int]
    seconds: float
    declared: float
    paper: float | None
    products: float


@dataclass(frozen=True)
class CostResult(Analysis):
    """Costs of all methods and shapes; `rates` are multiply-adds per second of a product, by shape."""

    name = "cost"
    device: str
    settings: Mapping[str, Any]
    rates: Mapping[str, float]
    costs: Sequence[MethodCost]

    def data(self) -> dict[str, Any]:
        """The fields, and the operations of the paper's rules."""
        rules = [
            {"method": r.method, "formula": r.leading, "printed": r.printed, "counted": r.counted,
             "cubic": str(r.cubic), "entries": str(r.entries),
             "products": str(r.products), "inverses": str(r.inverses), "svds": str(r.svds), "costly": r.costly,
             "preprocessing": r.preprocessing}
            for r in RULES
        ]  # fmt: skip
        return {**vars(self), "rules": rules}

    def tables(self) -> list[Table]:
        """Operations by rule, then times: one table per shape, cheapest first."""
        made = [rule_table()]
        for shape in dict.fromkeys(c.shape for c in self.costs):
            label = _label(shape)
            caption = (
                "G: 1e9 multiply-adds, as declared and by the paper's formula at "
                f"N = {math.sqrt(math.prod(shape)):.0f};\n"
                f"products: time in N x N products, which run at {self.rates[label] / 1e9:.1f} G/s here; "
                "G/s: by the paper's formula."
            )
            title = f"{label}, {self.settings['n_experts']} experts, {self.settings['dtype']}, {self.device}"
            table = new_table(title, caption, "method", ("ms", "G", "paper G", "products", "G/s"))
            for c in sorted((c for c in self.costs if c.shape == shape), key=lambda c: c.seconds):
                paper = ("-", "-") if c.paper is None else (_billions(c.paper), f"{c.paper / c.seconds / 1e9:.1f}")
                table.add_row(
                    c.method,
                    f" {1e3 * c.seconds:.3g}",
                    f" {_billions(c.declared)}",
                    f" {paper[0]}",
                    f" {shown(c.products)}",
                    f" {paper[1]}",
                )
            made.append(table)
        return made

    def figure(self) -> Figure:
        """Time over operations, one marker per method, and the machine's rate as a line."""
        from actmat_experiments.harness.figures import COLORS, MARKERS, new_axes

        shapes = list(dict.fromkeys(c.shape for c in self.costs))
        figure, axes = new_axes(
            f"Cost of a layer, {self.settings['n_experts']} experts ({self.device})", width=8.0, height=4.8
        )
        for index, shape in enumerate(shapes):
            found = sorted((c for c in self.costs if c.shape == shape), key=lambda c: c.method)
            axes.plot([c.method for c in found], [1e3 * c.seconds for c in found], MARKERS[index % len(MARKERS)],
                      color=COLORS[index % len(COLORS)], markersize=5, label=_label(shape))  # fmt: skip
            product = 1e3 * math.prod(shape) ** 1.5 / self.rates[_label(shape)]
            axes.axhline(product, color=COLORS[index % len(COLORS)], linestyle=":", linewidth=1,
                         label=f"one product at {_label(shape)}")  # fmt: skip
        axes.set_yscale("log")
        axes.tick_params(axis="x", rotation=90)
        axes.set_ylabel("milliseconds, median")
        figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
        return figure


def cost(
    shapes: Sequence[tuple[int, int]],
    *,
    n_experts: int = 7,
    methods: Sequence[str] | None = None,
    device: str = "cpu",
    repeats: int = 3,
    seed: int = 0,
    on_method: Callable[[], object] = lambda: None,
) -> CostResult:
    """Time every method on random float32 layers, with its default options.

    Args:
        shapes: `(O, I)` of layers.
        n_experts: `T`; methods that take fewer are given as many as they take.
        methods: names; default: all; Gram matrices and Fisher information are made up like the layers.
        repeats: measurements per method and shape, after one that is not counted.

    Raises:
        RecipeError: an unknown method or device, no shape, or a shape without entries.
    """
    from actmat_experiments.core import check_device

    check_device(device)
    if not shapes or any(o < 1 or i < 1 for o, i in shapes) or n_experts < 1 or repeats < 1:
        raise RecipeError(
            f"cost needs shapes with entries, experts and repeats; got {list(shapes)}, {n_experts}, {repeats}."
        )
    chosen = [get_method(n) for n in methods] if methods is not None else all_methods()
    rates, costs = {}, []
    for shape in shapes:
        layer = _Layer(shape, n_experts, device, seed)
        side = math.sqrt(math.prod(shape))
        product = layer.seconds_of_product(repeats)
        rates[_label(shape)] = side**3 / product
        for method in chosen:
            seconds = _median(partial(layer.merge, method), repeats, device)
            used = min(n_experts, method.max_experts or n_experts)
            paper = PAPER.get(method.name)
            costs.append(
                MethodCost(
                    method.name,
                    shape,
                    seconds,
                    method.cost.operations(shape, used, method.resolve_options({})) / 2,
                    None if paper is None else paper.leading_count(used, side),
                    seconds / product,
                )
            )
            on_method()
    settings = {"n_experts": n_experts, "dtype": "float32", "repeats": repeats, "seed": seed}
    if device == "cpu":
        settings["threads"] = torch.get_num_threads()
    return CostResult(_device_name(device), settings, rates, costs)


class _Layer:
    """Everything that a method may ask for, of one random layer."""

    def __init__(self, shape: tuple[int, int], n_experts: int, device: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def gaussian(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(device)

        width = shape[1]
        self._device = device
        self._deltas = [gaussian(*shape) for _ in range(n_experts)]
        self._base = gaussian(*shape)
        self._grams = [x.mT @ x / len(x) for x in (gaussian(2 * width, width) for _ in range(n_experts))]
        self._fishers = [gaussian(*shape).square() for _ in range(n_experts)]
        self._side = round(math.sqrt(math.prod(shape)))
        self._square = gaussian(self._side, self._side)

    def merge(self, method: MergeMethod) -> Tensor:
        """One merge of the layer."""
        few = slice(None, method.max_experts)
        given: dict[str, Any] = {"base": self._base} if method.uses_base(method.resolve_options({})) else {}
        if method.needs_statistics:
            known = {"gram": self._grams[few], "fisher": self._fishers[few]}
            given["statistics"] = {kind: known[kind] for kind in method.needs_statistics if kind in known}
        return merge_matrices(method.name, self._deltas[few], **given)

    def seconds_of_product(self, repeats: int) -> float:
        """Of an `N x N` product, `N = sqrt(O I)`."""
        return _median(lambda: self._square @ self._square, 3 * repeats, self._device)


def _median(work: Callable[[], object], repeats: int, device: str) -> float:
    def once() -> float:
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(repeats))


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _label(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def _billions(count: float) -> str:
    return f"{count / 1e9:.3g}"


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device
