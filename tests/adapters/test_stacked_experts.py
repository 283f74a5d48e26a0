"""Adapters of stacked experts: what their factors mean by version of PEFT, by field, and as the user says."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.adapters.test_adapter_to_model import load
from tests.helpers.adapters import save_adapter, tiny
from tests.helpers.checkpoint_files import edit_config
from tests.helpers.merging import actmat as run
from torch import Tensor

import actmat
from actmat.errors import MergeError, StatisticsError
from actmat.experts.lora.fields import IRRELEVANT, OBEYED, REFUSED
from actmat.extras.models.loading import load_model

STACKS = {"r": 3, "lora_alpha": 5, "target_modules": []}
BOTH = {**STACKS, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
SQUARE = {**STACKS, "target_parameters": ["experts.gate_up_proj"]}
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
WRAPPER = "base_model.model.model.layers.0.mlp.experts.{}lora_{}.weight"


def merge(folder: Path, *experts: Any, out: str = "out", base: str | None = "base", **fields: Any) -> Any:
    settings: dict[str, Any] = {"method": "linear", "compute_dtype": "float64", "durable": False, "threads": 1}
    given = [{"path": str(e)} if isinstance(e, Path) else e for e in experts]
    return actmat.merge(None if base is None else folder / base, given, out=folder / out, **(settings | fields))


def delta(folder: Path, axes: str, order: str = "rank_major", nest: str = "", rank: int = 3) -> Tensor:
    """The delta of a stack by the einsum of PEFT's `get_delta_weight`."""
    stored = load_file(folder / "adapter_model.safetensors")
    a, b = (stored[WRAPPER.format(nest, side)] for side in "AB")
    experts = a.shape[0] // rank
    a_ERI = a.reshape(experts, rank, -1)
    b_ORE = b.reshape(-1, rank, experts) if order == "rank_major" else b.reshape(-1, experts, rank).mT
    return torch.einsum(f"o r e, e r i -> {axes.replace('_', ' ')}", b_ORE, a_ERI) * 5 / 3


def assert_changed_by(folder: Path, expected: Tensor, out: str = "out") -> None:
    found = load(folder / out, "olmoe")[GATE_UP] - tiny("olmoe").state_dict()[GATE_UP]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.fixture
def square(tmp_path: Path) -> Path:
    """A base whose `gate_up_proj` is square, and an adapter of nothing else."""
    tiny("olmoe").save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "adapter", "olmoe", 1, **SQUARE)
    return tmp_path


EXPERTS = ["gate_proj", "up_proj", "down_proj"]
LISTS = {
    "mixtral": ["q_proj", "w1", "w2", "w3", "gate"],
    "qwen3_moe": ["q_proj", *EXPERTS],
    "olmoe": ["q_proj", *EXPERTS],
    "deepseek_v3": ["q_a_proj", *EXPERTS],
}


@pytest.mark.parametrize("family", LISTS)
@pytest.mark.parametrize("targets", ["all-linear", "list"])
def test_mixtures_of_experts_give_what_peft_merges(family: str, targets: str, tmp_path: Path) -> None:
    """PEFT turns the layers of experts into parameters without owners, with a pattern of twice the rank."""
    tiny(family).save_pretrained(tmp_path / "base")
    wanted = LISTS[family] if targets == "list" else targets
    expected = save_adapter(tmp_path / "adapter", family, 1, r=3, lora_alpha=5, target_modules=wanted)
    merge(tmp_path, tmp_path / "adapter")
    found, base = load(tmp_path / "out", family), tiny(family).state_dict()
    assert any(".experts." in n and not torch.equal(v, base[n]) for n, v in expected.items())
    torch.testing.assert_close({n: found[n] for n in expected}, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("version", "axes"), [("0.18.1", "e_i_o"), ("0.19.1", "e_o_i"), ("0.21.2", "e_o_i")])
def test_the_version_that_wrote_a_square_stack_decides_its_axes(version: str, axes: str, square: Path) -> None:
    edit_config(square / "adapter", peft_version=version)
    merge(square, square / "adapter")
    assert_changed_by(square, delta(square / "adapter", axes))


@pytest.mark.parametrize("version", [None, "0.19.0", "0.19.1.dev0@main", "some"])
def test_a_square_stack_that_nothing_decides_is_refused(version: str | None, square: Path) -> None:
    edit_config(square / "adapter", peft_version=version)
    with pytest.raises(MergeError, match=r"fits the base as e_i_o and as e_o_i.*--set stacks=e_i_o\|e_o_i"):
        merge(square, square / "adapter")
    for axes in ("e_i_o", "e_o_i"):
        merge(square, {"path": str(square / "adapter"), "stacks": axes}, out=axes)
        assert_changed_by(square, delta(square / "adapter", axes), axes)


@pytest.mark.parametrize("version", [None, "0.18.1", "0.19.0", "0.21.2"])
@pytest.mark.parametrize("axes", ["e_i_o", "e_o_i"])
def test_the_shape_of_another_stack_decides_that_of_a_square_one(version: str, axes: str, tmp_path: Path) -> None:
    tiny("olmoe").save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "adapter", "olmoe", 1, **BOTH)
    if axes == "e_i_o":
        file = tmp_path / "adapter" / "adapter_model.safetensors"
        stored = load_file(file)
        generator = torch.Generator().manual_seed(0)
        for side, width in (("A", 16), ("B", 8)):
            shape = stored[WRAPPER.format("", side)].shape
            shape = (shape[0], width) if side == "A" else (width, shape[1])
            stored[WRAPPER.format("", side)] = torch.randn(shape, generator=generator, dtype=torch.float64)
        save_file(stored, file)
    edit_config(tmp_path / "adapter", peft_version=version)
    merge(tmp_path, tmp_path / "adapter")
    assert_changed_by(tmp_path, delta(tmp_path / "adapter", axes, nest="base_layer."))


def test_axes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tiny("qwen3_moe").save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "adapter", "qwen3_moe", 1, **BOTH)
    with pytest.raises(MergeError, match=r"'stacks' says e_i_o, and its delta of .* fits the base as e_o_i only"):
        merge(tmp_path, {"path": str(tmp_path / "adapter"), "stacks": ["e_i_o"]})


def test_words_on_stacks_need_stacks(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "adapter", "llama", 1, r=2, target_modules=["q_proj"])
    for path, problem in ((tmp_path / "adapter", "and it has none"), (tmp_path / "base", "to PEFT adapters only")):
        with pytest.raises(MergeError, match=problem):
            merge(tmp_path, {"path": str(path), "name": "one", "stacks": "e_i_o"})
    with pytest.raises(MergeError, match="found e_i_o and e_o_i, expected one of them"):
        merge(tmp_path, {"path": str(tmp_path / "adapter"), "stacks": "e_i_o,e_o_i"})


ORDERS = ["rank_major", "grouped_by_expert"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("where", ["field", "parameter", "recipe"])
def test_the_order_of_the_columns_of_b_is_obeyed(order: str, where: str, square: Path) -> None:
    parameters = {"gate_up_proj": {"lora_B_layout": order, "num_experts": 4}}
    fields = {
        "field": {"lora_B_layout": order},
        "parameter": {"lora_B_layout": "mixed", "unsloth_fused_expert_lora": {"parameters": parameters}},
        "recipe": {"auto_mapping": {"unsloth_fixed": True}},
    }[where]
    edit_config(square / "adapter", **fields)
    merge(square, {"path": str(square / "adapter"), "stacks": order if where == "recipe" else []})
    assert_changed_by(square, delta(square / "adapter", "e_o_i", order))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"lora_B_layout": "sideways"}, "expected lora_B_layout rank_major or grouped_by_expert, found 'sideways'"),
        ({"lora_B_layout": "mixed"}, "found 'mixed'"),
        ({"auto_mapping": {"unsloth_fixed": True}}, "comes from Unsloth and has no lora_B_layout"),
        ({"sparsity": 0.5}, r"unknown fields \(sparsity\)"),
    ],
)
def test_an_order_or_a_field_that_is_not_known_is_refused(fields: dict[str, Any], problem: str, square: Path) -> None:
    edit_config(square / "adapter", **fields)
    folder = [square / "adapter", {"path": str(square / "adapter"), "name": "again"}]
    for base in ("base", None):
        with pytest.raises(MergeError, match=problem):
            merge(square, *(folder if base is None else folder[:1]), base=base)


def test_a_field_that_is_not_known_is_noted_in_other_adapters(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "adapter", "llama", 1, r=2, target_modules=["q_proj"])
    edit_config(tmp_path / "adapter", sparsity=0.5, later=None)
    for base in (tmp_path / "base", None):
        plan = actmat.plan(base, [tmp_path / "adapter"], method="linear")
        assert sum("unknown fields, which are ignored: sparsity" in note for note in map(str, plan.notes)) == 1


def test_every_field_of_peft_is_in_one_list() -> None:
    lists = [OBEYED, IRRELEVANT.keys(), REFUSED.keys()]
    fields = {f.name for f in dataclasses.fields(peft.LoraConfig)}
    assert not fields - set().union(*lists), "new fields of PEFT: obey them, or say why not"
    assert sum(map(len, lists)) == len(set().union(*lists)), "a field is in two lists"


@pytest.mark.parametrize("axes", ["e_i_o", "e_o_i"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("said", [False, True], ids=["written", "said"])
def test_a_merged_adapter_says_how_its_stacks_are_read(axes: str, order: str, said: bool, tmp_path: Path) -> None:
    version = {"e_i_o": "0.18.1", "e_o_i": peft.__version__}[axes]
    tiny("olmoe").save_pretrained(tmp_path / "base")
    experts = []
    for n in (1, 2):
        save_adapter(tmp_path / f"a{n}", "olmoe", n, **SQUARE)
        fields = {"peft_version": "0.19.0"} if said else {"peft_version": version, "lora_B_layout": order}
        edit_config(tmp_path / f"a{n}", **fields)
        experts.append({"path": str(tmp_path / f"a{n}"), "stacks": [axes, order] if said else []})
    merge(tmp_path, *experts, out="adapter", base=None)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["lora_B_layout"] == "rank_major"
    assert config["peft_version"] == (version if not said else {"e_i_o": "0.18.1", "e_o_i": "0.19.1"}[axes])
    merge(tmp_path, tmp_path / "adapter")
    expected = (delta(tmp_path / "a1", axes, order) + delta(tmp_path / "a2", axes, order)) / 2
    assert_changed_by(tmp_path, expected)
    if axes == "e_o_i":  # this PEFT reads it so too
        model = peft.PeftModel.from_pretrained(tiny("olmoe"), tmp_path / "adapter").merge_and_unload()
        found = model.state_dict()[GATE_UP] - tiny("olmoe").state_dict()[GATE_UP]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def test_adapters_of_other_axes_are_not_added_up(tmp_path: Path) -> None:
    for n, version in enumerate(("0.18.1", "0.21.2")):
        save_adapter(tmp_path / f"a{n}", "olmoe", n, **SQUARE)
        edit_config(tmp_path / f"a{n}", peft_version=version)
    with pytest.raises(MergeError, match=r"with other axes .*a0: e_i_o, a1: PEFT 0\.19\.1 or later"):
        merge(tmp_path, tmp_path / "a0", tmp_path / "a1", base=None)


def test_flags_say_it_for_one_expert_by_name_or_for_all_in_order(square: Path) -> None:
    edit_config(square / "adapter", peft_version=None)
    for given in ("adapter=e_i_o,rank_major", "e_i_o"):
        flags = ["-b", str(square / "base"), "-e", str(square / "adapter"), "-m", "linear", "--set", f"stacks={given}"]
        run(["plan", *flags], code=0)


@pytest.mark.parametrize("method", ["actmat", "tsv"])
@pytest.mark.parametrize("version", ["0.18.1", "0.21.2"])
def test_an_adapter_and_a_model_are_merged_alike(method: str, version: str, tmp_path: Path) -> None:
    """PEFT 0.18 stores the transposed delta of experts that are stored `E x O x I`: outputs are columns of B A."""
    tiny("olmoe").save_pretrained(tmp_path / "base")
    for n in (1, 2):
        save_adapter(tmp_path / f"a{n}", "olmoe", n, **SQUARE)
        edit_config(tmp_path / f"a{n}", peft_version=version)
    merge(tmp_path, tmp_path / "a1", tmp_path / "a2", out="direct", method=method)
    merge(tmp_path, tmp_path / "a1", tmp_path / "a2", out="adapter", method=method, base=None, rank=16)
    merge(tmp_path, tmp_path / "adapter")
    direct = load(tmp_path / "direct", "olmoe")[GATE_UP] - tiny("olmoe").state_dict()[GATE_UP]
    found = load(tmp_path / "out", "olmoe")[GATE_UP] - tiny("olmoe").state_dict()[GATE_UP]
    torch.testing.assert_close(found, direct, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("fields", [{"peft_version": "0.18.1"}, {"lora_B_layout": "grouped_by_expert"}])
def test_no_model_is_loaded_with_an_adapter_that_peft_misreads(fields: dict[str, Any], square: Path) -> None:
    load_model(str(square / "adapter"), base=str(square / "base"))
    edit_config(square / "adapter", **fields)
    with pytest.raises(StatisticsError, match="would apply its stacked experts differently than in training"):
        load_model(str(square / "adapter"), base=str(square / "base"))


@pytest.mark.parametrize("fields", [{}, {"peft_version": "0.18.1"}, {"lora_B_layout": "grouped_by_expert"}])
def test_a_merge_in_memory_is_held_to_the_same(fields: dict[str, Any], square: Path) -> None:
    """Columns of B are rank-major in what is merged, whatever they were; axes stay those of the experts."""
    edit_config(square / "adapter", base_model_name_or_path=str(square / "base"), **fields)
    merge(square, square / "adapter", out="adapter2", base=None)
    found = actmat.merge(None, [square / "adapter"], method="linear")
    if "peft_version" not in fields:
        state = found.load().model.merge_and_unload().state_dict()
        expected = load_model(str(square / "adapter2"), base=str(square / "base")).model.merge_and_unload().state_dict()
        torch.testing.assert_close(state[GATE_UP], expected[GATE_UP], rtol=0, atol=0)
        return
    with pytest.raises(StatisticsError, match="would apply its stacked experts differently") as in_memory:
        found.load()
    with pytest.raises(StatisticsError, match="would apply its stacked experts differently") as on_disk:
        load_model(str(square / "adapter2"), base=str(square / "base"))
    assert str(in_memory.value).partition(": ")[2] == str(on_disk.value).partition(": ")[2]


def test_a_stack_in_an_adapter_counts_as_one_tensor(tmp_path: Path) -> None:
    """`density` of TIES is that of a tensor which is written."""
    options = {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    adapters = [tmp_path / f"a{n}" for n in (1, 2)]
    for n, folder in enumerate(adapters):
        save_adapter(folder, "mixtral", n, **options)

    merged = tmp_path / "merged"
    merge(tmp_path, *adapters, out="merged", base=None, method="ties", rank=16)
    expected = actmat.merge_matrices("ties", [delta(a, "e_o_i", rank=2) for a in adapters])
    torch.testing.assert_close(delta(merged, "e_o_i", rank=16), expected, rtol=1e-10, atol=1e-10)
