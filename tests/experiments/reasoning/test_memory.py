"""Memory of generation and statistics, planned before a model is loaded; statistics in several passes."""

from __future__ import annotations

import pytest
import torch
from transformers import Olmo3Config

from actmat.errors import MergeError, StatisticsError
from actmat.extras.collect.combine import join_statistics
from actmat.extras.collect.measures import GramSum
from actmat.statistics import open_statistics
from actmat_experiments.core import collect
from actmat_experiments.reasoning.generate import Measuring, measure
from actmat_experiments.reasoning.memory import GIB, cache_bytes, gram_bytes, passes_of, planned_batch
from actmat_experiments.reasoning.small.model import Size, load_model, new_model, save_model

SEVEN_B = Olmo3Config(num_attention_heads=32, num_key_value_heads=32, sliding_window=4096)


def test_the_cache_of_a_7b_model_is_what_its_layers_keep():
    each = 2 * 32 * 128 * 2  # keys and values of a token in one layer, in bytes
    assert cache_bytes(SEVEN_B, 4096, "bfloat16") == 32 * 4096 * each
    assert cache_bytes(SEVEN_B, 16384, "bfloat16") == (24 * 4096 + 8 * 16384) * each
    assert cache_bytes(SEVEN_B, 16384, "float32") == 2 * cache_bytes(SEVEN_B, 16384, "bfloat16")


def write_config(folder, weights):
    SEVEN_B.save_pretrained(folder)
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(weights)
    return folder


@pytest.mark.parametrize(
    ("memory", "tokens", "batch"), [(80, 16384, 8), (80, 2048, 32), (20, 16384, 1), (640, 256, 64)]
)
def test_the_batch_follows_from_the_memory_of_the_device(tmp_path, memory, tokens, batch):
    folder = write_config(tmp_path, 14 * GIB)
    found = planned_batch(folder, tokens, "bfloat16", memory * GIB)
    assert found == batch
    assert 14 * GIB + found * cache_bytes(SEVEN_B, tokens, "bfloat16") < memory * GIB


def test_an_answer_that_does_not_fit_is_told_beforehand(tmp_path):
    with pytest.raises(MergeError, match=r"3\.5 GiB beside 14\.0 GiB .* the device has 16\.0 GiB.*max_tokens"):
        planned_batch(write_config(tmp_path, 14 * GIB), 16384, "bfloat16", 16 * GIB)


@pytest.mark.parametrize("width", [1, 100, 128, 300])
def test_the_size_of_a_sum_is_that_of_its_blocks(width):
    assert gram_bytes(width) == sum(block.nbytes for block in GramSum(width)._sums)


def test_passes_hold_whole_layers_and_every_weight_once():
    shapes = {"embed.weight": (50, 4)}
    shapes |= {f"layers.{i}.{n}.weight": (8, 8) for i in range(5) for n in ("q", "k", "up")} | {"head.weight": (50, 8)}
    layer = 3 * gram_bytes(8)
    passes = passes_of(shapes, 2 * layer)
    assert sorted(n for some in passes for n in some) == sorted(shapes)
    for some in passes:
        assert sum(gram_bytes(shapes[n][-1]) for n in some) <= 2 * layer
        for i in range(5):
            assert sum(n.startswith(f"layers.{i}.") for n in some) in (0, 3)
    assert len(passes_of(shapes, 10**9)) == 1
    assert len(passes_of(shapes, 1)) == 6, "one layer at least, the table with the first"


PROMPTS = [f"add {i}+{i}=" for i in range(10, 18)]


def test_statistics_in_passes_are_those_of_one_pass(tmp_path):
    save_model(new_model(Size(16, 32, 3, 2), seed=0), tmp_path / "model")
    said = []
    for name, most in (("whole", None), ("parts", 3000)):
        how = Measuring(batch_size=4, most=most)
        measure(str(tmp_path / "model"), PROMPTS, tmp_path / name, how, said.append)
    assert said[0].startswith("1 pass over 8 prompts")
    assert int(said[1].split()[0]) > 2
    assert not list(tmp_path.glob("parts-*"))
    with open_statistics(tmp_path / "whole") as whole, open_statistics(tmp_path / "parts") as parts:
        assert parts.header.places.keys() == whole.header.places.keys()
        assert (parts.header.samples, parts.header.tokens) == (whole.header.samples, whole.header.tokens)
        assert parts.header.absent == whole.header.absent
        for name in whole.header.places:
            a, b = (s.gram(s.find(name), dtype=torch.float64) for s in (whole, parts))
            assert torch.equal(a, b), name


def test_only_parts_of_one_measurement_are_joined(tmp_path):
    save_model(new_model(Size(16, 32, 1, 2), seed=0), tmp_path / "model")
    model = load_model(tmp_path / "model")
    names = [n for n, p in model.named_parameters() if p.ndim == 2]
    for part, only, length in (("a", names[:3], 4), ("b", names[3:], 4), ("c", names[3:], 5), ("d", names[2:], 4)):
        batch = {"input_ids": torch.arange(length)[None]}
        collect(model, [batch], checkpoint=tmp_path / "model", out=tmp_path / part, only=only, sums_on="cpu")
    join_statistics([tmp_path / "a", tmp_path / "b"], tmp_path / "ab")
    with pytest.raises(StatisticsError, match="other data"):
        join_statistics([tmp_path / "a", tmp_path / "c"], tmp_path / "ac")
    with pytest.raises(StatisticsError, match="shares its Gram with other layers"):
        join_statistics([tmp_path / "a", tmp_path / "d"], tmp_path / "ad")
