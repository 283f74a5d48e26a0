"""Inputs that store a layer otherwise than the base: heads apart from the table, experts of a mixture one by one."""

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoint_files import edit_json, save_folder
from tests.helpers.tinymodels import build
from tests.tolerances import F32_ELEMENTWISE, F32_PRODUCT
from torch import Tensor

import actmat
from actmat.checkpoints.base import Tensors
from actmat.checkpoints.resolve import open_handle, open_model
from actmat.checkpoints.untied import untie
from actmat.errors import MergeError
from actmat.extras.conformance.tensors import TensorsConformance

# A base that ties its output head to the token table, and experts that train the two apart.


HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
IDS = torch.arange(1, 20)[None]


def saved(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    build("llama_tied").config.save_pretrained(folder)
    edit_json(folder / "config.json", **{"architectures": ["LlamaForCausalLM"]} | config)
    return save_folder(folder, {n: t.clone() for n, t in tensors.items()})


def noisy(tensors: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {n: t + 0.1 * torch.randn(t.shape, generator=made) for n, t in tensors.items()}


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return noisy({n: t for n, t in build("llama_tied").state_dict().items() if n != HEAD}, 0)


@pytest.fixture
def base(tensors: dict[str, Tensor], tmp_path: Path) -> Path:
    return saved(tmp_path / "base", tensors)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(IDS).logits
    return out


def reloaded(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def peft_adapter(base: Path, folder: Path, seed: int, targets: tuple[str, ...], **options: Any) -> Tensor:
    """Save an adapter with random weights; logits of PEFT's merge."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of ties
        config = peft.LoraConfig(r=2, target_modules=["q_proj", *targets], **options)
        model = peft.get_peft_model(reloaded(base), config).eval()
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(folder)
        return logits(peft.PeftModel.from_pretrained(reloaded(base), folder).merge_and_unload())


UNTIED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "table": ((), {"modules_to_save": ["embed_tokens"]}),
    "head": ((), {"modules_to_save": ["lm_head"]}),
    "both": ((), {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "table saved, LoRA on the head": (("lm_head",), {"modules_to_save": ["embed_tokens"]}),
    "head saved, LoRA on the table": (("embed_tokens",), {"modules_to_save": ["lm_head"]}),
    "DoRA, head": ((), {"modules_to_save": ["lm_head"], "use_dora": True}),
}
TIED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "table": ((), {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "both": ((), {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}),
    "DoRA, both": ((), {"modules_to_save": ["lm_head"], "ensure_weight_tying": True, "use_dora": True}),
    "LoRA on the table": (("embed_tokens",), {}),
    "tokens": ((), {"trainable_token_indices": [3, 5]}),
}


@pytest.mark.parametrize("case", UNTIED)
def test_saved_modules_untie_the_output_as_pefts_merge_does(case: str, base: Path, tmp_path: Path) -> None:
    targets, options = UNTIED[case]
    expected = peft_adapter(base, tmp_path / "a", 1, targets, **options)
    report = actmat.merge(base, [tmp_path / "a"], out=tmp_path / "out", method="average", durable=False)
    assert torch.allclose(logits(reloaded(tmp_path / "out")), expected, atol=F32_PRODUCT)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert any("its output head is untied" in n and "expert 'a'" in n for n in map(str, report.plan.notes))
    assert not any("not merged" in n for n in map(str, report.plan.notes))
    assert actmat.verify(tmp_path / "out", inputs=True).problems == ()


@pytest.mark.parametrize("case", TIED)
def test_what_peft_keeps_tied_stays_tied(case: str, base: Path, tmp_path: Path) -> None:
    targets, options = TIED[case]
    expected = peft_adapter(base, tmp_path / "a", 1, targets, **options)
    report = actmat.merge(base, [tmp_path / "a"], out=tmp_path / "out", method="average", durable=False)
    assert torch.allclose(logits(reloaded(tmp_path / "out")), expected, atol=F32_PRODUCT)
    assert HEAD not in load_file(tmp_path / "out" / "model.safetensors")
    assert not any("not merged" in n for n in map(str, report.plan.notes))
    assert any("PEFT trained it on the table only" in n for n in map(str, report.plan.notes)) is (
        case == "LoRA on the table"
    )


@pytest.mark.parametrize("side", ["base", "expert"])
def test_a_config_that_unties_a_head_which_is_not_stored_is_taken_as_tied(
    side: str, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    base = saved(tmp_path / "base", tensors)
    expert = saved(tmp_path / "expert", noisy(tensors, 1))
    expected = logits(reloaded(expert))
    edit_json(tmp_path / side / "config.json", tie_word_embeddings=False)
    report = actmat.merge(base, [expert], out=tmp_path / "out", method="linear", durable=False)
    assert torch.allclose(logits(reloaded(tmp_path / "out")), expected, atol=F32_PRODUCT)
    (note,) = (n for n in map(str, report.plan.notes) if "unties an output head that it does not store" in n)
    assert side in note


def test_a_head_that_no_input_stores_or_ties_is_warned_of(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    base = saved(tmp_path / "base", tensors, tie_word_embeddings=False)
    expert = saved(tmp_path / "expert", noisy(tensors, 1), tie_word_embeddings=False)
    said = [note for note in actmat.plan(base, [expert], method="linear").notes if "draw one at random" in note.text]
    assert [note.severity for note in said] == ["warning"]
    for classes in ([], ["CLIPTextModelWithProjection"], ["UNet2DConditionModel"]):  # nothing tells that these have one
        for folder in (base, expert):
            edit_json(folder / "config.json", architectures=classes)
        assert not [n for n in actmat.plan(base, [expert], method="linear").notes if "draw one at random" in n.text]


@pytest.mark.parametrize(("head", "rows"), [("own_projection", 0), ("unembed", 0), ("lm_heads.0", 2), ("lm_head", 2)])
def test_a_head_of_any_name_is_stored(head: str, rows: int, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    tensors[f"{head}.weight"] = tensors[TABLE][rows:] + 1
    base = saved(tmp_path / "base", tensors, tie_word_embeddings=False)
    expert = saved(tmp_path / "expert", noisy(tensors, 1))
    plan = actmat.plan(base, [expert], method="linear")
    assert (plan.configs, [note for note in plan.notes if "unties" in note.text]) == ({}, []), (
        "of fewer rows than a padded table, too"
    )


@pytest.mark.parametrize("stored_twice", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}])
def test_lora_on_a_tied_head_is_refused_and_says_why(
    options: dict[str, Any], stored_twice: bool, base: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    peft_adapter(base, tmp_path / "a", 1, ("lm_head",), **options)
    if stored_twice:
        base = saved(tmp_path / "twice", tensors | {HEAD: tensors[TABLE]})
    with pytest.raises(MergeError, match=f"delta for '{HEAD}', which the base .* ties to '{TABLE}'.*untied") as error:
        actmat.plan(base, [tmp_path / "a"])
    assert "is it an adapter of this base" not in str(error.value)


def test_an_adapter_of_the_tied_base_changes_both_beside_one_that_unties(
    base: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    peft_adapter(base, tmp_path / "a", 1, (), modules_to_save=["embed_tokens"])
    peft_adapter(base, tmp_path / "b", 2, ("embed_tokens",))
    for name in "ab":
        actmat.merge(base, [tmp_path / name], out=tmp_path / f"only-{name}", method="average", durable=False)
    actmat.merge(base, [tmp_path / "a", tmp_path / "b"], out=tmp_path / "out", method="average", durable=False)
    one, two, out = (load_file(tmp_path / n / "model.safetensors") for n in ("only-a", "only-b", "out"))
    assert torch.allclose(out[TABLE], (one[TABLE] + two[TABLE]) / 2, atol=F32_ELEMENTWISE)
    assert torch.allclose(out[HEAD], (tensors[TABLE] + two[TABLE]) / 2, atol=F32_ELEMENTWISE), (
        "only 'b' changes the head"
    )


def test_an_expert_that_is_untied_gives_an_untied_output(
    base: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    own = noisy(tensors | {HEAD: tensors[TABLE]}, 1)
    tied = noisy(tensors, 2)
    experts = [saved(tmp_path / "own", own, tie_word_embeddings=False), saved(tmp_path / "tied", tied)]
    actmat.merge(base, experts, out=tmp_path / "out", method="average", durable=False)
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = {n: (own[n] + tied.get(n, tied[TABLE])) / 2 for n in own}
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[n], expected[n], atol=F32_ELEMENTWISE) for n in found)
    model = reloaded(tmp_path / "out")
    assert torch.equal(model.lm_head.weight, found[HEAD])
    assert torch.equal(model.model.embed_tokens.weight, found[TABLE])
    assert actmat.verify(tmp_path / "out", inputs=True).problems == ()


def test_a_head_that_a_tied_config_hides_stops_the_merge(
    base: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    own = noisy(tensors | {HEAD: tensors[TABLE]}, 1)
    expert = saved(tmp_path / "own", own)
    with pytest.raises(MergeError, match=f"'{HEAD}' and '{TABLE}' of expert 'own' are tied .*ties"):
        actmat.merge(base, [expert], out=tmp_path / "out", method="average", durable=False)
    actmat.merge(base, [expert], out=tmp_path / "out", method="average", ties=False, durable=False)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.allclose(found[n], own[n], atol=F32_ELEMENTWISE) for n in own)
    assert torch.equal(reloaded(tmp_path / "out").lm_head.weight, found[HEAD])


def test_a_tied_tensor_that_an_expert_stores_twice_is_no_training(
    base: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    expert = noisy(tensors, 1)
    saved(tmp_path / "twice", expert | {HEAD: expert[TABLE]})
    report = actmat.merge(base, [tmp_path / "twice"], out=tmp_path / "out", method="average", durable=False)
    assert HEAD not in load_file(tmp_path / "out" / "model.safetensors")
    assert not any("not merged" in n for n in map(str, report.plan.notes))


def test_outputs_that_cannot_be_untied_are_refused(base: Path, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    own = saved(tmp_path / "own", noisy(tensors | {HEAD: tensors[TABLE]}, 1), tie_word_embeddings=False)
    with pytest.raises(MergeError, match=r"untied.*an adapter of the tied base cannot hold.*Fix"):
        actmat.plan(base, [own], to="adapter", rank=2)
    shared = {"shared.weight": tensors[TABLE]}
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    t5 = saved(tmp_path / "t5", shared, **config)
    other = saved(tmp_path / "o", noisy(shared | {HEAD: tensors[TABLE]}, 1), tie_word_embeddings=False, **config)
    with pytest.raises(MergeError, match=r"trains the output head .* apart"):
        actmat.plan(t5, [other])


class TestUntied(TensorsConformance):
    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        save_file(dict(tensors), folder / "model.safetensors")
        return untie(open_model(folder), {}).tensors


def test_another_process_opens_an_untied_model(base: Path) -> None:
    with untie(open_model(base), {HEAD: TABLE}) as untied, open_handle(untied.tensors.handle()) as again:
        assert again.specs == untied.specs
        assert torch.equal(again.read(HEAD), untied.tensors.read(TABLE))


# Mixtures of which one input stores the experts one by one, and another stacks them.


SEPARATE = {"mixtral": ("block_sparse_moe.experts.{}.w1", "w3", "w2"),
            "qwen2_moe": ("mlp.experts.{}.gate_proj", "up_proj", "down_proj")}  # fmt: skip


LAYER = "model.layers.0.block_sparse_moe.experts"


def one_by_one(tensors: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """The tensors in memory as the family has them on disk, transcribed."""
    first, up, down = SEPARATE[family]
    out = {}
    for name, tensor in tensors.items():
        at, _, part = name.partition("mlp.experts.")
        for e in range(len(tensor)) if part else ():
            stem = at + first.format(e)
            if part == "gate_up_proj":
                half = tensor.shape[1] // 2
                out[f"{stem}.weight"] = tensor[e, :half].clone()
                out[f"{stem.rpartition('.')[0]}.{up}.weight"] = tensor[e, half:].clone()
            else:
                out[f"{stem.rpartition('.')[0]}.{down}.weight"] = tensor[e].clone()
        if not part:
            plain = name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if family == "mixtral" else name
            out[plain] = tensor.clone()
    return out


def saved_mixture(folder: Path, tensors: dict[str, Tensor], family: str) -> Path:
    model = build(family)
    model.config.num_experts_per_tok = 2
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return save_folder(folder, {n: t.clone() for n, t in tensors.items()})


@pytest.mark.parametrize("family", SEPARATE)
@pytest.mark.parametrize("stacked", ["base", "expert"])
def test_the_output_has_the_bases_layout(family: str, stacked: str, tmp_path: Path) -> None:
    memory = build(family).state_dict()
    base, tuned = noisy(memory, 1), noisy(memory, 2)
    both = {"base": base, "expert": tuned}
    for name, tensors in both.items():
        saved_mixture(tmp_path / name, tensors if name == stacked else one_by_one(tensors, family), family)
        saved_mixture(tmp_path / f"{name}-alike", tensors if stacked == "base" else one_by_one(tensors, family), family)
    shutil.copytree(tmp_path / "base", tmp_path / "same")
    reports = {}
    for end in ("", "-alike"):
        for method in ("actmat", "average"):
            reports[method + end] = actmat.merge(
                tmp_path / "base", [tmp_path / f"expert{end}", tmp_path / "same"], out=tmp_path / f"{method}{end}",
                method=method, scope="all" if method == "average" else "linear", durable=False,
            )  # fmt: skip
    for method in ("actmat", "average"):
        found, alike = (load_file(tmp_path / f"{method}{end}" / "model.safetensors") for end in ("", "-alike"))
        assert found.keys() == alike.keys() == load_file(tmp_path / "base" / "model.safetensors").keys()
        assert all(torch.equal(found[n], alike[n]) for n in found)
    mean = {n: (base[n] + tuned[n]) / 2 for n in memory}
    expected = mean if stacked == "base" else one_by_one(mean, family)
    assert all(torch.allclose(found[n], t, atol=F32_ELEMENTWISE) for n, t in expected.items())
    shutil.rmtree(tmp_path / "expert-alike")
    notes = " ".join(map(str, reports["average"].plan.notes))
    assert f"experts of a mixture are read {'stacked' if stacked == 'base' else 'one by one'}" in notes
    assert "lacks" not in notes
    merged = logits(reloaded(tmp_path / "average"))
    assert torch.equal(merged, logits(reloaded(tmp_path / "average-alike")))
    saved_mixture(tmp_path / "mean", one_by_one(mean, family), family)
    assert torch.allclose(merged, logits(reloaded(tmp_path / "mean")), atol=F32_ELEMENTWISE)
    assert actmat.verify(tmp_path / "average", inputs=True).problems == ()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(f"{LAYER}.1.w3.weight"), "the 5 parts of 48 x 32 that the other has of it"),
        (
            lambda t: t.update({f"{LAYER}.{e}.w2.weight": torch.ones(32, 40) for e in range(3)}),
            "'model.layers.0.mlp.experts.down_proj' is 3 x 32 x 48 .* the 3 parts of 32 x 40 that",
        ),
        (
            lambda t: t.update({f"{LAYER}.1.w2.weight": torch.ones(32, 40)}),
            "the 3 parts of 32 x 48 or 32 x 40 that",
        ),
    ],
)  # fmt: skip
def test_stacks_that_do_not_fit_are_refused(change: Any, says: str, tmp_path: Path) -> None:
    memory = build("mixtral").state_dict()
    tuned = one_by_one(memory, "mixtral")
    change(tuned)
    base = saved_mixture(tmp_path / "base", dict(memory), "mixtral")
    with pytest.raises(MergeError, match=says):
        actmat.plan(base, [saved_mixture(tmp_path / "e", tuned, "mixtral")])


def test_other_ways_of_stacking_are_refused(tmp_path: Path) -> None:
    memory = build("gpt_oss").state_dict()
    single = {n: t for n, t in memory.items() if not n.endswith(("gate_up_proj", "down_proj"))}
    for layer in range(2):
        for e in range(3):
            at = f"model.layers.{layer}.mlp.experts"
            gate_up, down = memory[f"{at}.gate_up_proj"][e], memory[f"{at}.down_proj"][e]
            single |= {f"{at}.{e}.gate_proj.weight": gate_up[:, ::2].T, f"{at}.{e}.up_proj.weight": gate_up[:, 1::2].T}
            single[f"{at}.{e}.down_proj.weight"] = down.T
    base = saved_mixture(tmp_path / "base", dict(memory), "gpt_oss")
    with pytest.raises(MergeError, match=r"alternating.* do not make that, one above the other") as error:
        actmat.plan(base, [saved_mixture(tmp_path / "e", single, "gpt_oss")])
    assert "--keep" not in str(error.value)
    assert "save_pretrained" in str(error.value)
