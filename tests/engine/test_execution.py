"""Whole merges in the engine: what a rule sees, surveys, variants, stored values, errors with names."""

import concurrent.futures
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.adapters import tiny
from tests.helpers.merging import Q0, UP0, Family, expert_of
from tests.helpers.merging import actmat as actmat_command
from torch import Tensor

import actmat
from actmat import methods as methods_module
from actmat.api.merging import plan as plan_merge
from actmat.engine.executors.threads import ThreadExecutor
from actmat.engine.method import generator_for
from actmat.engine.resources import Resources
from actmat.engine.session import Session, SessionSpec, UnitResult
from actmat.engine.units import Unit, plan_units
from actmat.errors import CheckpointError, NumericalError
from actmat.methods import METHODS, Access, Merged, MergeMethod, Survey, get_method
from actmat.recipe import make_recipe
from actmat.run.inputs import open_inputs
from actmat.run.run import plan_all


def merge(family: Family, **settings: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Merged tensors, and rows of the manifest by tensor."""
    chosen: dict[str, Any] = {"out": family.out, "threads": 1, "durable": False, "overwrite": True, **settings}
    report = actmat.merge(family.base, family.experts, **chosen)
    return load_file(family.out / "model.safetensors"), {t["name"]: t for t in report.manifest["tensors"]}


def inputs(family: Family, name: str) -> tuple[Tensor, list[Tensor]]:
    base = load_file(family.base / "model.safetensors")[name]
    return base, [load_file(e / "model.safetensors")[name] - base for e in family.experts]


def use(monkeypatch: pytest.MonkeyPatch, rule: MergeMethod) -> None:
    monkeypatch.setattr(methods_module, "METHODS", (*METHODS, rule))


def rule(merge: Any, **changes: Any) -> MergeMethod:
    return replace(get_method("average"), name="probe", merge=merge, laws=frozenset(), **changes)


def test_a_survey_sees_every_tensor_in_every_round(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[int, float]] = []

    def observe(state: dict[str, Any], deltas: Sequence[Tensor], options: Any) -> None:
        state["sum"] += sum(float(d.abs().sum()) for d in deltas)
        log.append((state["round"], float(deltas[0].numel())))

    def join(state: dict[str, Any], other: dict[str, Any]) -> None:
        state["sum"] += other["sum"]

    def advance(state: dict[str, Any]) -> bool:
        state["round"] += 1
        return bool(state["round"] < 3)

    def probe(deltas: Sequence[Tensor], *, survey: Any = None) -> Merged:
        return Merged(torch.full_like(deltas[0], survey))

    survey = Survey(
        applies=lambda options: True,
        start=lambda n_experts, options: {"round": 0, "sum": 0.0},
        observe=observe,
        fork=lambda state: {**state, "sum": 0.0},
        join=join,
        advance=advance,
        finish=lambda state: state["sum"],
    )
    use(monkeypatch, rule(probe, acts_on="tensor", survey=survey))
    merged, _ = merge(family, method="probe", scope="all", threads=2)
    names = list(merged)
    expected = 3 * sum(float(d.abs().sum()) for n in names for d in inputs(family, n)[1])
    assert sorted({r for r, _ in log}) == [0, 1, 2]
    assert all(sum(size for r, size in log if r == k) == 592 for k in range(3))
    found = float((merged[Q0] - inputs(family, Q0)[0]).mean())
    assert math.isclose(found, expected, rel_tol=1e-4)


def test_a_rule_is_given_what_it_declares(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def probe(
        deltas: Sequence[Tensor],
        *,
        weights: Any = None,
        base: Any = None,
        generator: torch.Generator | None = None,
        strength: float = 1.0,
    ) -> Merged:
        seen.update(
            weights=weights, base=base.clone(), strength=strength, draw=torch.rand(1, generator=generator).item()
        )
        return Merged(deltas[0].clone(), {"note": 1.5})

    use(monkeypatch, rule(probe, acts_on="matrix", access=Access()))
    settings: dict[str, Any] = {"method": "probe", "keep": ["*lm_head*", "*.mlp.*"], "weights": [2, 1]}
    _, rows = merge(family, options={"strength": 0.25}, **settings)
    assert seen["weights"] == (2.0, 1.0)
    assert seen["strength"] == 0.25
    assert torch.equal(seen["base"], inputs(family, Q0)[0])
    assert rows[Q0]["stats"] == {"note": 1.5}
    draw = seen["draw"]
    merge(family, threads=3, **settings)
    assert seen["draw"] == draw
    merge(family, seed=1, **settings)
    assert seen["draw"] != draw


def test_an_error_of_a_rule_is_told_with_the_tensor(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(deltas: Sequence[Tensor]) -> Merged:
        raise NumericalError("it did not converge")

    use(monkeypatch, rule(probe, acts_on="matrix"))
    with pytest.raises(NumericalError) as caught:
        merge(family, method="probe")
    assert str(caught.value).endswith("method 'probe': it did not converge")
    assert "tensor 'model.layers.0." in str(caught.value) or "tensor 'lm_head" in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_rule_that_gives_no_numbers_is_stopped(family: Family, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    def probe(deltas: Sequence[Tensor], *, strength: float = 2.0) -> Merged:
        out = deltas[0].clone()
        out.flatten()[-1] = value
        return Merged(out)

    use(monkeypatch, rule(probe, acts_on="tensor"))
    with pytest.raises(NumericalError, match=r"gave NaN or Inf for finite deltas, with options \{'strength': 2.0\}"):
        merge(family, method="probe")
    assert not family.out.exists()


def test_a_bug_in_a_rule_is_not_dressed_up(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(deltas: Sequence[Tensor]) -> Merged:
        raise ZeroDivisionError

    use(monkeypatch, rule(probe, acts_on="matrix"))
    with pytest.raises(ZeroDivisionError):
        merge(family, method="probe")
    assert not family.out.exists()


def test_a_mask_of_infinities_may_stay_one(family: Family) -> None:
    for folder in (family.base, *family.experts):
        family.change(folder, lambda t: t[Q0][0].fill_(-math.inf))
    merged, _ = merge(family, method="average", dtype="float16")
    assert merged[Q0][0].tolist() == [-math.inf] * 8
    assert merged[Q0][1:].isfinite().all()


def test_experts_of_another_dtype_are_noted(family: Family) -> None:
    base = load_file(family.base / "model.safetensors")
    half = {k: v.bfloat16() for k, v in expert_of(base, 5).items()}
    family.change(family.experts[0], lambda t: t.update(half))
    plan = plan_merge(family.base, family.experts)
    assert any("'expert0' is stored in bfloat16, the base in float32" in n for n in map(str, plan.notes))


@pytest.mark.parametrize("held_bytes", [0, 1 << 28])  # rules that walk several times: place by place, or held
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dare", {"rule": "ties", "density": 0.5}),  # read place by place
        ("dare", {"rescale": "l1", "density": 0.5}),  # holds whole deltas in the worker's room
        ("ties", {"density": 0.5}),
        ("model_stock", {}),
        ("karcher", {}),  # which looks at the base too
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_however_deltas_are_read_the_rule_gives_its_bits(
    family: Family, monkeypatch: pytest.MonkeyPatch, method: str, options: dict[str, Any], held_bytes: int
) -> None:
    monkeypatch.setattr("actmat.planning.work.HELD_BYTES", held_bytes)
    for module in ("deltas", "reader", "item", "sinks"):
        monkeypatch.setattr(f"actmat.engine.{module}.CHUNK", 16)
    monkeypatch.setattr("actmat.engine.deltas.CHUNK_ENTRIES", 12)
    merged, _ = merge(family, method=method, options=options, scope="all", seed=3, threads=2)
    rule = get_method(method)
    for name, value in merged.items():
        base, deltas = inputs(family, name)
        needs: dict[str, Any] = {"base": base} if rule.needs_base else {}
        if rule.is_random:
            needs["generator"] = generator_for(3, name, "0")
        expected = rule.merge(deltas, **needs, **rule.resolve_options(options)).value
        if method in ("model_stock", "karcher") and not held_bytes:  # shorter places, other sums in float64
            assert torch.allclose(value, base + expected, rtol=1e-6, atol=1e-9), name
        else:
            assert torch.equal(value, base + expected), name


@pytest.mark.parametrize("method", ["actmat", "iso_c", "tsv", "wudi"])
def test_large_transposed_matrices_give_the_bytes_of_small_ones(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger than a piece, the deltas of a one-pass rule lie over one another; stored transposed, each is turned."""
    model = tiny("gpt2")
    model.save_pretrained(tmp_path / "base")
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
        model.save_pretrained(tmp_path / f"e{seed}")
    experts = [tmp_path / "e1", tmp_path / "e2"]
    found = []
    for chunk in (1 << 19, 16):
        for module in ("deltas", "reader", "item", "sinks"):
            monkeypatch.setattr(f"actmat.engine.{module}.CHUNK", chunk)
        actmat.merge(tmp_path / "base", experts, out=tmp_path / f"m{chunk}", method=method, threads=1, durable=False)
        found.append(load_file(tmp_path / f"m{chunk}" / "model.safetensors"))
    assert any("c_fc" in name for name in found[0])
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


class AtOnce(concurrent.futures.ThreadPoolExecutor):
    """Does what is submitted before it returns: the order is that of submission."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        done.set_result(fn(*args, **kwargs))
        return done


def test_several_workers_begin_with_the_largest_tensors(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    merge_unit = Session.merge

    def noting(session: Session, unit: Unit) -> UnitResult:
        (plan, n), *_ = unit.members
        sizes.append(session.spec.plans[plan].items[n].numel)
        return merge_unit(session, unit)

    monkeypatch.setattr(Session, "merge", noting)
    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor", AtOnce)
    merge(family, method="average", scope="all", threads=1)
    in_order = list(sizes)
    sizes.clear()
    merge(family, method="average", scope="all", threads=2)
    assert sizes == sorted(in_order, reverse=True) != in_order


@pytest.mark.parametrize("turn", range(5))
def test_bad_values_are_told_before_errors_that_later_tensors_raise(
    turn: int, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a tensor with NaN is found, the others are only read: no method is called that could fail."""

    def fails(deltas: Sequence[Tensor], *, weights: Sequence[float] | None = None) -> Merged:
        first, *_ = (delta.clone() for delta in deltas)
        if first.shape == inputs(family, UP0)[0].shape:
            raise NumericalError("it did not converge")
        return Merged(first)

    use(monkeypatch, rule(fails, acts_on="matrix"))
    first = min(load_file(family.base / "model.safetensors"))
    assert first < UP0, "tensors are merged in the order of storage"
    family.change(family.experts[0], lambda t: t[first].view(-1)[:2].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=f"'{first}' of expert 'expert0' has 2 values"):
        merge(family, method="probe", out=family.root / f"out{turn}")


def test_what_runs_while_another_unit_fails_is_returned(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are written: a later run need not do it again."""
    real, both, going_on = Session.merge, threading.Barrier(2, timeout=60), []

    def merging(session: Session, unit: Unit) -> UnitResult:
        if both.wait() == 0:
            raise KeyboardInterrupt
        going_on.append(unit.name)
        assert executor._stopped.wait(60), "what fails lets no other unit begin"
        return real(session, unit)

    monkeypatch.setattr(Session, "merge", merging)
    recipe = make_recipe({"base": str(family.base), "experts": [str(e) for e in family.experts]})
    found: list[str] = []
    with open_inputs([recipe]) as (inputs, places):
        plans = plan_all(inputs, places.room)
        executor = ThreadExecutor(inputs, [None], Resources(2, 1 << 33))
        spec = SessionSpec(plans, str(family.base), (), (None,))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the loop raises after it gave results
            for result in executor.run(spec, plan_units(plans, [()], observed=False)):
                found.append(result.unit.name)
    assert found == going_on
    assert len(found) == 1


@pytest.mark.parametrize(
    ("stored", "dtype", "settings"),
    [
        ("float32", "float32", {"method": "task_arithmetic", "options": {"scaling": 1.0}}),
        ("bfloat16", "bfloat16", {"method": "task_arithmetic", "options": {"scaling": 1.0}}),
        ("float32", "bfloat16", {"method": "average"}),
        ("float32", "float32", {"method": "average", "scale": 3e38}),
        ("float32", "float32", {"method": "model_stock", "scale": 3e38}),
        ("float32", "float32", {"method": "actmat", "scale": 3e38}),
    ],
    ids=lambda value: value if isinstance(value, str) else value["method"],
)
def test_no_infinity_is_written(family: Family, stored: str, dtype: str, settings: dict[str, Any]) -> None:
    """A sum, a scale, a cast: whatever takes finite entries out of range stops the merge."""
    largest = 3.4e38 if dtype != stored else 3.3e38
    for folder, value in ((family.base, 3e38), *((e, largest) for e in family.experts)):
        family.change(folder, lambda t: t.update({n: x.to(getattr(torch, stored)) for n, x in t.items()}))
        value = (0.0 if folder == family.base else 40.0) if "scale" in settings else value
        family.change(folder, lambda t, v=value: t[Q0][0].fill_(v))
    with pytest.raises(NumericalError, match=f"has values beyond {dtype}'s range"):
        merge(family, dtype=dtype, scope="all", **settings)
    assert not family.out.exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--weight", "1e300", "--weight", "1"], "experts.0.weight"),
        (["--scale", "1e300"], "scale: found 1e+300, expected a factor that float32 holds"),
        (["--method", "task_arithmetic", "--option", "scaling=1e300"], "option 'scaling' must be at most 3.40282e+38"),
    ],
)
def test_factors_that_float32_does_not_hold_are_refused(family: Family, flags: list[str], said: str) -> None:
    outcome = actmat_command(family.argv(*flags), code=1)
    assert said in outcome.words


def test_an_inverse_that_float32_does_not_hold_is_refused_too(family: Family) -> None:
    with pytest.raises(NumericalError, match="gives a factor beyond the compute dtype's range"):
        merge(family, method="dare", options={"density": 1e-300}, scope="all")


def test_a_variance_stays_one(family: Family) -> None:
    """A method that adds deltas up would make it negative: it is averaged, and the plan says so."""
    name = "bn.running_var"
    for folder, value in ((family.base, 1.0), *((e, 0.25) for e in family.experts)):
        family.change(folder, lambda t, v=value: t.update({name: torch.full((4,), v)}))
    chosen = {"method": "task_arithmetic", "options": {"scaling": 1.0}}
    merged, rows = merge(family, scope="all", **chosen)
    assert merged[name].tolist() == [0.25] * 4
    assert "variance of a BatchNorm" in rows[name]["reason"]
    with pytest.raises(NumericalError, match=r"holds variances, expected to be 0 or more, and has -0\.5"):
        merge(family, rules=[{"match": name, **chosen}])


def test_tensors_without_entries_are_copied(family: Family) -> None:
    for folder in (family.base, *family.experts):
        family.change(folder, lambda t: t.update({"none.weight": torch.empty(0, 5)}))
    for method in ("actmat", "wudi", "knots", "iso_cts"):
        merged, rows = merge(family, method=method)
        assert merged["none.weight"].shape == (0, 5)
        assert rows["none.weight"]["action"] == "copy"
