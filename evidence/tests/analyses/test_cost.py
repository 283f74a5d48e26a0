"""Costs: operations counted, and the table of methods."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from benchmarks.common import relative_error
from evidence.tests.helpers.analyses import gaussian
from evidence.tests.helpers.terminal import actmat as run_cli
from evidence.tests.helpers.terminal import console_text
from evidence.tests.helpers.tolerances import F64_ORACLE
from torch.utils._python_dispatch import TorchDispatchMode

from actmat import merge_matrices
from actmat.errors import RecipeError
from actmat.methods import all_methods
from actmat_experiments.analyses import cost
from actmat_experiments.analyses.cost import PAPER
from actmat_experiments.analyses.cost_table import RULES, rule_table

# Operations by formula, times by clock.


def test_all_methods_are_timed_on_all_shapes():
    ticks = []
    result = cost([(8, 8), (6, 12)], n_experts=3, repeats=1, on_method=lambda: ticks.append(1))
    assert len(result.costs) == len(ticks) == 2 * len(all_methods())
    assert {c.shape for c in result.costs} == {(8, 8), (6, 12)}
    assert all(c.seconds > 0 and c.products > 0 for c in result.costs)
    found = {c.method: c for c in result.costs if c.shape == (8, 8)}
    assert found["actmat"].paper == 9 * 8**3
    assert found["slerp"].declared == 8**2
    assert found["ties"].paper is None
    assert [t.row_count for t in result.tables()] == [len(PAPER), *[len(all_methods())] * 2], "operations, then times"
    data = result.to_json()
    assert data["settings"]["threads"] == torch.get_num_threads()
    assert set(data["rates"]) == {"8x8", "6x12"}


@pytest.mark.parametrize(
    ("shapes", "more", "message"),
    [
        ([], {}, "shapes with entries"),
        ([(0, 4)], {}, "shapes with entries"),
        ([(4, 4)], {"device": "tpu"}, "device is"),
        ([(4, 4)], {"methods": ["actmatt"]}, "actmat"),
    ],
)
def test_what_cannot_be_timed_is_refused(shapes, more, message):
    with pytest.raises(RecipeError, match=message):
        cost(shapes, **more)


def test_the_command(tmp_path):
    outcome = run_cli(["analyze", "cost", "--shape", "6x4", "-m", "average", "--repeats", "1", "--out", str(tmp_path)])
    assert outcome.code == 0
    assert "6x4, 7 experts" in outcome.out
    assert run_cli(["analyze", "cost", "--shape", "6", "--out", str(tmp_path / "b")]).code == 1


# The cost table counts what the published rules do: naive transcriptions under a counter of operations.


N = 6
PRODUCTS = {"mm", "bmm", "addmm"}
SVDS = {"_linalg_svd", "linalg_svd"}
INVERSES = {"linalg_inv_ex", "linalg_inv"}
ENTRIES = {"add", "sub", "mul", "div"}


class Counter(TorchDispatchMode):
    """Counts products, inverses, SVDs, and operations whose result has all `N x N` entries."""

    def __init__(self) -> None:
        super().__init__()
        self.found = dict.fromkeys(("products", "inverses", "svds", "entries"), 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        for kind, names in (("products", PRODUCTS), ("inverses", INVERSES), ("svds", SVDS), ("entries", ENTRIES)):
            self.found[kind] += name in names
        return func(*args, **(kwargs or {}))


def total(terms):
    return functools.reduce(operator.add, terms)


def average(base, experts):
    return total(experts) / len(experts)


def task_arithmetic(base, experts):
    return base + 0.4 * total([w - base for w in experts])


def regmean(base, experts, grams):
    deltas = [w - base for w in experts]
    left = total([d @ g for d, g in zip(deltas, grams, strict=True)])
    return base + left @ torch.linalg.inv(total(grams))


def actmat(base, experts):
    deltas = [w - base for w in experts]
    grams = [d.mT @ d for d in deltas]
    left = total([d @ g for d, g in zip(deltas, grams, strict=True)])
    return base + left @ torch.linalg.inv(total(grams))


def iso_c(base, experts):
    u, s, vh = torch.linalg.svd(total([w - base for w in experts]), full_matrices=False)
    return base + (s.mean() * u) @ vh


def tsv(base, experts):
    kept = N // len(experts)
    parts = [torch.linalg.svd(w - base, full_matrices=False) for w in experts]
    left = torch.cat([u[:, :kept] for u, _, _ in parts], 1)
    right = torch.cat([vh[:kept] for _, _, vh in parts])
    polars = [torch.linalg.svd(x, full_matrices=False) for x in (left, right)]
    with torch.utils._python_dispatch._disable_current_modes():  # the products U V^T, which the paper does not count
        x, y = (u @ vh for u, _, vh in polars)
    return base + (x * torch.cat([s[:kept] for _, s, _ in parts])) @ y


NAIVE = {f.__name__: f for f in (average, task_arithmetic, regmean, actmat, iso_c, tsv)}


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.method)
@pytest.mark.parametrize("n_experts", [2, 3])
def test_operations_of_the_published_rules(rule, n_experts):
    base = gaussian(N, N, seed=3)
    deltas = list(gaussian(n_experts, N, N))
    experts = [base + d for d in deltas]
    grams = [x.mT @ x for x in gaussian(n_experts, 9, N, seed=4)]
    given = {"grams": grams} if rule.method == "regmean" else {}
    with Counter() as counter:
        merged = NAIVE[rule.method](base, experts, **given)
    wanted = {kind: getattr(rule, kind).at(n_experts) for kind in counter.found}
    assert counter.found == wanted
    statistics = {"statistics": {"gram": grams}} if given else {}
    found = base + merge_matrices(rule.method, deltas, **statistics)
    assert relative_error(merged, found) < F64_ORACLE, "the transcription is the rule"


def test_the_printed_formulae_are_the_papers():
    """Table 6 with all its terms, and as counted here."""
    assert {r.method: (r.printed, r.counted, r.leading) for r in RULES} == {
        "average": ("T N^2", "T N^2", "T N^2"),
        "task_arithmetic": ("(2T + 1) N^2", "(2T + 1) N^2", "(2T + 1) N^2"),
        "regmean": ("(T + 3) N^3 + (2T - 2) N^2", "(T + 3) N^3 + (3T - 1) N^2", "(T + 3) N^3"),
        "actmat": ("(2T + 3) N^3 + (3T - 2) N^2", "(2T + 3) N^3 + (3T - 1) N^2", "(2T + 3) N^3"),
        "iso_c": ("23 N^3 + (2T + 2) N^2 + N", "23 N^3 + (2T + 1) N^2", "23 N^3"),
        "tsv": ("(22T + 45) N^3 + (T + 3) N^2", "(22T + 45) N^3 + (T + 2) N^2", "(22T + 45) N^3"),
    }
    assert [r.method for r in RULES if "(2L - 1) T N^2" in r.preprocessing] == ["regmean"]


def test_the_boxed_forms_make_the_papers_count():
    """RegMean and ACTMat on weights, without a base added back: the paper's terms in `N^2`."""
    base = gaussian(N, N, seed=3)
    experts = [base + d for d in gaussian(3, N, N)]
    with Counter() as counter:
        grams = [d.mT @ d for d in [w - base for w in experts]]
        total([w @ g for w, g in zip(experts, grams, strict=True)]) @ torch.linalg.inv(total(grams))
    grams = [x.mT @ x for x in gaussian(3, 9, N, seed=4)]
    with Counter() as measured:
        left = total([w @ g for w, g in zip(experts, grams, strict=True)])
        left @ torch.linalg.inv(total(grams))
    printed = {r.method: r.printed_entries.at(3) for r in RULES}
    assert (counter.found["entries"], measured.found["entries"]) == (printed["actmat"], printed["regmean"])


def test_the_table_fits_and_is_in_the_result():
    text = console_text(rule_table())
    assert max(map(len, text.splitlines())) <= 80
    assert "22T + 45" in text
    result = cost([(8, 8)], n_experts=2, methods=["average"], repeats=1)
    assert result.tables()[0].title == "Operations by rule"
    assert [r["method"] for r in result.to_json()["rules"]] == [r.method for r in RULES]
