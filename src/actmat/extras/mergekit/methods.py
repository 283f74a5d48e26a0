"""mergekit's methods: their parameters, and the equivalent method, options and weights of actmat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actmat.extras.mergekit.config import SliceSource
from actmat.extras.mergekit.parameters import REQUIRED, Parameters


@dataclass(frozen=True)
class Arrangement:
    """Experts of a merge.

    Args:
        sources: per expert, its source in each slice; None if a slice has fewer.
        parameters: values of the configuration.
    """

    sources: Sequence[Sequence[SliceSource | None]]
    parameters: Parameters

    def own(self, name: str, default: Any, absent: Any) -> list[Any]:
        """Values of a parameter, one per expert."""
        return [self.parameters.own(name, of_slices, default, absent) for of_slices in self.sources]

    def weights(self) -> list[Any]:
        """Weights, one per expert."""
        return self.own("weight", REQUIRED, 0.0)


@dataclass
class MethodMapping:
    """Recipe fields equivalent to a mergekit method.

    Args:
        method, options, scale, normalize: fields of the recipe.
        weights: one per expert; empty if the method has no weights.
        own: options of single experts, by name.
    """

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    weights: list[Any] = field(default_factory=list)
    own: dict[str, list[Any]] = field(default_factory=dict)
    scale: Any = 1.0
    normalize: bool = False


@dataclass(frozen=True)
class Method:
    """One method of mergekit.

    Args:
        convert: function that returns the `MethodMapping`.
        reads: names of its parameters.
        needs_base: whether it needs a base model.
        takes_base: whether a given base model is the origin of the deltas instead of an expert.
        models: number of models including the base; None: any.
        weighted: whether a weight of 0 removes an expert from some layers.
    """

    convert: Callable[[Arrangement], MethodMapping]
    reads: tuple[str, ...]
    needs_base: bool = True
    takes_base: bool = False
    models: int | None = None
    weighted: bool = True


def _linear(of: Arrangement) -> MethodMapping:
    return MethodMapping("linear", {"normalize": bool(of.parameters.plain("normalize", True))}, of.weights())


def _slerp(of: Arrangement) -> MethodMapping:
    return MethodMapping("slerp", {"t": of.parameters.shared("t", REQUIRED)})


def _task_arithmetic(of: Arrangement) -> MethodMapping:
    scaling = of.parameters.shared("lambda", 1.0)
    return MethodMapping(
        "task_arithmetic", {"scaling": scaling}, of.weights(), normalize=bool(of.parameters.plain("normalize", False))
    )


def _ties(of: Arrangement) -> MethodMapping:
    options = {"reduce": _reduce(of, True), "variant": "mergekit", **_rescale_if_on(of)}
    return MethodMapping("ties", options, of.weights(), _density(of), of.parameters.shared("lambda", 1.0))


def _elected(of: Arrangement, elects: bool, default: bool) -> tuple[dict[str, Any], bool]:
    """Options of an election of signs; without one, whether weights are normalized."""
    return ({"reduce": _reduce(of, default)}, False) if elects else ({}, bool(of.parameters.plain("normalize", False)))


def _dare(rule: str) -> Callable[[Arrangement], MethodMapping]:
    def convert(of: Arrangement) -> MethodMapping:
        more, normalize = _elected(of, rule == "ties", False)
        options = {"rule": rule, "rescale": _rescale(of), **more}
        scale = of.parameters.shared("lambda", 1.0)
        return MethodMapping("dare", options, of.weights(), _density(of), scale, normalize)

    return convert


def _della(*, elects: bool) -> Callable[[Arrangement], MethodMapping]:
    def convert(of: Arrangement) -> MethodMapping:
        more, normalize = _elected(of, elects, True)
        options = {"rescale": _rescale(of), "sign_election": elects, **more}
        of_models = _density(of) | {"epsilon": of.own("epsilon", 0.15, 0.15)}
        return MethodMapping("della", options, of.weights(), of_models, of.parameters.shared("lambda", 1.0), normalize)

    return convert


def _breadcrumbs(*, elects: bool) -> Callable[[Arrangement], MethodMapping]:
    def convert(of: Arrangement) -> MethodMapping:
        more, normalize = _elected(of, elects, False)
        options = {"scaling": of.parameters.shared("lambda", 1.0), "sign_election": elects} | more | _rescale_if_on(of)
        of_models = _density(of) | {"gamma": of.own("gamma", 0.01, 0.0)}
        return MethodMapping("breadcrumbs", options, of.weights(), of_models, normalize=normalize)

    return convert


def _model_stock(of: Arrangement) -> MethodMapping:
    return MethodMapping("model_stock", {"filter_wise": bool(of.parameters.plain("filter_wise", False))})


def _sce(of: Arrangement) -> MethodMapping:
    return MethodMapping("sce", {"select_topk": of.parameters.shared("select_topk", 1.0)})


def _karcher(of: Arrangement) -> MethodMapping:
    options = {"max_iter": of.parameters.plain("max_iter", 10), "tol": of.parameters.plain("tol", 1e-5)}
    uneven = any(None in of_slices for of_slices in of.sources)
    present = [[None if s is None else 1.0 for s in of_slices] for of_slices in of.sources]
    weights = [_presence(of, flags) for flags in present] if uneven else []
    return MethodMapping("karcher", options, weights)


def _nearswap(of: Arrangement) -> MethodMapping:
    return MethodMapping("nearswap", {"t": of.parameters.shared("t", REQUIRED)})


def _ram(of: Arrangement) -> MethodMapping:
    return MethodMapping("ram", {"epsilon": of.parameters.shared("epsilon", 1e-5)})


def _ramplus(of: Arrangement) -> MethodMapping:
    """RAM+ with ratios per tensor."""
    mapping = _ram(of)
    mapping.options |= {"amplify": of.parameters.shared("r", 0.1), "most": of.parameters.shared("alpha", 0.2)}
    return mapping


def _passthrough(of: Arrangement) -> MethodMapping:
    """A copy, or the model's weights times `scale`."""
    scales = of.own("scale", 1.0, 1.0)
    return MethodMapping("linear", {"normalize": False}, scales if scales != [1.0] else [])


def _nuslerp(of: Arrangement) -> MethodMapping:
    """NuSLERP of deltas if there is a base, else of weights; whole, by rows or by columns."""
    whole, columns = of.parameters.plain("nuslerp_flatten", True), of.parameters.plain("nuslerp_row_wise", False)
    along = "tensor" if whole else "columns" if columns else "rows"
    return MethodMapping("nuslerp", {"of": _of(of), "along": along}, of.weights())


def _multislerp(of: Arrangement) -> MethodMapping:
    """Direction of the weighted mean of unit vectors, times the mean norm: the Karcher mean with zero steps."""
    weights, normalized = of.weights(), bool(of.parameters.plain("normalize_weights", True))
    scale = 1.0
    if not normalized:
        if _of(of) == "weights" or not all(isinstance(w, int | float) for w in weights):
            what = "'normalize_weights: false' needs a base model and one weight per model"
            of.parameters.found.problem("parameters", what)
        else:
            scale = sum(weights)
    return MethodMapping("karcher", {"max_iter": 0, "of": _of(of)}, weights, scale=scale)


def _arcee_fusion(of: Arrangement) -> MethodMapping:
    of.parameters.found.note(
        "arcee_fusion computes its threshold from all importances; mergekit samples a million, with replacement, for "
        "larger tensors"
    )
    return MethodMapping("arcee_fusion")


def _of(arrangement: Arrangement) -> str:
    """`deltas` if the configuration or every slice names a base model, else `weights`."""
    config = arrangement.parameters.config
    have = {(part.base or config.base) is not None for part in config.slices}
    if len(have) > 1:
        what = f"slices with and without a base model have no counterpart for '{config.method}'"
        arrangement.parameters.found.problem("slices", what)
    return "deltas" if True in have else "weights"


def _presence(of: Arrangement, flags: Sequence[float | None]) -> Any:
    """Weight 1 in slices that contain the expert, 0 in the others."""
    entries: list[dict[str, Any]] = [{"layers": "before", "value": flags[0] or 0.0}]
    start = 0
    for part, flag in zip(of.parameters.config.slices, flags, strict=True):
        entries.append({"layers": [start, start + part.n_layers], "value": flag or 0.0})
        start += part.n_layers
    return [*entries, {"layers": "after", "value": flags[-1] or 0.0}]


def _density(of: Arrangement) -> dict[str, list[Any]]:
    """Densities; mergekit keeps everything at 1 and above, and nothing at 0 and below."""
    values = of.own("density", 1.0, 1.0)
    clipped = [_clipped(v, of) for v in values]
    if clipped != values:
        of.parameters.found.note("densities outside [0, 1] are clipped, as in mergekit")
    return {"density": clipped}


def _clipped(value: Any, of: Arrangement) -> Any:
    """Densities clipped to [0, 1]; mergekit clips a gradient after interpolation, which a list cannot express."""
    if isinstance(value, Mapping):
        return {**value, "value": _clipped(value["value"], of)}
    if isinstance(value, list):
        if any(isinstance(v, Mapping) for v in value):
            return [_clipped(v, of) for v in value]
        if any(not 0 <= v <= 1 for v in value):
            what = (
                f"'density': the gradient {value} leaves [0, 1], where mergekit clips it layer by layer: no counterpart"
            )
            of.parameters.found.problem("parameters", what)
        return value
    return value if 0 <= value <= 1 else min(max(value, 0.0), 1.0)


def _rescale(of: Arrangement, *, default: bool = True) -> str:
    return "l1" if of.parameters.plain("rescale", default) else "none"


def _rescale_if_on(of: Arrangement) -> dict[str, Any]:
    """Option of methods that do not rescale by default."""
    value = _rescale(of, default=False)
    return {} if value == "none" else {"rescale": value}


def _reduce(of: Arrangement, default: bool) -> str:
    return "mean" if of.parameters.plain("normalize", default) else "sum"


_SUMS = ("weight", "lambda", "normalize", "int8_mask", "rescale")
METHODS: Mapping[str, Method] = {
    "linear": Method(_linear, ("weight", "normalize"), needs_base=False),
    "slerp": Method(_slerp, ("t",), models=2, weighted=False),
    "task_arithmetic": Method(_task_arithmetic, _SUMS),
    "ties": Method(_ties, (*_SUMS, "density")),
    "dare_ties": Method(_dare("ties"), (*_SUMS, "density")),
    "dare_linear": Method(_dare("linear"), (*_SUMS, "density")),
    "della": Method(_della(elects=True), (*_SUMS, "density", "epsilon")),
    "della_linear": Method(_della(elects=False), (*_SUMS, "density", "epsilon")),
    "breadcrumbs": Method(_breadcrumbs(elects=False), (*_SUMS, "density", "gamma")),
    "breadcrumbs_ties": Method(_breadcrumbs(elects=True), (*_SUMS, "density", "gamma")),
    "model_stock": Method(_model_stock, ("filter_wise",), weighted=False),
    "sce": Method(_sce, ("select_topk", "int8_mask"), weighted=False),
    "karcher": Method(_karcher, ("max_iter", "tol"), needs_base=False),
    "nearswap": Method(_nearswap, ("t",), models=2, weighted=False),
    "nuslerp": Method(
        _nuslerp,
        ("weight", "nuslerp_flatten", "nuslerp_row_wise"),
        needs_base=False,
        takes_base=True,
        models=2,
        weighted=False,
    ),
    "multislerp": Method(_multislerp, ("weight", "normalize_weights"), needs_base=False, takes_base=True),
    "arcee_fusion": Method(_arcee_fusion, (), models=2, weighted=False),
    "ram": Method(_ram, ("epsilon",), weighted=False),
    "ramplus_tl": Method(_ramplus, ("epsilon", "r", "alpha"), weighted=False),
    "passthrough": Method(_passthrough, ("scale",), needs_base=False, models=1),
}
"""mergekit's name -> method."""
