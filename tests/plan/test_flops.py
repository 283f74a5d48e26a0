"""Operations of a method by class, against sums by hand and against calls that were counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.docs_fixture import write_models
from tests.helpers.merging import EMBEDDING, INNER, NORM, UP0, VOCAB, WIDTH, Family
from torch.utils._python_dispatch import TorchDispatchMode

import actmat
from actmat.linalg.operations import gram, polar_factor, product, svd, thin_svd, total
from actmat.methods import all_methods, get_method
from actmat.methods.contract import MergeMethod
from actmat.planning import MergePlan
from actmat.planning.cost import item_operations, method_operations
from actmat.report.words import plan_time

ROWS, INPUTS, EXPERTS = 6, 10, 3
"""Of one matrix; number of deltas."""

BY_HAND = {"slerp": 60, "arcee_fusion": 60, "nearswap": 60, "nuslerp": 60} | {
    "della": 180 * 4,
    "karcher": 540,
    "model_stock": 540,
}
"""Entries of the passes of methods that do not make one pass per expert."""


def by_class(found: Any) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for operation in found:
        counted[operation.kind] += operation.flops
    return dict(counted)


def defaults(method: MergeMethod) -> dict[str, Any]:
    return method.resolve_options({})


@pytest.mark.parametrize("method", all_methods(), ids=lambda m: m.name)
def test_matrices_and_stacks_add_up(method: MergeMethod) -> None:
    options = defaults(method)
    one = by_class(method_operations(method, [(ROWS, INPUTS)], EXPERTS, options))
    assert one, "every method costs something"
    if method.acts_on != "matrix":
        assert one == {"entry": BY_HAND.get(method.name, 180)}
    twice = {kind: 2 * flops for kind, flops in one.items()}
    assert by_class(method_operations(method, [(ROWS, INPUTS)] * 2, EXPERTS, options)) == twice
    assert by_class(method_operations(method, [(2, ROWS, INPUTS)], EXPERTS, options)) == twice


def test_actmat_by_hand() -> None:
    """Wide enough for the primal form: per expert `K_t` and `D_t K_t`; a factorization, a spectrum, two products."""
    found = method_operations(get_method("actmat"), [(400, 300)], 3, defaults(get_method("actmat")))
    grams, terms = 3 * 2 * 400 * 300**2, 3 * 2 * 400 * 300**2
    applied = 2 * 2 * 400 * 300 * 150  # half of the directions: into their coordinates, and back
    assert by_class(found) | {"entry": 0} == {
        "product": grams + terms + applied,
        "cholesky": 300**3 // 3,
        "eigh": 9 * 300**3,
        "entry": 0,
    }


def test_a_ridge_needs_no_spectrum_and_a_short_stack_the_dual_form() -> None:
    ridge = get_method("actmat_ridge")
    assert by_class(method_operations(ridge, [(400, 300)], 3, defaults(ridge))).keys() == {
        "product",
        "cholesky",
        "entry",
    }
    dual = method_operations(get_method("actmat"), [(10, 300)], 3, defaults(get_method("actmat")))
    assert by_class(dual)["eigh"] == 9 * 30**3


class CountProducts(TorchDispatchMode):
    """Adds up `2 M N K` of every product that torch runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            left, right = args[-2:]
            self.flops += 2 * left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("actmat", {"solver": "eigh", "filter": "exponential"}, (80, 600)),
        ("actmat", {"solver": "eigh", "filter": "exponential"}, (700, 96)),
        ("actmat", {"filter": "exponential"}, (24, 200)),
        ("actmat_ridge", {}, (300, 96)),
        ("actmat", {"solver": "stacked", "null": "sum"}, (40, 96)),
        ("wudi", {"optimizer": "adam", "steps": 7}, (40, 96)),
        ("tsv", {}, (60, 96)),
        ("iso_c", {}, (60, 96)),
        ("ct_merging", {}, (90, 96)),
        ("iso_cts", {}, (90, 96)),
        ("knots", {"rule": "task_arithmetic"}, (60, 96)),
        ("knots", {"rule": "tsv"}, (60, 96)),
    ],
)
def test_products_are_those_that_run(name: str, options: dict[str, Any], shape: tuple[int, int]) -> None:
    """Torch counts the products that a merge really makes; the plan says the same within a tenth."""
    method = get_method(name)
    options = method.resolve_options(options)
    rng = torch.Generator().manual_seed(0)
    deltas = [torch.randn(shape, generator=rng) for _ in range(3)]
    with CountProducts() as counter:
        method.merge(deltas, **options)
    planned = by_class(method_operations(method, [shape], 3, options))["product"]
    assert planned == pytest.approx(counter.flops, rel=0.1)


def test_counts_of_the_routines() -> None:
    assert product(2, 3, 4).flops == 48
    assert gram(10, 100).flops == 2 * 10 * 100 * 100
    assert gram(10, 4096).flops == pytest.approx(2 * 10 * 4096**2 * 17 / 32), "sixteen panels"
    assert svd(30, 20).flops == 6 * 30 * 400 + 20 * 8000
    assert by_class(thin_svd(30, 20, 5, double=False))["eigh"] == 9 * 8000
    assert by_class(polar_factor(30, 20, double=True)).keys() == {"svd", "product"}


def test_the_plan_adds_up_its_items(tmp_path: Path) -> None:
    """Layers by ACTMat; norms and embeddings as means, `T N^2`."""
    family = Family.make(tmp_path, layers=1, experts=3)
    plan = actmat.plan(family.base, family.experts, method="actmat")
    by_name = {item.name: item.cost.flops for item in plan.items}
    actmat_, options = get_method("actmat"), defaults(get_method("actmat"))
    assert by_name[UP0] == total(method_operations(actmat_, [(INNER, WIDTH)], 3, options))
    assert by_name[NORM] == 3 * WIDTH
    assert by_name[EMBEDDING] == 3 * VOCAB * WIDTH
    assert plan.flops == sum(by_name.values())
    kept = actmat.plan(family.base, family.experts, keep=["*"])
    assert kept.flops == 0


def test_factored_items_are_counted_on_their_cores(tmp_path: Path) -> None:
    write_models(tmp_path)
    adapters = [tmp_path / "adapters" / name for name in ("math", "code")]
    for base in (tmp_path / "base", None):
        plan = actmat.plan(base, adapters, method="actmat")
        found = [i for i in plan.items if i.form == "factored"]
        assert found
        for item in found:
            assert item.cost.flops == total(item_operations(item, "float32"))
            assert by_class(item_operations(item, "float32"))["eigh"] == 9 * 8**3, "two experts of rank 4"


def test_a_predicted_time_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family.make(tmp_path, layers=1, experts=2)
    plan = actmat.plan(family.base, family.experts, method="actmat")
    assert plan_time(plan, 1).startswith("less than a minute (")
    hours = {2: "about 4 h on 2 workers (", 4: "about 2 h on 4 workers (", 16: "about 30 min on 16 workers ("}
    monkeypatch.setattr(MergePlan, "seconds", 8 * 3600.0)
    for workers, words in hours.items():
        assert plan_time(plan, workers).startswith(words)
