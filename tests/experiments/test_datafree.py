"""Estimates of a layer's inputs, lengths of a merge, and models in memory, on cases whose answers are known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.tolerances import F32_ELEMENTWISE, F32_PRODUCT
from torch import Tensor, nn

from actmat import merge_matrices
from actmat.extras.demo.heads import Head
from actmat.extras.demo.model import new_encoder
from actmat.extras.demo.tasks import Examples
from actmat.extras.demo.training import Schedule, generator_for
from actmat_experiments.datafree.factors import peft_factors, read_factors, save_factors
from actmat_experiments.datafree.grams import (
    alignment,
    delta_gram,
    excess_gram,
    left_out_share,
    merge_by,
    mixed,
    moved_gram,
    unit,
)
from actmat_experiments.datafree.lengths import LENGTHS, inner
from actmat_experiments.datafree.matrices import assembled, input_grams, linear_maps, matrices
from actmat_experiments.forecast.models import FAMILIES, finetune_lowrank


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


DELTAS = [drawn(4, 6, seed=t) for t in range(3)]
KEYED = [{"w": d} for d in DELTAS]

# Estimates


def test_merges_by_the_identity_are_the_average_and_by_grams_regmean() -> None:
    eye = torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(merge_by(DELTAS, [eye] * 3), torch.stack(DELTAS).mean(0))
    grams = [delta_gram(drawn(9, 6, seed=10 + t)) for t in range(3)]
    torch.testing.assert_close(merge_by(DELTAS, grams), merge_matrices("regmean", DELTAS, statistics={"gram": grams}))
    prior = delta_gram(drawn(9, 6, seed=7))
    shared = merge_by(DELTAS, [prior] * 3)
    torch.testing.assert_close(shared, torch.stack(DELTAS).mean(0), msg="one prior for all experts is the average")


def test_estimates_are_mixed_at_one_size() -> None:
    gram = delta_gram(drawn(4, 6)) * 1e-6
    assert float(unit(gram).trace()) == pytest.approx(6)
    assert float(mixed(gram, 0.3).trace()) == pytest.approx(6)
    torch.testing.assert_close(mixed(gram, 0.0), torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close(mixed(gram, 0.0, 5 * gram), unit(gram))
    torch.testing.assert_close(unit(torch.zeros(3, 3)), torch.eye(3), msg="nothing known: all directions alike")


def test_the_movement_of_a_adapter_is_seen_through_its_start() -> None:
    start, step, b = drawn(2, 6), drawn(2, 6, seed=1), drawn(4, 2, seed=2)
    torch.testing.assert_close(moved_gram(start + step, start), step.mT @ step)
    torch.testing.assert_close(moved_gram(start + step, start, b), (b @ step).mT @ (b @ step))
    assert not moved_gram(start, start).any()
    assert alignment(delta_gram(step), 3 * step.mT @ step) == pytest.approx(1)


def test_without_the_start_only_what_exceeds_its_statistics_counts() -> None:
    """An `A` as it is drawn has no excess; a large step in one direction has that direction."""
    bound = 1 / math.sqrt(400)
    a = (2 * torch.rand(4, 400, generator=torch.Generator().manual_seed(0)) - 1) * bound
    assert float(excess_gram(a).norm()) < 0.2
    along = torch.zeros(400)
    along[3] = 1.0
    moved = a + torch.tensor([[3.0], [0.0], [0.0], [0.0]]) * along
    found = excess_gram(moved)
    assert alignment(found, torch.outer(along, along)) > 0.95


def test_the_share_is_that_at_which_left_out_experts_suffer_least() -> None:
    own = [{"w": delta_gram(d)} for d in DELTAS]
    naive = []
    for share in (0.0, 0.5):
        losses = []
        for t in range(3):
            seen = [mixed(own[s]["w"], 0.0 if s == t else share) for s in range(3)]
            error, gram = merge_by(DELTAS, seen) - DELTAS[t], unit(own[t]["w"])
            losses.append(float((error @ gram @ error.mT).trace() / (DELTAS[t] @ gram @ DELTAS[t].mT).trace()))
        naive.append(sum(losses))
    assert left_out_share(KEYED, own, (0.0, 0.5)) == (0.0, 0.5)[naive.index(min(naive))]


# Lengths


def test_lengths_of_orthogonal_experts() -> None:
    """Rows of their own: the sum serves all, the average is half as long as it should be, and lengths say so."""
    deltas = [{"w": torch.tensor([[2.0, 0.0]])}, {"w": torch.tensor([[0.0, 2.0]])}]
    sums = inner({"w": torch.tensor([[1.0, 1.0]])}, deltas)
    assert sums.agreement == pytest.approx(1)
    found = {name: rule(sums) for name, rule in LENGTHS.items()}
    root = math.sqrt(2)
    wanted = {"one": 1, "average": 1, "mean expert": root, "projection": 1, "own inputs": 2, "half way": root}
    assert found == pytest.approx(wanted | {"signal": root}, rel=F32_ELEMENTWISE)


@pytest.mark.parametrize("rule", ["average", "mean expert", "projection", "own inputs", "half way", "signal"])
def test_lengths_do_not_depend_on_the_length_that_was_given(rule: str) -> None:
    merged = {"w": drawn(4, 6, seed=9).float()}
    deltas = [{"w": d.float()} for d in DELTAS]
    once, twice = (LENGTHS[rule](inner({"w": s * merged["w"]}, deltas)) * s for s in (1.0, 2.0))
    assert once == pytest.approx(twice, rel=F32_PRODUCT)


def test_equal_experts_agree_and_every_length_returns_them() -> None:
    delta = {"w": DELTAS[0].float()}
    sums = inner({"w": 3 * delta["w"]}, [delta] * 4)
    assert sums.agreement == pytest.approx(4)
    for name, rule in LENGTHS.items():
        if name != "one":
            assert 3 * rule(sums) == pytest.approx(1, rel=F32_PRODUCT), name


# Models in memory


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 4, 2, stride=2)
        self.up = nn.Linear(4, 6)
        self.words = nn.Embedding(5, 6)
        self.tied = nn.Linear(6, 5, bias=False)
        self.tied.weight = self.words.weight

    def forward(self, pixels: Tensor) -> Tensor:
        out: Tensor = self.up(self.patches(pixels).flatten(2).mT)
        return out


def test_maps_of_a_model_and_the_grams_of_their_inputs() -> None:
    torch.manual_seed(0)
    model, pixels = Small().eval(), torch.randn(3, 1, 4, 4)
    maps = linear_maps(model)
    assert maps == {"patches.weight": 1, "up.weight": 1}, "an embedding is no linear map, tied or not"
    grams = input_grams(model, [{"pixels": pixels[:2]}, {"pixels": pixels[2:]}], maps)
    z = model.patches(pixels).flatten(2).mT.reshape(-1, 4)
    torch.testing.assert_close(grams["up.weight", 0], z.mT @ z)
    cut = nn.functional.unfold(pixels, 2, stride=2).mT.reshape(-1, 4)
    torch.testing.assert_close(grams["patches.weight", 0], cut.mT @ cut)
    base = model.state_dict()
    expert = {n: t + 1 for n, t in base.items()}
    merged = {key: torch.full_like(w, 0.25) for key, w in matrices(base, maps).items()}
    state = assembled(base, [expert, base], merged, maps)
    torch.testing.assert_close(state["patches.weight"], base["patches.weight"] + 0.25)
    torch.testing.assert_close(state["up.bias"], base["up.bias"] + 0.5)


def test_packed_projections_have_three_blocks() -> None:
    encoder = new_encoder(FAMILIES[0].encoder, seed=0)
    maps = linear_maps(encoder)
    assert maps["layers.0.attention.in_proj_weight"] == 3
    state = dict(encoder.state_dict())
    blocks = matrices(state, maps)
    torch.testing.assert_close(
        torch.cat([blocks["layers.0.attention.in_proj_weight", k] for k in range(3)]),
        state["layers.0.attention.in_proj_weight"],
    )
    assert set(input_grams(encoder, [{"images_NHW": torch.rand(2, 8, 8)}], maps)) == set(blocks)


def test_factors_of_digits_give_the_deltas_and_come_back_from_disk(tmp_path: Path) -> None:
    base = new_encoder(FAMILIES[0].encoder, seed=0)
    examples = Examples(torch.rand(32, 8, 8), torch.arange(32) % 2)
    head = Head(torch.randn(2, base.config.hidden_size), torch.zeros(2))
    expert, factors = finetune_lowrank(
        *(base, head, examples, Schedule(1, 16, 1e-2)), rank=2, generator=generator_for(0, "finetuning x")
    )
    maps = linear_maps(base)
    before, after = (matrices(dict(m.state_dict()), maps) for m in (base, expert))
    save_factors({"x": factors}, tmp_path)
    read = read_factors(tmp_path, "x")
    assert set(read) == set(factors) == set(before)
    for key, (b, a, start) in read.items():
        torch.testing.assert_close(before[key] + 2 * b @ a, after[key])
        assert bool((a != start).any()), "A has moved"
        assert float(start.abs().max()) <= 1 / math.sqrt(start.shape[1])


def test_the_start_of_a_peft_adapter_is_drawn_again_from_the_seed(tmp_path: Path) -> None:
    from actmat_experiments.vision.train import with_adapter

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))

    adapted = with_adapter(model(), 2, generator_for(3, "factors mnist"))
    started = {n: p.detach().clone() for n, p in adapted.named_parameters() if "lora_A" in n}
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 1.0
    adapted.save_pretrained(tmp_path)
    found = peft_factors(model(), tmp_path, 2, 3, "mnist")
    assert set(found) == {("0.weight", 0), ("1.weight", 0)}
    for (name, _), (_, a, start) in found.items():
        wanted = started[f"base_model.model.{name.removesuffix('weight')}lora_A.default.weight"]
        torch.testing.assert_close(start, wanted)
        torch.testing.assert_close(a, wanted + 1.0)
