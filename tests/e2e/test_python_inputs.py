"""What `import actmat` offers: modules, state dicts, adapters, functions and plain matrices as inputs."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tests.helpers.tinymodels import made
from tests.tolerances import BF16_ROUNDING, F64_ORACLE, relative_error
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaForCausalLM

import actmat
import actmat.plugins
from actmat.errors import AlignmentError, CheckpointError, MergeError, NumericalError, OutputError, RecipeError
from actmat.methods import MergeMethod, all_methods, get_method
from actmat.recipe import make_recipe
from actmat.run.automatic import TABLE

# Modules, state dicts, adapters and functions as inputs of `merge`: the bytes are those of saved folders.


def tiny(seed: int, base: nn.Module | None = None, **fields: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = made("llama", seed=seed, vocab_size=32, **sizes, **fields).train() if base is None else copy.deepcopy(base)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Any]:
    base = tiny(0)
    found = {"base": base, "a": tiny(1, base), "b": tiny(2, base)}
    for name, model in found.items():
        model.save_pretrained(tmp_path / name)
    return found


def equal(found: Any, wanted: Any) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], t) for n, t in wanted.items())


@pytest.mark.parametrize("saved", ["", "base", "a b", "b", "base a b"])
@pytest.mark.parametrize(
    ("stops", "fields", "written", "said"),
    [
        ((5, 5), {}, 5, "theirs are written"),
        ((5, 7), {}, 2, "that of the base is written"),
        ((5, 7), {"files_from": "b"}, 7, "that of expert 'b' is written"),
        ((2, 2), {}, 2, ""),
    ],
)
def test_settings_of_generation_follow_the_rule_of_files(
    models: dict[str, Any], tmp_path: Path, stops: Any, fields: Any, written: int, said: str, saved: str
) -> None:
    for name, token in zip("ab", stops, strict=True):
        models[name].generation_config.eos_token_id = token
    inputs = dict(models)
    for name in saved.split():
        inputs[name] = tmp_path / "saved" / name
        models[name].save_pretrained(inputs[name])
    base, experts = inputs.pop("base"), inputs
    merged: Any = actmat.merge(base, experts, method="average", **fields)
    report = actmat.merge(base, experts, method="average", out=tmp_path / "out", durable=False, **fields)
    assert merged.model.generation_config.eos_token_id == written
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == written
    for plan in (merged.plan, report.plan):
        notes = [n.text for n in plan.notes if "eos_token_id" in n.text]
        assert len(notes) == bool(said), notes
        assert all(said in note for note in notes)
    assert models["base"].generation_config.eos_token_id == 2


@pytest.mark.parametrize("fields", [{"method": "auto"}, {"method": "ties", "dtype": "float16"}, {"method": "dare"}])
def test_any_mixture_has_the_bytes_of_saved_folders(models: dict[str, Any], tmp_path: Path, fields: Any) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    actmat.merge(tmp_path / "base", [a, b], out=tmp_path / "out", **fields)
    written = load_file(tmp_path / "out" / "model.safetensors")
    before = sorted(tmp_path.rglob("*"))
    state = models["b"].state_dict()
    named: Any = {"path": models["b"], "name": "coder", "weight": 1.0}
    mixtures: tuple[tuple[Any, Any], ...] = (
        (models["base"], [models["a"], models["b"]]),
        (models["base"].state_dict(), [a, state]),
        (tmp_path / "base", [models["a"], named]),
        (models["base"], [str(a), {"path": state}]),
        (nn.DataParallel(models["base"]), [torch.compile(models["a"], backend="eager"), models["b"]]),
        (models["base"], {"a": models["a"], "coder": {"path": b, "weight": 1.0}}),
    )
    for base, experts in mixtures:
        is_unknown = fields["method"] == "auto" and isinstance(base, dict)  # tensors do not say whose they are
        of_decoders = {"method": TABLE["full", "decoder"].method} if is_unknown else {}
        found = actmat.merge(base, experts, **fields | of_decoders)
        assert equal(found.tensors, written)
        assert found.records.keys() == found.plan.by_name.keys()
    assert found.plan.recipe.labels == ("a", "coder"), "of the last mixture, by name"
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
    assert [i.action for i in actmat.plan(models["base"], [models["a"], b], **fields).items] == [
        i.action for i in found.plan.items
    ]


def test_a_base_in_memory_gives_the_tokenizer_of_the_folder_that_it_came_from(
    models: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "base" / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    report = actmat.merge(loaded, [models["a"]], method="average", out=tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not [n for n in report.plan.notes if "not copied" in n.text]


def test_settings_of_another_type_are_refused() -> None:
    with pytest.raises(RecipeError, match="Invalid settings") as caught:
        actmat.plan("base", ["a"], threads="x", overwrite="yes")
    wrong = ("threads: expected int | None, found 'x'", "overwrite: expected bool, found 'yes'")
    assert caught.value.problems == wrong


def test_a_module_gives_a_module_of_its_own(models: dict[str, Any], tmp_path: Path) -> None:
    base, before = models["base"], copy.deepcopy(models["base"].state_dict())
    merged = actmat.merge(base, [models["a"], models["b"]], method="average")
    found = merged.model
    assert type(found) is LlamaForCausalLM
    assert equal(found.state_dict(), merged.tensors)
    assert equal(base.state_dict(), before)
    assert not {t.data_ptr() for t in found.parameters()} & {t.data_ptr() for t in base.parameters()}
    assert equal(merged.load().model.state_dict(), merged.tensors)
    of_a_path = actmat.merge(tmp_path / "base", [models["a"], models["b"]], method="average")
    assert equal(of_a_path.model.state_dict(), merged.tensors)


def test_ties_hold_in_the_merged_module(tmp_path: Path) -> None:
    base = tiny(0, tie_word_embeddings=True)
    a, b = tiny(1, base), tiny(2, base)
    found: Any = actmat.merge(base, [a, b], method="average", scope="all").model
    assert found.lm_head.weight is found.model.embed_tokens.weight
    for name, model in (("base", base), ("a", a), ("b", b)):
        model.save_pretrained(tmp_path / name)
    actmat.merge(tmp_path / "base", [tmp_path / "a", tmp_path / "b"], out=tmp_path / "o", method="average", scope="all")
    written = load_file(tmp_path / "o" / "model.safetensors")
    assert all(torch.equal(found.state_dict()[n], t) for n, t in written.items())


def test_modules_without_a_config_and_without_a_base() -> None:
    a: Any
    b: Any
    a, b = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    found = actmat.merge(experts=[a, b], method="average").tensors
    assert torch.equal(found["0.weight"], (a[0].weight + b[0].weight) / 2)
    merged: Any = actmat.merge(a, [b], scale=0.5).model
    torch.testing.assert_close(merged[0].weight, found["0.weight"])


def test_an_output_of_memory_is_written_and_never_taken_for_finished(models: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    base, experts = models["base"], [models["a"], models["b"]]
    found = actmat.merge(base, experts, out=out, method="average", diagnose=True)
    assert found.diagnosis is not None
    loaded = LlamaForCausalLM.from_pretrained(out)
    assert equal(loaded.state_dict(), actmat.merge(base, experts, method="average").tensors)
    with pytest.raises(OutputError, match="exists"):
        actmat.merge(base, [models["b"], models["b"]], out=out, method="average", diagnose=True)


def blend(deltas: list[Tensor], *, towards: float = 0.5) -> Tensor:
    """Between two experts."""
    return towards * deltas[0] + (1 - towards) * deltas[1]


def test_a_function_is_a_method_everywhere(models: dict[str, Any], tmp_path: Path) -> None:
    base, experts = models["base"], [models["a"], models["b"]]
    wanted = actmat.merge(base, experts, method="average").tensors
    for method in (blend, lambda deltas: sum(deltas) / 2, MergeMethod("own", get_method("average").merge, "matrix")):
        found = actmat.merge(base, experts, method=method)
        torch.testing.assert_close(dict(found.tensors), dict(wanted))
    assert actmat.plan(base, experts, method=blend).recipe.method.startswith("blend@")
    ruled = actmat.merge(base, experts, method="ties", rules=[{"match": "*mlp*", "method": blend}]).tensors
    torch.testing.assert_close(ruled["model.layers.0.mlp.up_proj.weight"], wanted["model.layers.0.mlp.up_proj.weight"])
    one = actmat.merge(base, experts, method=blend, options={"towards": 1.0}).tensors
    torch.testing.assert_close(one["model.layers.0.mlp.up_proj.weight"], models["a"].model.layers[0].mlp.up_proj.weight)
    (tmp_path / "own.py").write_text("def blend(deltas, *, towards=0.5):\n    return sum(deltas) / 2\n")
    filed = actmat.merge(base, experts, method=f"{tmp_path}/own.py:blend").tensors
    torch.testing.assert_close(dict(filed), dict(wanted))
    assert actmat.merge(base, experts, method=get_method("average")).plan.recipe.method == "average"
    with pytest.raises(MergeError, match="no option 'towrads'"):
        actmat.merge(base, experts, method=blend, options={"towrads": 1.0})


def test_a_function_that_gives_no_delta_says_so(models: dict[str, Any]) -> None:
    with pytest.raises(MergeError, match=r"expected shape \[16, 16\], found \[16\]"):
        actmat.merge(models["base"], [models["a"], models["b"]], method=lambda deltas: deltas[0][0], threads=1)


def test_matrices_by_auto_from_numpy_by_a_function() -> None:
    torch.manual_seed(0)
    deltas = [torch.randn(8, 6) for _ in range(3)]
    pairs = [(torch.randn(8, 2), torch.randn(2, 6)) for _ in range(3)]
    auto = actmat.merge_matrices("auto", deltas)
    assert torch.equal(auto, actmat.merge_matrices(TABLE["full", "any"].method, deltas))
    assert torch.equal(actmat.merge_matrices("auto", [d.numpy() for d in deltas]), auto)
    assert torch.equal(actmat.merge_matrices("auto", pairs), actmat.merge_matrices("average", pairs, space="core"))
    arrays = [(b.numpy(), a.numpy()) for b, a in pairs]
    assert torch.equal(actmat.merge_matrices("auto", arrays), actmat.merge_matrices("auto", pairs))
    assert torch.equal(actmat.merge_matrices("auto", deltas[:1]), deltas[0])
    grams = [np.eye(6, dtype=np.float32)] * 3
    mean = actmat.merge_matrices("average", deltas)
    torch.testing.assert_close(actmat.merge_matrices("auto", deltas, statistics={"gram": grams}), mean)
    torch.testing.assert_close(actmat.merge_matrices(lambda found: sum(found) / 3, deltas), mean)
    with pytest.raises(RecipeError, match="no option 'drop'"):
        actmat.merge_matrices("auto", deltas, drop=0.3)


@pytest.fixture
def adapted() -> Any:
    config = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    torch.manual_seed(3)
    model = get_peft_model(tiny(0), LoraConfig(**config), adapter_name="a")
    model.add_adapter("b", LoraConfig(**config))
    return model


def deltas_of(model: Any, name: str) -> dict[str, Tensor]:
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    return {n: m.get_delta_weight(name) for n, m in layers.items()}


def test_adapters_are_merged_in_place_as_peft_does(adapted: PeftModel) -> None:
    adapted.add_weighted_adapter(["a", "b"], [0.7, 0.3], "theirs", combination_type="cat")
    merged = actmat.merge_adapters(adapted, ["a", "b"], name="ab", method="linear", weights=[0.7, 0.3])
    torch.testing.assert_close(deltas_of(adapted, "ab"), deltas_of(adapted, "theirs"))
    assert merged.plan.recipe.labels == ("a", "b")
    adapted.add_weighted_adapter(["a", "b"], [1.0, 1.0], "by_factors", combination_type="linear")
    fields: dict[str, Any] = {"method": "task_arithmetic", "options": {"scaling": 1.0}, "space": "factors"}
    actmat.merge_adapters(adapted, ["a", "b"], name="sum", **fields)
    torch.testing.assert_close(deltas_of(adapted, "sum"), deltas_of(adapted, "by_factors"))
    actmat.merge_adapters(adapted, ["a", "b"], name="best")
    adapted.set_adapter("best")
    assert torch.isfinite(adapted(input_ids=torch.tensor([[1, 2]])).logits).all()


def test_names_of_adapters_are_checked(adapted: PeftModel) -> None:
    with pytest.raises(RecipeError, match="no adapter 'c'"):
        actmat.merge_adapters(adapted, ["a", "c"], name="ab")
    with pytest.raises(RecipeError, match="has an adapter 'b' already"):
        actmat.merge_adapters(adapted, ["a", "b"], name="b")
    with pytest.raises(CheckpointError, match="PEFT adapter"):
        actmat.merge(adapted, [tiny(1)])


@pytest.mark.parametrize("onto", [True, False])
def test_an_active_adapter_is_an_expert_like_its_folder(adapted: PeftModel, tmp_path: Path, onto: bool) -> None:
    base = tiny(0) if onto else None
    adapted.save_pretrained(str(tmp_path))
    for name in ("a", "b"):
        adapted.set_adapter(name)
        saved = actmat.merge(base, [tmp_path / name], method="linear", scale=0.5)
        held = actmat.merge(base, [adapted], method="linear", scale=0.5)
        assert equal(held.tensors, saved.tensors)
    assert not onto or type(held.model) is LlamaForCausalLM


# `actmat.merge_matrices`: every rule on plain tensors, and errors that say what is missing.


GENERATOR = torch.Generator().manual_seed(2)
BASE = torch.randn(9, 7, generator=GENERATOR, dtype=torch.float64)
DELTAS = [torch.randn(9, 7, generator=GENERATOR, dtype=torch.float64) for _ in range(3)]
DATA_FREE = [m for m in all_methods() if not m.needs_statistics]


def experts_for(method: MergeMethod) -> list[torch.Tensor]:
    return DELTAS[: method.max_experts or len(DELTAS)]


def base_for(method: MergeMethod) -> torch.Tensor | None:
    return BASE if method.needs_base else None


@pytest.mark.parametrize("method", DATA_FREE, ids=lambda m: m.name)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(kind: torch.dtype, method: MergeMethod) -> None:
    deltas = [d.to(kind) for d in experts_for(method)]
    base = base_for(method)
    out = actmat.merge_matrices(method.name, deltas, base=None if base is None else base.to(kind))
    wide = actmat.merge_matrices(
        method.name, [d.float() for d in deltas], base=None if base is None else base.to(kind).float()
    )
    assert out.dtype == kind
    assert torch.equal(out, wide.to(kind))
    assert relative_error(out, wide) < BF16_ROUNDING


def test_weights_are_taken_where_the_rule_takes_them() -> None:
    out = actmat.merge_matrices("average", DELTAS, weights=[1.0, 0.0, 0.0])
    assert relative_error(out, DELTAS[0]) < F64_ORACLE
    for method in (m for m in DATA_FREE if not m.is_weighted):
        with pytest.raises(RecipeError, match=f"'{method.name}' makes no use of weights"):
            actmat.merge_matrices(
                method.name, experts_for(method), base=base_for(method), weights=[1.0] * len(experts_for(method))
            )


@pytest.mark.parametrize("method", [m for m in all_methods() if m.needs_statistics], ids=lambda m: m.name)
def test_missing_statistics_are_named(method: MergeMethod) -> None:
    with pytest.raises(RecipeError, match=f"'{method.name}' needs statistics .*{method.needs_statistics[0]}"):
        actmat.merge_matrices(method.name, DELTAS, base=base_for(method))


def test_statistics_are_used() -> None:
    method = next(m for m in all_methods() if m.needs_statistics == ("fisher",))
    one = [torch.ones_like(DELTAS[0]), torch.zeros_like(DELTAS[0]), torch.zeros_like(DELTAS[0])]
    out = actmat.merge_matrices(method.name, DELTAS, statistics={"fisher": one})
    assert relative_error(out, DELTAS[0]) < 1e-3


def test_no_experts_are_refused() -> None:
    for function in (actmat.plan, actmat.diagnose, actmat.merge):
        with pytest.raises(RecipeError, match="expert"):
            function()


def test_deltas_that_are_no_matrices_of_one_shape_are_refused() -> None:
    with pytest.raises(AlignmentError, match="one shape"):
        actmat.merge_matrices("average", [DELTAS[0], DELTAS[1].T])
    with pytest.raises(AlignmentError, match="merges matrices"):
        actmat.merge_matrices("actmat", [torch.ones(3), torch.ones(3)])


def test_a_missing_base_is_named() -> None:
    """Of the rules that look at `W_0`, some can do without: theirs is an optional argument."""
    for method in (m for m in all_methods() if m.needs_base and not m.needs_statistics):
        if not method.uses_base(method.resolve_options({})):
            assert actmat.merge_matrices(method.name, experts_for(method)).any()
        else:
            with pytest.raises(RecipeError, match=f"'{method.name}' looks at the base weights"):
                actmat.merge_matrices(method.name, experts_for(method))


def test_what_is_not_finite_is_an_error() -> None:
    """Of the result, in the dtype of the deltas, and of the deltas."""
    with pytest.raises(NumericalError, match="gave NaN or Inf for finite deltas"):
        actmat.merge_matrices("task_arithmetic", [d.float() * 1e38 for d in DELTAS])
    with pytest.raises(NumericalError, match="beyond float16's range"):
        actmat.merge_matrices("task_arithmetic", [d.half() * 2e4 for d in DELTAS], scaling=2.0)
    with pytest.raises(NumericalError, match="expert 1"):
        actmat.merge_matrices("average", [DELTAS[0], DELTAS[1] / 0])
    big = actmat.merge_matrices("average", [torch.full((2, 2), 3e38), torch.zeros(2, 2)])
    assert big.isfinite().all(), "an overflowing sum of finite entries is none"


@pytest.mark.parametrize("method", DATA_FREE, ids=lambda m: m.name)
def test_matrices_without_entries(method: MergeMethod) -> None:
    for shape in ((0, 5), (5, 0), (0, 0), (0, 3, 4)):
        deltas = [torch.empty(shape) for _ in experts_for(method)]
        base = torch.empty(shape) if method.needs_base else None
        assert actmat.merge_matrices(method.name, deltas, base=base).shape == shape


# What `import actmat` offers, in a fresh interpreter, in any order of use.


SOURCE = str(Path(__file__).parents[2] / "src")


def run(code: str) -> str:
    program = f"import sys; sys.path.insert(0, {SOURCE!r})\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_names_are_complete_and_importing_is_light() -> None:
    found = run(
        "import actmat; print('torch' in sys.modules, dir(actmat) == sorted(actmat.__all__))\n"
        "print([n for n in actmat.__all__ if not hasattr(actmat, n)], actmat.plan.__module__)\n"
        "from actmat import *; print(merge.__module__, MergeError.__module__, tune.__module__)"
    )
    merging, errors, tune = "actmat.api.merging", "actmat.errors", "actmat.api.tuning"
    assert found.split("\n") == ["False True", f"[] {merging}", f"{merging} {errors} {tune}"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'shuffel'"):
        actmat.shuffel  # noqa: B018


def test_objects_that_are_no_inputs_are_refused_by_name(tmp_path: Path) -> None:
    model, recipe = torch.nn.Linear(2, 2), make_recipe({"base": "base", "experts": ["a"]})
    with pytest.raises(RecipeError) as refused:
        actmat.merge(model, [tmp_path / "one", model.weight], out=tmp_path / "out")
    assert list(refused.value.problems) == ["experts[1]: expected a path, a hub id or a URL, found Parameter"]
    with pytest.raises(RecipeError, match=r"actmat\.run\.run_recipes"):
        actmat.plan(recipe)
    with pytest.raises(RecipeError, match="expected a list, found the one location 'one'"):
        actmat.plan("base", "one")
    with pytest.raises(RecipeError, match="found one state dict"):
        actmat.plan("base", model.state_dict())
    with pytest.raises(RecipeError, match=r"experts\[0\]: expected a path, .* found Linear"):
        actmat.tune("base", {"a": model}, data="d", out="o")


def test_an_unknown_method_is_an_error_of_the_recipe(models: dict[str, Any]) -> None:
    base, expert = models["base"], models["a"]
    for call in (actmat.merge, actmat.plan, actmat.diagnose):
        with pytest.raises(RecipeError, match="no method 'tiess'"):
            call(base, [expert], method="tiess")
    with pytest.raises(AlignmentError, match="matches no tensor"):
        actmat.plan(base, [expert], method="ties", keep=["*.heads.*"])
