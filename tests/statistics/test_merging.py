"""From data to a merged model: equal to the rule on Grams by hand, refused for another model, planned with reasons."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.helpers.grams import padded_batches
from tests.helpers.merging import actmat as run_cli
from tests.helpers.models import BY_NAME, VOCABULARY, Case, save_family, stored
from tests.tolerances import F32_PRODUCT, F32_SOLVE, relative_error
from torch import Tensor

import actmat
from actmat.errors import AlignmentError, RecipeError, StatisticsError
from actmat.extras.collect.collect import collect
from actmat.statistics import open_statistics


def measured(case: Case, experts: list[Path], folder: Path, **options: Any) -> dict[str, Path]:
    """Statistics of every expert, each on batches of its own."""
    out = {}
    for n, place in enumerate(experts):
        model = case.loader.from_pretrained(place, dtype=torch.float32).eval()
        batches = padded_batches(VOCABULARY, n=3)[n:] if "input_ids" in case.inputs() else [case.inputs()]
        if case.name == "t5":
            batches = [b | {"decoder_input_ids": b["input_ids"][:, :4]} for b in batches]
        out[place.name] = folder / f"stats-{place.name}"
        collect(model, batches, out=out[place.name], **options)
    return out


@dataclass(frozen=True)
class Measured:
    """A tiny BERT, two experts, and their statistics."""

    base: Path
    experts: list[Path]
    statistics: dict[str, Path]

    @property
    def arguments(self) -> dict[str, Any]:
        return {"base": self.base, "experts": self.experts, "method": "regmean", "statistics": self.statistics}


@pytest.fixture
def bert(tmp_path: Path) -> Measured:
    base, experts = save_family(BY_NAME["bert"], tmp_path, n_experts=2)
    return Measured(base, experts, measured(BY_NAME["bert"], experts, tmp_path))


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "gpt_oss", "t5"])
def test_regmean_is_the_rule_on_grams_by_hand(name: str, tmp_path: Path) -> None:
    """Packed Conv1D, experts that are separate on disk and stacked in memory, stacks transposed, an encoder-decoder."""
    case = BY_NAME[name]
    base, experts = save_family(case, tmp_path)
    statistics = measured(case, experts, tmp_path, dtype="float64")
    how: dict[str, Any] = {"method": "regmean", "compute_dtype": "float64", "statistics": statistics}
    plan = actmat.merge(base, experts, out=tmp_path / "out", **how).plan
    start, values, merged = stored(base), [stored(e) for e in experts], stored(tmp_path / "out")
    files = [open_statistics(p) for p in statistics.values()]
    seen = 0
    for item in plan.items:
        views = case.views(item.name)
        if item.action != "merge" or views is None:
            continue
        seen += 1
        deltas = [v[item.name].double() - start[item.name].double() for v in values]
        expected = torch.zeros_like(deltas[0])
        for k, (target, *parts) in enumerate(zip(views(expected), *(views(d) for d in deltas), strict=True)):
            per_expert = {"gpt_oss": len(views(expected)) // 4}.get(name, 0)
            expert = k // per_expert if per_expert and "experts" in item.name else None
            keys = [f.find(item.name, expert=expert) for f in files]
            width = parts[0].shape[1]
            grams = [
                torch.zeros(width, width, dtype=torch.float64) if g is None else f.gram(g, dtype=torch.float64)
                for f, g in zip(files, keys, strict=True)
            ]
            target.copy_(actmat.merge_matrices("regmean", parts, statistics={"gram": grams}))
        change = merged[item.name].double() - start[item.name].double()
        assert relative_error(change, expected) < F32_PRODUCT, item.name
    assert seen >= 8
    assert case.output(case.loader.from_pretrained(tmp_path / "out")).isfinite().all()
    for file in files:
        file.close()


def test_each_method_runs_and_the_manifest_names_the_data(tmp_path: Path) -> None:
    case = BY_NAME["bert"]
    base, experts = save_family(case, tmp_path)
    statistics = measured(case, experts, tmp_path, fisher=True)
    results = {}
    for method in ("regmean", "lot", "cat", "fisher"):
        options = {"scope": "all"} if method == "fisher" else {}
        report = actmat.merge(base, experts, out=tmp_path / method, method=method, statistics=statistics, **options)
        results[method] = stored(tmp_path / method)
        (first, *_) = report.manifest["statistics"]
        assert first["expert"] == "expert1"
        assert first["samples"] == 9
    name = "bert.encoder.layer.0.output.dense.weight"
    assert torch.equal(results["lot"][name], results["regmean"][name])
    start, values = stored(base)[name].double(), [stored(e)[name].double() for e in experts]
    squares = []
    for place in statistics.values():
        with open_statistics(place) as file:
            squares.append(file.fisher(name, dtype=torch.float64))
    by_hand = actmat.merge_matrices("fisher", [v - start for v in values], statistics={"fisher": squares})
    assert relative_error(results["fisher"][name].double() - start, by_hand) < F32_SOLVE
    verified = actmat.verify(tmp_path / "regmean")
    assert verified.ok
    assert {"statistics of expert1", "statistics of expert2"} <= set(verified.inputs)
    assert not any("statistics" in part for part in verified.unchecked)
    check_tampered_statistics(tmp_path / "regmean", [Path(p) / "statistics.safetensors" for p in statistics.values()])


def check_tampered_statistics(out: Path, files: list[Path]) -> None:
    """`verify` tells bytes that changed, a file in the place of another, one that is gone."""
    whole = [f.read_bytes() for f in files]

    def said() -> str:
        return "\n".join(actmat.verify(out).problems)

    files[0].write_bytes(whole[0][:-1] + bytes([whole[0][-1] ^ 1]))
    assert "of statistics of expert 'expert1'" in said()
    assert "has changed since the merge" in said()
    files[0].write_bytes(whole[1])
    assert "statistics of expert 'expert1'" in said()
    assert "differ from those that the merge read" in said()
    files[0].write_bytes(whole[0][:100])
    assert "cannot be checked" in said()
    files[0].unlink()
    assert "cannot be checked" in said()
    files[0].write_bytes(whole[0])
    assert not said()


def test_statistics_of_another_model_are_refused_by_hash(bert: Measured, tmp_path: Path) -> None:
    swapped = {"expert1": bert.statistics["expert2"], "expert2": bert.statistics["expert1"]}
    with pytest.raises(StatisticsError, match=r"of expert 'expert1' has content .* were measured with"):
        actmat.merge(**bert.arguments | {"statistics": swapped}, out=tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_one_changed_matrix_is_found_when_it_is_read(bert: Measured, tmp_path: Path) -> None:
    """Not among the small tensors that are compared beforehand: the merge stops when it comes to it."""
    tensors = stored(bert.experts[1])
    name = "bert.encoder.layer.1.output.dense.weight"
    tensors[name][3, 4] += 1
    save_file(tensors, bert.experts[1] / "model.safetensors", {"format": "pt"})
    with pytest.raises(StatisticsError, match=rf"tensor '{name}' of expert 'expert2' has content"):
        actmat.merge(**bert.arguments, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert actmat.merge(bert.base, bert.experts, out=tmp_path / "out", method="average").out.exists()


def test_a_model_that_was_trained_on_is_not_its_checkpoint(tmp_path: Path) -> None:
    case = BY_NAME["bert"]
    case.build().save_pretrained(tmp_path / "m")
    model = case.loader.from_pretrained(tmp_path / "m").eval()
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.weight[0, 0] += 0.5
    with pytest.raises(StatisticsError, match=r"'bert.encoder.layer.0.output.dense.weight' .* have different values"):
        collect(model, [case.inputs()])
    with pytest.raises(StatisticsError, match="built in memory"):
        collect(case.build(), [case.inputs()])


def test_the_plan_lists_layers_without_statistics(bert: Measured) -> None:
    name = "bert.encoder.layer.1.attention.self.query.weight"
    unmeasure(bert.statistics["expert2"], name, "a reason")
    plan = actmat.plan(**bert.arguments)
    (item,) = [t for t in plan.items if t.name == name]
    assert item.action == "average"
    assert item.reason.endswith("no statistics in expert 'expert2' (a reason): mean of the deltas")
    assert sum(t.action == "merge" for t in plan.items) == 12
    inputs = [x for e in bert.experts for x in ("-e", str(e), "--statistics", f"{e.name}={bert.statistics[e.name]}")]
    out = run_cli(["plan", "-b", bert.base, *inputs, "-m", "regmean"], code=0)
    assert "no statistics in expert 'expert2'" in out.words


def unmeasure(folder: Path, name: str, why: str) -> None:
    """Take a tensor's Gram out of a file's list."""
    file = folder / "statistics.safetensors"
    with safe_open(file, "pt") as opened:
        header = json.loads(opened.metadata()["actmat_statistics"])
    del header["places"][name]
    header["absent"] = {name: why}
    save_file(load_file(file), file, {"actmat_statistics": json.dumps(header)})


def test_missing_and_misplaced_statistics_are_said(bert: Measured, tmp_path: Path) -> None:
    one = bert.statistics["expert1"]
    for changed, error, says in (
        ({"statistics": {"expert1": one}}, RecipeError, "needs statistics measured on data"),
        ({"statistics": {"expert7": one}}, RecipeError, r"'expert7', but no expert has this name.* Did you mean"),
        ({"statistics": [one]}, RecipeError, "2 experts, but 1 statistics"),
        ({"statistics": dict.fromkeys(bert.statistics, tmp_path)}, StatisticsError, r"expert 'expert1': .*found none"),
    ):
        with pytest.raises(error, match=says):
            actmat.plan(**bert.arguments | changed)
    unused = actmat.plan(**bert.arguments | {"method": "ties"})
    assert any("no chosen method uses them" in n for n in map(str, unused.notes))


def test_a_recipe_names_statistics_relative_to_itself(bert: Measured, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "base: ./base\nmethod: regmean\nexperts:\n"
        "  - {path: ./expert1, statistics: ./stats-expert1}\n  - {path: ./expert2, statistics: ./stats-expert2}\n"
    )
    run_cli(["merge", tmp_path / "recipe.yaml", "--out", tmp_path / "out", "--quiet"], code=0)
    assert len(json.loads((tmp_path / "out" / "actmat_manifest.json").read_text())["statistics"]) == 2


def test_memory_of_the_grams_is_planned(bert: Measured) -> None:
    plans = [actmat.plan(**bert.arguments | {"method": method}) for method in ("regmean", "cat")]
    name = "bert.encoder.layer.0.output.dense.weight"  # 32 x 48
    one, both = (next(t.cost.host_bytes for t in p.items if t.name == name) for p in plans)
    assert one > 48 * 48 * (4 + 8)
    assert both > 48 * 48 * (2 * 4 + 8)


def adapters(case: Case, folder: Path) -> tuple[Path, dict[str, Path], dict[str, Path]]:
    """A base, two LoRA adapters on it, and their statistics."""
    from peft import LoraConfig, PeftModel, get_peft_model

    case.build().save_pretrained(folder / "base")
    places, statistics = {}, {}
    for n, name in enumerate(("math", "code")):
        model: Any = case.loader.from_pretrained(folder / "base")
        torch.manual_seed(n)
        config = LoraConfig(r=3, lora_alpha=6, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
        adapted = get_peft_model(model, config)
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(folder / name)
        places[name] = folder / name
        again = PeftModel.from_pretrained(case.loader.from_pretrained(folder / "base"), folder / name)
        batches = padded_batches(VOCABULARY, n=2)[n:]
        collect(again, batches, adapter=folder / name, out=folder / f"s-{name}", dtype="float64")
        statistics[name] = folder / f"s-{name}"
    return folder / "base", places, statistics


def test_adapters_merge_by_grams_measured_with_them(tmp_path: Path) -> None:
    """Into an adapter without the base, into the base, and by hand: one answer."""
    base, places, statistics = adapters(BY_NAME["gpt2"], tmp_path)
    experts = list(places.values())
    to_adapter = actmat.merge(None, experts, out=tmp_path / "a", method="regmean", statistics=statistics)
    to_model = actmat.merge(base, experts, out=tmp_path / "m", method="regmean", statistics=statistics)
    assert {t.action for t in to_adapter.plan.items} == {"merge"}
    assert sum(t.action == "merge" for t in to_model.plan.items) == 4
    actmat.merge(base, [tmp_path / "a"], out=tmp_path / "am", method="task_arithmetic", options={"scaling": 1.0})
    start, direct, through = stored(base), stored(tmp_path / "m"), stored(tmp_path / "am")
    name = "transformer.h.0.mlp.c_fc.weight"
    deltas = [delta(p, "transformer.h.0.mlp.c_fc") for p in experts]
    with open_statistics(statistics["math"]) as a, open_statistics(statistics["code"]) as b:
        grams = [f.gram(f.find(name) or "", dtype=torch.float64) for f in (a, b)]
    by_hand = actmat.merge_matrices("regmean", deltas, statistics={"gram": grams}).T
    for merged in (direct, through):
        assert relative_error(merged[name].double() - start[name].double(), by_hand) < F32_SOLVE


def delta(folder: Path, module: str) -> Tensor:
    """`scaling B A` of one module, `O I`."""
    tensors = load_file(folder / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.{module}.lora_{x}.weight"].double() for x in "AB")
    return 2.0 * b @ a


def test_statistics_are_bound_to_the_state_of_an_adapter(tmp_path: Path) -> None:
    base, places, statistics = adapters(BY_NAME["gpt2"], tmp_path)
    experts = list(places.values())
    swapped = {"math": statistics["code"], "code": statistics["math"]}
    for start, out in ((None, "a"), (base, "m")):
        with pytest.raises(StatisticsError, match=r"the adapter 'math' .* were measured with"):
            actmat.merge(start, experts, out=tmp_path / out, method="regmean", statistics=swapped)
        assert not (tmp_path / out).exists()
    copy = tmp_path / "base2"
    BY_NAME["gpt2"].loader.from_pretrained(base).save_pretrained(copy)
    with pytest.raises(AlignmentError, match=r"expert 'base2' is a full model, but its statistics .* an adapter"):
        actmat.plan(base, [copy], method="regmean", statistics=[statistics["math"]])
    model: Any = BY_NAME["gpt2"].loader.from_pretrained(base)
    from peft import PeftModel

    with pytest.raises(StatisticsError, match="pass adapter="):
        collect(PeftModel.from_pretrained(model, places["math"]), [BY_NAME["gpt2"].inputs()])
