"""Statistics of T5 experts: padding is left out on both sides, the decoder sees forced answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers.grams import record_inputs
from tests.helpers.language import some_items, tiny_model, written_tokenizer
from tests.tolerances import F32_PRODUCT, relative_error

from actmat.engine.resources import one_thread
from actmat.statistics import open_statistics
from actmat_experiments.harness.measuring import measure_expert
from actmat_experiments.language.exams import training_tensors
from actmat_experiments.language.models import load_t5

LAYERS = (
    "encoder.block.0.layer.0.SelfAttention.q",
    "encoder.block.1.layer.1.DenseReluDense.wo",
    "decoder.block.0.layer.0.SelfAttention.v",
    "decoder.block.1.layer.1.EncDecAttention.q",
    "decoder.block.0.layer.1.EncDecAttention.k",
    "decoder.block.1.layer.2.DenseReluDense.wi",
)
ITEMS = some_items(5, seed=4)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("measure")
    tiny_model(1).save_pretrained(root / "expert")
    written_tokenizer(root / "expert")
    with one_thread():
        where = {"expert": root / "expert", "base": root / "expert", "device": "cpu", "out": root / "statistics"}
        measure_expert(load_t5, [training_tensors(ITEMS[:4], 0)], **where, fisher=True)
    return root / "expert", root / "statistics"


@pytest.mark.parametrize("layer", LAYERS)
def test_grams_are_those_of_items_run_one_by_one(measured: tuple[Path, Path], layer: str) -> None:
    model = load_t5(measured[0])
    total = None
    for item in ITEMS[:4]:  # alone, an item has no padding
        ids, labels = torch.tensor([item.prompt]), torch.tensor([item.target])
        seen = record_inputs(
            model, (torch.nn.Linear,), lambda ids=ids, labels=labels: model(input_ids=ids, labels=labels)
        )
        z_NI = seen[layer][0].flatten(0, -2).double()
        total = z_NI.T @ z_NI if total is None else total + z_NI.T @ z_NI
    with open_statistics(measured[1]) as statistics:
        key = statistics.find(f"{layer}.weight")
        assert key is not None, statistics.why_absent(f"{layer}.weight")
        gram_II = statistics.gram(key, dtype=torch.float64)
        # means per token or sums: the rule does not change with one factor for all
        assert relative_error(gram_II / gram_II.trace(), total / total.trace()) < F32_PRODUCT


def test_the_fisher_is_there_for_linear_layers(measured: tuple[Path, Path]) -> None:
    with open_statistics(measured[1]) as statistics:
        fisher = statistics.fisher(f"{LAYERS[0]}.weight")
        assert fisher.shape == (16, 16)
        assert bool((fisher >= 0).all())
        assert bool((fisher > 0).any())
