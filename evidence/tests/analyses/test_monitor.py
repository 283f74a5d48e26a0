"""The monitor equals a token-by-token account on real architectures, changes nothing, and says when it saw nothing."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import transformers as hf
from benchmarks.common import relative_error
from evidence.tests.helpers.tokens import NaiveAttention, naive_sums
from evidence.tests.helpers.tolerances import F64_ORACLE
from torch import nn

from actmat.errors import MergeError, RecipeError
from actmat.extras.demo.model import EncoderConfig, new_encoder
from actmat_experiments.analyses.monitor import DriftMonitor, MonitorCallback
from actmat_experiments.analyses.theorem1 import new_mlp
from actmat_experiments.harness.training import Schedule, descend

TINY = EncoderConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 60,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(*shape, seed=0):
    return torch.randint(1, 60, shape, generator=torch.Generator().manual_seed(seed))


def run(model, losses, monitor, **step):
    """Gradient descent; the losses are functions of nothing."""
    for k, loss in enumerate(losses):
        value = loss()
        for p in model.parameters():
            p.grad = None
        with monitor.step(k, **step) if monitor else contextlib.nullcontext():
            value.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad


def captured(model, names, losses):
    """The same descent, with inputs and output gradients of plain modules kept by `retain_grad`."""
    kept = {n: [] for n in names}
    live = {}

    def hook(name):
        def keep(module, inputs, output):
            output.retain_grad()
            live[name] = (inputs[0].detach(), output)

        return keep

    modules = dict(model.named_modules())
    handles = [modules[n].register_forward_hook(hook(n)) for n in names]
    for loss in losses:
        run(model, [loss], None)
        for n in names:
            z, y = live[n]
            kept[n].append((z.flatten(0, -2), y.grad.flatten(0, -2)))
    for handle in handles:
        handle.remove()
    return kept


def assert_same(monitor, label, steps, tolerance=F64_ORACLE):
    found, wanted = monitor.sums(label), naive_sums(steps)
    for key, value in wanted.items():
        assert relative_error(found[key], value) < tolerance, (label, key)


@pytest.mark.parametrize("block", [3, 8192])
def test_an_mlp(block):
    model = new_mlp((6, 5, 4), seed=1)
    x, y = gaussian(10, 6).double(), tokens(10) % 4
    plain, monitor = copy.deepcopy(model), DriftMonitor(block_tokens=block).attach(model)
    run(model, [lambda: nn.functional.cross_entropy(model(x), y)] * 3, monitor)
    monitor.detach()
    kept = captured(plain, ["linear.0", "linear.1"], [lambda: nn.functional.cross_entropy(plain(x), y)] * 3)
    for name, steps in kept.items():
        assert_same(monitor, f"{name}.weight", steps)


def gpt2_loss(model, ids):
    return lambda: model(input_ids=ids, labels=ids).loss


def test_gpt2_with_its_packed_transposed_projections():
    config = hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60, n_positions=16)
    model = hf.GPT2LMHeadModel(config).eval().double()
    batches = [tokens(2, 5, seed=s) for s in (0, 1)]
    plain, monitor = copy.deepcopy(model), DriftMonitor().attach(model)
    run(model, [gpt2_loss(model, b) for b in batches], monitor)
    monitor.detach()
    assert not [label for label in monitor.labels if "wte" in label or "lm_head" in label], "a tied head"
    names = ["transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_proj"]
    kept = captured(plain, names, [gpt2_loss(plain, b) for b in batches])
    assert_same(monitor, "transformer.h.1.mlp.c_proj.weight", kept[names[1]])
    for index, block in enumerate("qkv"):
        rows = slice(32 * index, 32 * (index + 1))
        cut = [(z, g[:, rows]) for z, g in kept[names[0]]]
        assert_same(monitor, f"{names[0]}.weight[{block}]", cut)


def test_torchs_own_attention_which_calls_no_modules():
    """nn.MultiheadAttention against attention written out; and the summed gradient is the weight's."""
    model = new_encoder(TINY, seed=0).double()
    images = gaussian(4, 8, 8).double()
    plain, monitor = copy.deepcopy(model), DriftMonitor().attach(model)
    with monitor.step(0):
        model(images).square().sum().backward()
    naive = NaiveAttention(plain.layers[0].attention)
    plain.layers[0].attention = naive
    plain(images).square().sum().backward()
    for name, (z, y) in naive.kept.items():
        assert_same(monitor, f"layers.0.attention.{name}", [(z.flatten(0, 1), y.grad.flatten(0, 1))])
    grad = model.layers[0].attention.in_proj_weight.grad
    for part, block in zip(grad.chunk(3), "qkv", strict=True):
        assert (
            relative_error(monitor.sums(f"layers.0.attention.in_proj_weight[{block}]")["gradient"], part) < F64_ORACLE
        )


def test_reading_changes_no_bit_and_leaves_nothing_behind():
    linear, fast = nn.functional.linear, torch.backends.mha.get_fastpath_enabled()
    model, images = new_encoder(TINY, seed=0), gaussian(4, 8, 8)
    plain = copy.deepcopy(model)
    monitor = DriftMonitor().attach(model)
    run(model, [lambda: model(images).square().sum()] * 3, monitor)
    monitor.detach()
    run(plain, [lambda: plain(images).square().sum()] * 3, None)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    assert nn.functional.linear is linear
    assert torch.backends.mha.get_fastpath_enabled() == fast
    model(images).sum().backward()  # nothing is watched any more
    assert monitor.steps == [0, 1, 2]


def test_inputs_are_measured_at_the_weights_of_the_moment():
    model, images = new_encoder(TINY, seed=0).double().eval(), gaussian(6, 8, 8).double()
    monitor = DriftMonitor().attach(model)
    with monitor.inputs():
        model(images[:2])
    with monitor.inputs(more=True):
        model(images[2:])
    patches = images.unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, 4)
    assert relative_error(monitor.sums("patch_proj.weight")["gram"], patches.mT @ patches / len(patches)) < F64_ORACLE
    # inference, where torch would take a fused kernel that calls nothing: seen nevertheless
    assert monitor.sums("layers.0.attention.out_proj.weight")["gram"].any()
    with monitor.inputs():
        model(images[:1])
    first = patches[:16]
    assert relative_error(monitor.sums("patch_proj.weight")["gram"], first.mT @ first / len(first)) < F64_ORACLE
    monitor.detach()


def test_padding_counts_nowhere():
    """The sums with a mask are those of the batch without its padding."""
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)).eval().double()
    ids, mask = tokens(2, 6), torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    name = "model.layers.1.mlp.up_proj"
    labels = ids.masked_fill(mask == 0, -100)

    def loss(m):
        return lambda: m(input_ids=ids, attention_mask=mask, labels=labels).loss

    plain, monitor = copy.deepcopy(model), DriftMonitor(layers=["*up_proj*"]).attach(model)
    run(model, [loss(model)], monitor, mask=mask)
    monitor.detach()
    ((z, g),) = captured(plain, [name], [loss(plain)])[name]
    keep = mask.flatten().bool()
    assert_same(monitor, f"{name}.weight", [(z[keep], g[keep])])
    assert len(keep) > keep.sum()


def test_a_mask_for_attention_that_sees_tokens_first():
    model = new_encoder(TINY, seed=0).double()
    mask = torch.rand(3, 17, generator=torch.Generator().manual_seed(3)) < 0.6
    one, whole = (DriftMonitor(layers=["*.attention.*"]).attach(copy.deepcopy(model)) for _ in range(2))
    for monitor, kept in ((one, mask), (whole, torch.ones_like(mask))):
        copied = monitor._taps[0].module
        assert copied.batch_first
        with monitor.inputs(mask=kept):
            features = gaussian(3, 17, 16).double()
            copied(features, features, features, need_weights=False)
        rows = features[kept]
        found = monitor.sums("layers.0.attention.in_proj_weight[k]")["gram"]
        assert relative_error(found, rows.mT @ rows / len(rows)) < F64_ORACLE
        monitor.detach()


def test_micro_batches_of_one_step_add_up():
    model, x = new_mlp((6, 5, 4), seed=1), gaussian(10, 6).double()
    whole, parts = DriftMonitor().attach(model), DriftMonitor().attach(model)
    for monitor, pieces in ((whole, [x]), (parts, [x[:3], x[3:]])):
        other = parts if monitor is whole else whole
        with monitor.step(0), other.step(0):
            for piece in pieces:
                model(piece).square().sum().backward()
    assert whole.steps == parts.steps == [0, 0]
    for key, value in whole.sums("linear.0.weight").items():
        assert relative_error(parts.sums("linear.0.weight")[key], value) < F64_ORACLE
    whole.detach()
    parts.detach()


def test_a_callback_of_the_shared_training_loop():
    model, x = new_mlp((6, 5, 4), seed=1), gaussian(32, 6).double()
    monitor, seen = DriftMonitor().attach(model), []

    def after(done):
        with monitor.inputs():
            model(x)
        seen.append((done, monitor.angles()["linear.0.weight"]))

    descend(
        list(model.parameters()),
        lambda _: (model(x).square().mean() for _ in range(4)),
        4,
        Schedule(1, 8, 1e-2),
        callbacks=[MonitorCallback(monitor, after)],
    )
    monitor.detach()
    assert [done for done, _ in seen] == [*monitor.steps[1:], 4] == [1, 2, 3, 4]
    assert all(a.estimate <= a.full_bound + 1e-9 for _, a in seen)
    assert seen[-1][1].optimizer > 1e-3  # AdamW is not gradient descent


# What it refuses, and what it cannot see


def test_it_says_what_it_has_not_seen():
    model = new_mlp((4, 3, 2))
    monitor = DriftMonitor().attach(model)
    with pytest.raises(MergeError, match="lacks measurements") as caught:
        monitor.angles()
    assert len(caught.value.problems) == 3
    with pytest.raises(MergeError, match=r"outside 'with monitor\.step"):
        model(gaussian(2, 4).double()).sum().backward()
    with pytest.raises(MergeError, match="attached already"):
        monitor.attach(model)
    with monitor.inputs(), pytest.raises(MergeError, match="inside 'inputs'"), monitor.step(0):
        pass
    with pytest.raises(MergeError, match="sees 5 tokens, the mask is for 6"), monitor.inputs(mask=torch.ones(2, 3)):
        model(gaussian(5, 4).double())
    monitor.detach()


def test_a_step_that_failed_leaves_no_trace():
    model, x = new_mlp((4, 3, 2)), gaussian(5, 4).double()
    monitor = DriftMonitor().attach(model)
    with contextlib.suppress(KeyError), monitor.step(0):
        model(x).sum().backward()
        raise KeyError
    with monitor.step(0):
        model(x).square().sum().backward()
    monitor.detach()
    assert monitor.steps == [0]
    y = model.linear[0](x)
    y.retain_grad()
    model.linear[1](y.relu()).square().sum().backward()
    assert_same(monitor, "linear.0.weight", [(x, y.grad)])


def test_a_pass_under_way_when_it_is_detached_counts_nowhere():
    model = new_mlp((4, 3, 2))
    monitor = DriftMonitor().attach(model)
    value = model(gaussian(2, 4).double()).sum()
    monitor.detach()
    value.backward()
    assert not monitor.sums("linear.0.weight")["gradient"].any()


def test_unknown_layers_and_bad_settings():
    with pytest.raises(RecipeError, match=r"No linear layer is called 'linear\.9\.weight'.*Did you mean 'linear"):
        DriftMonitor(layers=["linear.9.weight"]).attach(new_mlp((4, 3, 2)))
    with pytest.raises(ValueError, match="at least 1"):
        DriftMonitor(block_tokens=0)


def test_layers_that_cannot_be_read_are_named_and_frozen_ones_left_out():
    monitor = DriftMonitor().attach(
        hf.MixtralForCausalLM(hf.MixtralConfig(**LLAMA, num_local_experts=3, num_experts_per_tok=2))
    )
    assert any("experts" in name for name in monitor.not_read)
    monitor.detach()
    model = new_mlp((4, 3, 2))
    model.linear[0].requires_grad_(False)
    monitor = DriftMonitor().attach(model)
    assert monitor.labels == ["linear.1.weight"]
    monitor.detach()


def test_a_monitor_that_is_never_detached_spoils_nobody_else():
    """Outside of an attention's own forward pass nothing global is changed, also after an error inside it."""
    linear = nn.functional.linear
    model = new_encoder(TINY, seed=0)
    first, second = DriftMonitor().attach(model), DriftMonitor().attach(model)
    with first.inputs(), second.inputs():
        model(gaussian(2, 8, 8))
        assert nn.functional.linear is linear
    with pytest.raises(AssertionError, match="embedding dimension"):
        model.layers[0].attention(*[gaussian(2, 3, 5)] * 3)  # not the width of the layer
    assert nn.functional.linear is linear
    assert torch.backends.mha.get_fastpath_enabled()
    name = "layers.0.attention.in_proj_weight[q]"
    assert torch.equal(first.sums(name)["gram"], second.sums(name)["gram"])
    assert first.sums(name)["gram"].any()


def test_torchs_own_encoder_layer_is_read_in_inference_too():
    """Its fused kernel would call neither modules nor functions."""
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True).eval()
    monitor, x = DriftMonitor().attach(layer), gaussian(2, 5, 16)
    with monitor.inputs():
        layer(x)
    monitor.detach()
    rows = x.flatten(0, 1).double()
    for name in monitor.labels:
        assert monitor.sums(name)["gram"].any(), name
    found = monitor.sums("self_attn.in_proj_weight[v]")["gram"]
    assert relative_error(found, rows.mT @ rows / 10) < F64_ORACLE
