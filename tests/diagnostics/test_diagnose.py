"""Whole diagnoses of tiny models: right numbers for every layout and rule, the same model, resumable, within memory."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.adapters.test_adapter_reading import edit_tensors
from tests.diagnostics.test_measures import PRINTED, flat
from tests.helpers.adapters import LLAMA, save_adapter, tiny
from tests.helpers.memory import peak_bytes
from tests.helpers.merging import Q0, UP0, Family
from tests.helpers.models import BY_NAME, save_family, stored
from torch import Tensor

import actmat
from actmat.api.diagnosing import diagnose_output
from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.writing.staging import Staging
from actmat.diagnostics.measure import measure_dense
from actmat.diagnostics.model import Diagnosis, read_diagnosis
from actmat.engine.observer import observing_bytes
from actmat.errors import RecipeError
from actmat.experts.deltas import DeltaSource
from actmat.extras.collect.outputs import recipe_of_output
from actmat.layout.types import Role, TensorLayout
from actmat.methods.actmat import ACTMAT
from actmat.planning import regions as regions_module
from actmat.planning.item import Item, MethodCall, Target, Write
from actmat.recipe import make_recipe
from actmat.run import diagnose_recipe
from actmat.settings import RunSettings

FAST: dict[str, Any] = {"threads": 1}


@pytest.fixture
def family(tmp_path: Path) -> Family:
    return Family.make(tmp_path, experts=3)


def timeless(diagnosis: Diagnosis) -> Diagnosis:
    """Without time and place: equal for equal inputs."""
    return dataclasses.replace(diagnosis, created="", out=None)


def merge(family: Family, out: str = "out", **settings: Any) -> Any:
    return actmat.merge(family.base, family.experts, out=family.root / out, durable=False, **FAST, **settings)


def weights(family: Family, out: str) -> bytes:
    return (family.root / out / "model.safetensors").read_bytes()


# The same numbers, the same model


def is_router(tensor: str) -> bool:
    """True for the layer that chooses experts: it is averaged, and no method's matrix."""
    return tensor.endswith((".router.weight", ".block_sparse_moe.gate.weight", ".mlp.gate.weight"))


@pytest.mark.parametrize("method", ["actmat", "ties", "average", "dare", "tsv"])
def test_a_watched_merge_writes_the_same_bytes(family: Family, method: str) -> None:
    merge(family, "plain", method=method, scope="all")
    report = merge(family, "watched", method=method, scope="all", diagnose=True)
    assert weights(family, "plain") == weights(family, "watched")
    assert read_diagnosis(family.root / "watched") == report.diagnosis
    alone = actmat.diagnose(family.base, family.experts, method=method, scope="all", **FAST)
    assert alone.measures == report.diagnosis.measures
    assert alone.findings == report.diagnosis.findings
    assert (alone.source, report.diagnosis.source) == ("diagnose", "merge")
    assert not (family.root / "plain" / "report.json").exists()


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "gpt_oss", "mixtral", "t5"])
@pytest.mark.parametrize("method", ["actmat", "average"])
def test_every_logical_matrix_is_measured(
    name: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed, interleaved, transposed and stacked tensors, by rules that see them whole or in small pieces."""
    monkeypatch.setattr(regions_module, "CHUNK", 100)
    monkeypatch.setattr("actmat.engine.deltas.CHUNK", 100)
    monkeypatch.setattr("actmat.engine.reader.CHUNK", 100)
    monkeypatch.setattr("actmat.engine.sinks.CHUNK", 100)
    case = BY_NAME[name]
    base, experts = save_family(case, tmp_path)
    fields = {"keep": ["lm_head.weight"]} if "lm_head.weight" in stored(base) and not case.tied else {}
    found = actmat.diagnose(base, experts, method=method, compute_dtype="float64", **fields, **FAST)
    start, moved = stored(base), [stored(e) for e in experts]
    out = tmp_path / "out"
    actmat.merge(base, experts, method=method, compute_dtype="float64", out=out, durable=False, **fields, **FAST)
    merged = stored(out)
    seen = 0
    for tensor, value in start.items():
        views = case.views(tensor)
        if views is None or tensor in fields.get("keep", ()) or not value.is_floating_point():
            continue
        mine = [m for m in found.measures if m.name == tensor]
        deltas = [views(e[tensor].double() - value.double()) for e in moved]
        results = views(merged[tensor].double() - value.double())
        assert sorted(m.shape for m in mine) == sorted(tuple(r.shape) for r in results), tensor
        # parts come in the order of storage, views in the order of the test: compare by norm, which tells them apart
        for m in mine:
            k = min(range(len(results)), key=lambda k: abs(float(deltas[0][k].norm()) - m.norms[0]))
            own = [d[k] for d in deltas]
            numbers = measure_dense(own, results[k])
            assert m.norms == pytest.approx(numbers["norms"], rel=PRINTED)
            assert flat(m.cosine) == pytest.approx(flat(numbers["cosine"]), abs=PRINTED)
            # the output is rounded to float32
            assert m.residual == pytest.approx(numbers["residual"], rel=1e-4, abs=1e-4)
            assert m.merged_norm == pytest.approx(numbers["merged_norm"], rel=1e-4)
            assert m.relative_norms[0] * float(views(value.double())[k].norm()) == pytest.approx(m.norms[0], rel=1e-4)
            seen += 1
    routers = [m for m in found.measures if is_router(m.name)]  # averaged, and of no interest to the views
    assert seen + len(routers) == len(found.measures)


def test_threads_and_resources_change_nothing(family: Family) -> None:
    one = actmat.diagnose(family.base, family.experts, threads=1)
    three = actmat.diagnose(family.base, family.experts, threads=3)
    assert timeless(one) == timeless(three)
    assert sum(one.actions.values()) == len(load_file(family.base / "model.safetensors"))


def test_large_matrices_are_probed(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    base = {"layer.weight": torch.randn(300, 40, generator=rng)}
    places = [tmp_path / f"{n}.safetensors" for n in ("base", "a", "b")]
    for place, size in zip(places, (0.0, 0.1, 0.1), strict=True):
        save_file({k: v + size * torch.randn(v.shape, generator=rng) for k, v in base.items()}, place)
    probed, again = (actmat.diagnose(places[0], places[1:], **FAST).measures[0] for _ in range(2))
    assert probed == again


def test_unchanged_and_copied_tensors_have_no_measures(family: Family) -> None:
    start = load_file(family.base / "model.safetensors")
    for expert in family.experts:
        family.change(expert, lambda t: t.update({Q0: start[Q0]}))
    found = actmat.diagnose(family.base, family.experts, keep=[UP0], **FAST)
    assert not {Q0, UP0} & {m.name for m in found.measures}
    assert found.actions["copy"] == 1


def test_several_methods_share_the_reading(family: Family) -> None:
    from actmat.run import run_recipes

    fields = {"base": str(family.base), "experts": [str(e) for e in family.experts]}
    recipes = [make_recipe({**fields, "method": m, "out": str(family.root / m)}) for m in ("actmat", "average")]
    reports = run_recipes(recipes, RunSettings(durable=False, diagnose=True, **FAST))
    for recipe, report in zip(recipes, reports, strict=True):
        assert report.diagnosis.measures == diagnose_recipe(recipe, RunSettings(**FAST)).measures


# Adapters


@pytest.fixture
def adapters(tmp_path: Path) -> tuple[Path, list[Path]]:
    base = tmp_path / "base"
    tiny("llama").float().save_pretrained(base)
    places = [tmp_path / f"a{seed}" for seed in (1, 2)]
    for seed, place in enumerate(places):
        save_adapter(place, "llama", seed + 1, **LLAMA)
    return base, places


def test_adapters_into_an_adapter_and_into_a_model_agree(adapters: tuple[Path, list[Path]]) -> None:
    base, experts = adapters
    factored = actmat.diagnose(None, experts, method="actmat", **FAST)
    model = actmat.diagnose(base, experts, method="actmat", **FAST)
    assert {m.name + ".weight" for m in factored.measures} == {m.name for m in model.measures}
    assert all(m.snr is None for m in factored.measures + model.measures)
    dense = {m.name: m for m in model.measures}
    for m in factored.measures:
        other = dense[m.name + ".weight"]
        assert m.norms == pytest.approx(other.norms, rel=PRINTED)
        assert flat(m.cosine) == pytest.approx(flat(other.cosine), abs=PRINTED)
        assert m.merged_norm == pytest.approx(other.merged_norm, rel=1e-4)  # float32 there
        assert m.relative_norms is None
        assert other.relative_norms is not None
    assert (factored.source, factored.base, factored.experts[0].kind) == ("adapters", None, "adapter")
    assert model.experts[0].kind == "adapter"


def test_a_watched_merge_of_adapters_writes_the_same_bytes(adapters: tuple[Path, list[Path]], tmp_path: Path) -> None:
    _, experts = adapters
    plain = actmat.merge(None, experts, out=tmp_path / "plain", durable=False, **FAST)
    report = actmat.merge(None, experts, out=tmp_path / "watched", durable=False, diagnose=True, **FAST)
    files = [(r.out / "adapter_model.safetensors").read_bytes() for r in (plain, report)]
    assert files[0] == files[1]
    assert report.diagnosis == read_diagnosis(tmp_path / "watched")
    assert timeless(report.diagnosis).measures == actmat.diagnose(None, experts, **FAST).measures
    assert sum(report.diagnosis.actions.values()) == len(plain.manifest["modules"])


def test_stacked_modules_are_measured_one_by_one(tmp_path: Path) -> None:
    options = {"r": 2, "target_parameters": ["experts.gate_up_proj"], "target_modules": []}
    for seed in (1, 2):
        save_adapter(tmp_path / f"a{seed}", "mixtral", seed, **options)
    found = actmat.diagnose(None, [tmp_path / "a1", tmp_path / "a2"], **FAST)
    stacked = [m for m in found.measures if m.part]
    assert {m.part.split("/")[0] for m in stacked} == {"0", "1", "2"}
    assert all(len(m.shape) == 2 and m.norms[0] > 0 for m in stacked)


def test_an_adapter_that_leaves_a_module_alone(adapters: tuple[Path, list[Path]]) -> None:
    _, experts = adapters

    def without_v(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if "v_proj" in n]:
            del tensors[name]

    edit_tensors(experts[1], without_v)
    found = actmat.diagnose(None, experts, **FAST)
    alone = [m for m in found.measures if "v_proj" in m.name]
    assert alone
    for m in alone:
        assert (m.norms[1], m.residual[1]) == (0, 0)


# Interruptions


def interrupted(monkeypatch: pytest.MonkeyPatch, after: int, run: Any) -> None:
    """Run until the journal has so many tensors, then be killed."""
    real, done = Staging.record, []

    def record(self: Staging, entry: Any) -> None:
        if len(done) == after:
            raise KeyboardInterrupt
        done.append(entry)
        real(self, entry)

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "record", record)
        with pytest.raises(KeyboardInterrupt):
            run()


@pytest.mark.parametrize("first_watched", [True, False])
def test_a_resumed_merge_has_the_whole_report(
    family: Family, monkeypatch: pytest.MonkeyPatch, first_watched: bool
) -> None:
    whole = merge(family, "whole", diagnose=True)
    interrupted(monkeypatch, 5, lambda: merge(family, "cut", diagnose=first_watched))
    again = merge(family, "cut", diagnose=True)
    expected = 5 if first_watched else 2  # matrices merged without measures are merged again, a table and a norm not
    assert again.resumed == expected
    assert timeless(again.diagnosis) == timeless(whole.diagnosis)
    assert weights(family, "cut") == weights(family, "whole")


def test_a_merge_goes_on_without_its_report(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(monkeypatch, 5, lambda: merge(family, diagnose=True))
    report = merge(family)
    assert (report.resumed, report.diagnosis) == (5, None)
    assert not (family.out / "report.json").exists()


def test_muting_decides_no_byte_and_does_not_start_anew(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(monkeypatch, 5, lambda: merge(family, diagnose=True))
    assert merge(family, diagnose=True, mute=["AM203"]).resumed == 5


# An output that is there


def test_an_output_shows_its_report_or_is_measured_again(family: Family) -> None:
    watched = merge(family, "watched", diagnose=True, method="ties", options={"density": 0.5}).diagnosis
    merge(family, "plain", method="ties", options={"density": 0.5})
    assert diagnose_output(family.root / "watched") == watched
    again = diagnose_output(family.root / "plain", RunSettings(**FAST))
    assert again.measures == watched.measures
    assert again.source == "diagnose"
    recipe = recipe_of_output(family.root / "plain")
    assert (recipe.method, recipe.labels) == ("ties", ("expert0", "expert1", "expert2"))


def test_inputs_are_found_beside_a_moved_output(family: Family, tmp_path: Path) -> None:
    merge(family, "plain")
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("base", "expert0", "expert1", "expert2", "plain"):
        (tmp_path / name).rename(moved / name)
    assert len(diagnose_output(moved / "plain", RunSettings(**FAST)).measures) == 7


def test_an_unknown_muted_code_stops_before_the_work(family: Family) -> None:
    with pytest.raises(RecipeError, match="AM999"):
        merge(family, diagnose=True, mute=["AM999"])
    with pytest.raises(RecipeError, match="mute"):
        make_recipe({"experts": ["a"], "mute": ["noise"]})
    assert make_recipe({"experts": ["a"], "mute": "AM101"}).mute == ("AM101",)


# Memory


@pytest.mark.parametrize("shape", [(512, 512), (1024, 256), (256, 1024)])
def test_measuring_stays_within_the_estimate(shape: tuple[int, int]) -> None:
    experts = 4
    rng = torch.Generator().manual_seed(0)
    deltas = [torch.randn(shape, generator=rng) for _ in range(experts)]
    merged = ACTMAT.merge(deltas, **ACTMAT.resolve_options({}))
    peak = peak_bytes(lambda: measure_dense(deltas, merged.value, generator=torch.Generator()))
    spec = TensorSpec("w", shape, "float32", "")
    sources = (DeltaSource("w", "stored", "float32", 4 * merged.value.numel()),) * experts
    target = Target(spec, TensorLayout(Role.LINEAR, ""), sources=sources)
    item = Item(target, "merge", "", Write("sum", (spec,)), MethodCall("actmat", {}))
    there = 4 * experts * merged.value.numel()  # the deltas
    assert peak <= observing_bytes(item, 4) - there


def test_too_little_memory_is_told_with_the_measuring(tmp_path: Path) -> None:
    places = [tmp_path / f"{n}.safetensors" for n in ("base", "a", "b")]
    for n, place in enumerate(places):
        save_file({"layer.weight": torch.full((1000, 1000), float(n))}, place)

    def needed(**settings: Any) -> int:
        """MB that the message asks for."""
        with pytest.raises(RecipeError, match="is too little") as caught:
            actmat.merge(places[0], places[1:], out=tmp_path / "out", max_memory="1MB", **settings)
        return int(re.findall(r"allow at least (\d+) MB", str(caught.value))[0])

    assert needed(diagnose=True) > needed() + 6 * 4 - 2  # six matrices of 4 MB: all deltas, and copies
