"""Blocks of packed projections, against how the models' own forward passes use the rows.

Attention gives three laws that need no look inside: with the values zeroed the output forgets queries and keys; with
the queries zeroed all scores are equal and it forgets the keys; with the keys zeroed it forgets the queries. They fail
for any other partition of the rows.
"""

from collections.abc import Callable

import pytest
import torch
from tests.helpers.tinymodels import build, specs_of
from torch import nn

from actmat.layout.resolve import resolve_layout
from actmat.layout.types import Block, Role, TensorLayout

ATTENTION = [
    "phi3", "gpt2", "gpt_bigcode", "gpt_bigcode_heads", "codegen", "gpt_neox", "falcon_mq", "falcon_heads",
    "falcon_new", "bloom", "mpt", "modernbert", "deberta",
]  # fmt: skip

IDS = torch.tensor([[5, 9, 3, 7, 11]])


def rows_of(block: Block, total: int) -> torch.Tensor:
    per_group = total // block.groups
    return torch.cat([torch.arange(block.start, block.stop) + g * per_group for g in range(block.groups)])


def packed_layouts(model: nn.Module, names: set[str]) -> dict[str, TensorLayout]:
    config = model.config.to_dict()
    layouts = resolve_layout(specs_of(model.state_dict()), config).tensors
    out = {n: layout for n, layout in layouts.items() if {b.name for b in layout.blocks} == names}
    assert out, "nothing is packed"
    return out


def edit(model: nn.Module, layouts: dict[str, TensorLayout], change: dict[str, Callable[[torch.Tensor], torch.Tensor]]):
    """Apply `change` to the rows of the named blocks, in weights and in the biases beside them."""
    state = model.state_dict()
    with torch.no_grad():
        for name, layout in layouts.items():
            weight = state[name].mT if layout.orientation == "IO" else state[name]
            bias = state.get(name.removesuffix("weight") + "bias")
            for block in layout.blocks:
                if block.name in change:
                    rows = rows_of(block, weight.shape[0])
                    weight[rows] = change[block.name](weight[rows])
                    if bias is not None:
                        bias[rows] = change[block.name](bias[rows])


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS)[0].double()


def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(x)


def loud(family: str) -> nn.Module:
    """A model with weights large enough for attention to matter."""
    model = build(family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("family", ATTENTION)
@pytest.mark.parametrize(("zeroed", "forgotten"), [("v", ("q", "k")), ("q", ("k",)), ("k", ("q",))])
def test_zeroing_one_block_makes_attention_forget_the_others(
    family: str, zeroed: str, forgotten: tuple[str, ...]
) -> None:
    model = loud(family)
    layouts = packed_layouts(model, {"q", "k", "v"})
    before = output(model)
    edit(model, layouts, dict.fromkeys(forgotten, noise))
    assert not torch.allclose(output(model), before, rtol=1e-2), "these blocks must matter to begin with"
    edit(model, layouts, {zeroed: torch.zeros_like})
    reference = output(model)
    edit(model, layouts, dict.fromkeys(forgotten, noise))
    torch.testing.assert_close(output(model), reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["phi3", "modernbert"])
def test_the_up_block_scales_out_and_the_gate_block_does_not(family: str) -> None:
    model = loud(family)
    layouts = packed_layouts(model, {"gate", "up"})
    before = output(model)
    down = {"phi3": "down_proj.weight", "modernbert": "mlp.Wo.weight"}[family]
    edit(model, layouts, {"up": lambda x: 2 * x})
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith(down):
                tensor.mul_(0.5)
    torch.testing.assert_close(output(model), before, rtol=1e-4, atol=1e-5)
    edit(model, layouts, {"up": lambda x: 0.5 * x, "gate": lambda x: 2 * x})
    assert not torch.allclose(output(model), before, rtol=1e-2)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "granitemoe", "gpt_oss"])
def test_stacked_experts_compute_what_their_module_computes(family: str) -> None:
    model = build(family)
    layouts = resolve_layout(specs_of(model.state_dict()), model.config.to_dict()).tensors
    name = next(n for n in layouts if n.endswith("experts.gate_up_proj"))
    experts = model.get_submodule(name.rpartition(".")[0])
    up_layout, down_layout = layouts[name], layouts[name.replace("gate_up_proj", "down_proj")]
    assert up_layout.role is down_layout.role is Role.STACKED_EXPERTS
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0 if parameter.ndim == 2 else 0.2))
        gate_EFH, up_EFH = up_layout.to_matrices(experts.gate_up_proj)
        (down_EHF,) = down_layout.to_matrices(experts.down_proj)
        x_NH = torch.randn(4, 32)
        chosen_N = torch.tensor([0, 2, 1, 2])
        gate_NF = torch.einsum("nfh,nh->nf", gate_EFH[chosen_N], x_NH)
        up_NF = torch.einsum("nfh,nh->nf", up_EFH[chosen_N], x_NH)
        if family == "gpt_oss":
            inner_NF = (up_NF + 1) * gate_NF * torch.sigmoid(1.702 * gate_NF)
            assert gate_NF.max() < 7 > up_NF.abs().max()  # below the clamps of that model
        else:
            inner_NF = nn.functional.silu(gate_NF) * up_NF
        expected = torch.einsum("nhf,nf->nh", down_EHF[chosen_N], inner_NF)
        found = experts(x_NH, chosen_N[:, None], torch.ones(4, 1))
    torch.testing.assert_close(found.reshape(4, 32), expected, rtol=1e-4, atol=1e-5)


def test_the_linear_attention_of_qwen3_next_splits_as_its_forward_does() -> None:
    model = build("qwen3_next")
    layouts = packed_layouts(model, {"q", "k", "v", "z"})
    ((name, layout),) = layouts.items()
    mixer = model.get_submodule(name.removesuffix(".in_proj_qkvz.weight"))
    x = torch.randn(1, 3, 32)
    with torch.no_grad():
        parts = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(x), mixer.in_proj_ba(x))[:4]
        for matrix, part in zip(layout.to_matrices(mixer.in_proj_qkvz.weight), parts, strict=True):
            torch.testing.assert_close(x @ matrix.mT, part.reshape(1, 3, -1))
