"""Averages of checkpoints, merges without a base, and one adapter added to its base (`verify --against`)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from tests.helpers.adapters import LLAMA, save_adapter, save_peft, tiny
from tests.helpers.merging import EMBEDDING, Q0, Family, contents, expert_of, llama_tensors, save_checkpoint
from tests.helpers.merging import actmat as command_line
from tests.tolerances import BF16_ROUNDING, F32_ELEMENTWISE, F32_PRODUCT, relative_error
from torch import Tensor
from transformers import LlamaForCausalLM

import actmat
from actmat.errors import CheckpointError, MergeError, RecipeError
from actmat.methods import METHODS
from actmat.planning.choose import WHOLE
from actmat.planning.cost import SOURCE_BYTES

# `actmat average`, and merges without a base.


STEPS = (30, 200, 1000)


@pytest.fixture
def run(tmp_path: Path) -> list[Path]:
    """Checkpoints of a run, in the order in which a shell lists them: step-1000, step-200, step-30."""
    base = llama_tensors(1)
    folders = [save_checkpoint(tmp_path / f"step-{n}", expert_of(base, n)) for n in STEPS]
    return sorted(folders, key=str)


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def weighted(tmp_path: Path, weights: list[float]) -> dict[str, Tensor]:
    """The sum in float64, checkpoints in the order of `STEPS`."""
    inputs = [tensors(tmp_path / f"step-{n}") for n in STEPS]
    return {k: sum(w * t[k].double() for w, t in zip(weights, inputs, strict=True)) for k in inputs[0]}


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        ("uniform", [1 / 3] * 3),
        ("linear", [1 / 6, 2 / 6, 3 / 6]),
        ("ema:0.5", [1 / 7, 2 / 7, 4 / 7]),
        ("wsd", [3**-0.5, (2**0.5 - 1) * 3**-0.5, 1 - (2 / 3) ** 0.5]),
    ],
)
def test_the_average_is_that_of_the_checkpoints_in_the_order_of_their_steps(
    run: list[Path], tmp_path: Path, weights: str, wanted: list[float]
) -> None:
    out = tmp_path / "out"
    done = command_line(["average", weights, *map(str, run), "--out", out, "--threads", "1"], code=0)
    found, expected = tensors(out), weighted(tmp_path, wanted)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_error(found[name], value) < F32_ELEMENTWISE
    assert "step-30" in done.out.split("step-200")[0]
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "step-1000" / "tokenizer.json").read_bytes()


def test_the_plan_lists_order_weights_and_formula(run: list[Path]) -> None:
    shown = " ".join(command_line(["average", "linear", *map(str, run), "--plan"]).out.split())
    assert "w_t = 2 t / (T (T + 1))" in shown
    assert "step-30 0.166667, step-200 0.333333, step-1000 0.5" in shown
    assert "come from the last checkpoint, step-1000" in shown


def test_listed_numbers_want_checkpoints_in_order(run: list[Path], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"step-30.*step-200.*step-1000.*as_given"):
        actmat.average(run, weights=[0.2, 0.3, 0.5], out=tmp_path / "out")
    ordered = [tmp_path / f"step-{n}" for n in STEPS]
    actmat.average(ordered, weights=[0.2, 0.3, 0.5], out=tmp_path / "out", durable=False)
    backwards = actmat.average(run, weights=[0.5, 0.3, 0.2], as_given=True, out=tmp_path / "other", durable=False)
    wanted = weighted(tmp_path, [0.2, 0.3, 0.5])
    for folder in (tmp_path / "out", tmp_path / "other"):
        assert relative_error(tensors(folder)[Q0], wanted[Q0]) < F32_ELEMENTWISE
    assert backwards.plan.recipe.labels == ("step-1000", "step-200", "step-30")


def test_bytes_do_not_depend_on_workers_and_memory_not_on_the_number_of_checkpoints(tmp_path: Path) -> None:
    base = llama_tensors(1, dtype=torch.bfloat16)
    folders = [save_checkpoint(tmp_path / f"s{n}", expert_of(base, n)) for n in range(12)]
    reports = [
        actmat.average(folders, weights="ema:0.9", out=tmp_path / "out" / str(n), threads=n, durable=False)
        for n in (1, 3)
    ]
    one, three = (contents(r.out) for r in reports)
    assert one == three
    few = actmat.average(folders[:2], out=tmp_path / "few", durable=False)
    headers = len(few.plan.items) * (12 - 2) * SOURCE_BYTES
    assert reports[0].plan.peak_bytes(1) == few.plan.peak_bytes(1) + headers
    share = [0.9 ** (11 - t) for t in range(12)]
    wanted = sum(w * tensors(f)[Q0].double() for w, f in zip(share, folders, strict=True)) / sum(share)
    assert relative_error(tensors(reports[0].out)[Q0], wanted) < BF16_ROUNDING


def test_float64_accumulation_and_output(run: list[Path], tmp_path: Path) -> None:
    report = actmat.average(run, out=tmp_path / "out", dtype="float64", compute_dtype="float64", durable=False)
    assert relative_error(tensors(report.out)[Q0], weighted(tmp_path, [1 / 3] * 3)[Q0]) < 1e-15


def test_the_fixes_that_an_average_prints_are_its_flags(run: list[Path], tmp_path: Path) -> None:
    (config := run[2] / "config.json").write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 5e5}))
    argv = ["average", "uniform", *map(str, run), "--out", str(tmp_path / "out")]
    assert "--set config_from=base, or =NAME" in command_line(argv, code=1).words
    flags = ["--set", "config_from=step-30", "--set", "files_from=step-30", "--keep", EMBEDDING]
    command_line([*argv, *flags], code=0)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_theta"] == 5e5
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (run[2] / "tokenizer.json").read_bytes()
    assert torch.equal(tensors(tmp_path / "out")[EMBEDDING], tensors(tmp_path / "step-1000")[EMBEDDING])


def test_nothing_to_average_is_an_error(tmp_path: Path) -> None:
    command_line(["average", "uniform"], code=2)
    command_line(["average", "uniform", tmp_path], code=2)
    gone = command_line(["merge", "--average", "uniform", tmp_path])
    assert "'actmat average WEIGHTS CHECKPOINT...'" in gone.words
    with pytest.raises(RecipeError, match="needs at least two checkpoints"):
        actmat.average([], out=tmp_path / "out")


BASELESS = [("average", {}), ("linear", {}), ("linear", {"normalize": False}), ("karcher", {}), ("slerp", {"t": 0.3})]


@pytest.mark.parametrize(("method", "options"), BASELESS)
def test_a_merge_without_a_base_is_that_with_any(tmp_path: Path, method: str, options: dict[str, object]) -> None:
    family = Family.make(tmp_path, layers=1)
    common = {"method": method, "options": options, "scope": "all", "durable": False}
    with_base = actmat.merge(family.base, family.experts, out=tmp_path / "with", **common)
    without = actmat.merge(None, family.experts, out=tmp_path / "without", **common)
    found, wanted = tensors(without.out), tensors(with_base.out)
    for name in wanted:
        assert relative_error(found[name], wanted[name]) < F32_PRODUCT
    assert any("deltas are measured from expert 'expert0'" in n for n in map(str, without.plan.notes))
    assert json.loads((without.out / "tokenizer.json").read_text()) == {"version": "expert0"}


def test_command_line_and_recipe_take_no_base(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    flags = [x for e in family.experts for x in ("-e", str(e))]
    argv = ["merge", *flags, "-m", "linear", "-w", "3", "-w", "1", "--out", str(family.out), "--quiet"]
    command_line(argv, code=0)
    first, second = (tensors(e)[EMBEDDING].double() for e in family.experts)
    assert relative_error(tensors(family.out)[EMBEDDING], (3 * first + second) / 4) < F32_ELEMENTWISE
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"experts: [{family.experts[0]}, {family.experts[1]}]\nmethod: slerp\n")
    command_line(["merge", recipe, "--out", tmp_path / "by_recipe", "--quiet"], code=0)
    command_line(["plan", recipe], code=0)
    command_line(["verify", tmp_path / "by_recipe"], code=0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"method": "ties"}, "method 'ties' merges deltas from a base"),
        ({"method": "karcher", "options": {"include_base": True}}, "karcher without include_base"),
        ({"method": "linear", "scale": 0.5}, "'scale' is a factor of the delta"),
        ({"method": "linear", "keep": "*lm_head*"}, "'keep' copies"),
        ({"method": "linear", "post": "mean_norm"}, "post-processing"),
        ({"method": "linear", "rules": [{"match": "*q_proj*", "method": "tsv"}]}, "rules.0: method 'tsv'"),
        ({"method": "average", "vocabulary": "base"}, "vocabulary: base"),
    ],
)
def test_what_needs_a_base_says_so(tmp_path: Path, fields: dict[str, object], said: str) -> None:
    family = Family.make(tmp_path, layers=1)
    with pytest.raises(MergeError, match="--base must be given") as error:
        actmat.merge(None, family.experts, out=family.out, **fields)
    assert said in str(error.value)


def test_slerp_of_one_expert_needs_the_other_end(tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1, experts=1)
    done = command_line(["merge", "-e", family.experts[0], "-m", "slerp", "--out", family.out], code=1)
    assert "slerp between two experts" in done.words


# One adapter added to its base by any method that leaves one delta as it is; `verify --against` adds it again.


ALONE = [m.name for m in METHODS if "single" in m.laws and not m.needs_statistics]
CHANGING = ["ties", "iso_c", "task_arithmetic"]


def merge(models: Path, out: Path, kind: str, *names: str, **fields: Any) -> dict[str, torch.Tensor]:
    actmat.merge(models / "base", [models / kind / n for n in names], out=out, durable=False, threads=1, **fields)
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("method", ALONE)
def test_one_expert_is_added_by_every_method_with_the_law(method: str, models: Path, tmp_path: Path) -> None:
    added = merge(models, tmp_path / "added", "adapters", "math", method="linear")
    found = merge(models, tmp_path / "out", "adapters", "math", method=method)
    assert all(torch.equal(found[n], t) for n, t in added.items())
    expert = load_file(models / "experts" / "math" / "model.safetensors")
    found = merge(models, tmp_path / "full", "experts", "math", method=method, compute_dtype="float64")
    assert all(torch.equal(found[n], t) for n, t in expert.items())


def test_an_adapter_from_one_adapter_is_not_factored_again(models: Path) -> None:
    plan = actmat.plan(None, [models / "adapters" / "math"], method="tsv")
    assert {i.call.method for i in plan.items if i.call is not None} == {"task_arithmetic"}


@pytest.mark.parametrize(
    "fields",
    [{"method": "actmat", "options": {"ridge": 0.2}}, {"method": "tsv", "space": "core"}, {"method": "ties"}],
)
def test_a_call_without_the_law_is_made(fields: dict[str, Any], models: Path) -> None:
    plan = actmat.plan(models / "base", [models / "adapters" / "math"], **fields)
    assert {i.call.method for i in plan.items if i.call is not None} == {fields["method"]}


def test_a_path_from_the_base_to_one_expert_needs_no_note(models: Path) -> None:
    plan = actmat.plan(models / "base", [models / "experts" / "math"], method="slerp", options={"t": 0.5})
    assert not [n for n in map(str, plan.notes) if "changes its delta" in n]


def test_an_expert_that_stands_in_for_the_base_is_no_issue(models: Path, tmp_path: Path) -> None:
    experts = [models / "experts" / n for n in ("math", "code")]
    report = actmat.merge(None, experts, method="linear", out=tmp_path / "m", diagnose=True)
    assert "AM201" not in [f.code for f in report.diagnosis.findings]


@pytest.mark.parametrize("method", [*ALONE, *CHANGING])
def test_the_plan_says_what_becomes_of_one_expert(method: str, models: Path) -> None:
    plan = actmat.plan(models / "base", [models / "adapters" / "math"], method=method)
    notes = [n for n in map(str, plan.notes) if "changes its delta: use -m linear to add it unchanged" in n]
    assert len(notes) == (method in CHANGING)
    merged = [i for i in plan.items if i.action == "merge"]
    if method not in (*CHANGING, "linear", "average"):
        assert all(i.call is not None and i.call.options == WHOLE for i in merged)
        assert all(i.reason.endswith(f"{method} of one expert is its delta: added whole") for i in merged)
    assert not [
        n for n in map(str, actmat.plan(models / "base", [models / "adapters" / "math"]).notes) if "-m linear" in n
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_adapter_is_what_peft_merges(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny("llama").to(dtype).save_pretrained(tmp_path / "base")
    save_peft(tmp_path / "adapter", "llama", 1, LoraConfig(**LLAMA), dtype=torch.float32)
    actmat.merge(tmp_path / "base", [tmp_path / "adapter"], out=tmp_path / "out", durable=False)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
    wanted = PeftModel.from_pretrained(model, tmp_path / "adapter").merge_and_unload().state_dict()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[n], wanted[n]) for n in found)
    added = actmat.verify(tmp_path / "out", against=tmp_path / "adapter").added
    assert added.problems == ()
    assert max(t.units for t in added.tensors) <= (1 if dtype == torch.bfloat16 else 4), "float32 sums of products"
    assert sum(t.differing for t in added.tensors) <= 2 or dtype == torch.float32, "bfloat16 rounds float32 once more"


@pytest.mark.parametrize(
    ("dtype", "compute"), [("float32", "float64"), ("bfloat16", "float32"), ("float16", "float64")]
)
def test_against_is_met_to_the_bit(dtype: Any, compute: Any, models: Path, tmp_path: Path) -> None:
    merge(models, tmp_path / "out", "adapters", "math", dtype=dtype, compute_dtype=compute, method="actmat")
    result = actmat.verify(tmp_path / "out", against=[models / "adapters" / "math"])
    assert result.ok
    assert [t.differing for t in result.added.tensors] == [0, 0, 0, 0]
    assert (result.added.relative_error > torch.finfo(torch.float16).eps / 10) == (dtype != "float32")


def test_float32_computed_in_float32_is_within_units(models: Path, tmp_path: Path) -> None:
    merge(models, tmp_path / "out", "adapters", "math", method="tsv", dtype="float32")
    result = actmat.verify(tmp_path / "out", against=models / "adapters" / "math")
    assert result.ok
    assert 0 < max(t.units for t in result.added.tensors) <= 2
    assert len(result.added.lines()) == 2


@pytest.mark.parametrize("kind", ["adapters", "experts"])
@pytest.mark.parametrize(
    "fields", [{"method": "linear"}, {"method": "task_arithmetic", "options": {"scaling": 0.7}}, {"scale": 0.5}]
)
def test_a_weighted_set_is_met(kind: str, fields: dict[str, Any], models: Path, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"method": "linear", "dtype": "bfloat16"} | fields
    merge(models, tmp_path / "out", kind, "math", "code", weights=[0.75, 0.3], compute_dtype="float64", **chosen)
    places = [models / kind / n for n in ("math", "code")]
    result = actmat.verify(tmp_path / "out", against=places)
    assert result.ok
    assert not any(t.differing for t in result.added.tensors)
    assert not actmat.verify(tmp_path / "out", against=places[::-1]).ok


def test_one_changed_entry_is_found(models: Path, tmp_path: Path) -> None:
    found = merge(models, tmp_path / "out", "adapters", "math", dtype="bfloat16")
    name = "model.layers.1.self_attn.q_proj.weight"
    found[name].view(torch.int16)[3, 5] += 2
    save_file(found, tmp_path / "out" / "model.safetensors")
    added = actmat.verify(tmp_path / "out", against=models / "adapters" / "math").added
    assert [p for p in added.problems if f"'{name}'" in p and "1 entries differ" in p] == list(added.problems)
    found["model.norm.weight"][0] = 3
    save_file(found, tmp_path / "out" / "model.safetensors")
    again = actmat.verify(tmp_path / "out", against=models / "adapters" / "math").added
    assert any("no expert changes it" in p for p in again.problems)


def test_another_adapter_is_found(models: Path, tmp_path: Path) -> None:
    merge(models, tmp_path / "out", "adapters", "math")
    found = command_line(["verify", tmp_path / "out", "--against", models / "adapters" / "code"], code=1)
    assert "is not W_0 + sum_t c_t D_t" in found.words


def test_the_command_says_how_near(models: Path, tmp_path: Path) -> None:
    merge(models, tmp_path / "out", "adapters", "math", dtype="bfloat16", keep=["*.layers.0.*"])
    place = str(models / "adapters" / "math")
    text = command_line(["verify", tmp_path / "out", "--against", place], code=0).words
    assert "added: 2 of 2 changed tensors to the bit" in text
    assert "rounding to bfloat16: relative error" in text
    assert '"relative_error"' in command_line(["verify", tmp_path / "out", "--against", place, "--json"]).out


def test_what_is_no_sum_is_refused(models: Path, tmp_path: Path) -> None:
    merge(models, tmp_path / "out", "adapters", "math", "code", method="ties")
    with pytest.raises(CheckpointError) as caught:
        actmat.verify(tmp_path / "out", against=models / "adapters" / "math")
    text = str(caught.value)
    assert "expected one --against for each of math, code" in text
    assert "merged by ties" in text


def test_dora_is_within_units(tmp_path: Path) -> None:
    tiny("llama").float().save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "dora", "llama", 1, **LLAMA, use_dora=True)
    actmat.merge(tmp_path / "base", [tmp_path / "dora"], out=tmp_path / "out", durable=False)
    assert actmat.verify(tmp_path / "out", against=tmp_path / "dora").ok


def test_an_adapter_of_a_base_in_4_bits_is_told(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "adapters" / "math", tmp_path / "math")
    config = json.loads((tmp_path / "math" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "unsloth/tiny-bnb-4bit"
    (tmp_path / "math" / "adapter_config.json").write_text(json.dumps(config))
    notes = list(map(str, actmat.plan(models / "base", [tmp_path / "math"]).notes))
    assert ["trained on a base in 4 bits" in n for n in notes].count(True) == 1
