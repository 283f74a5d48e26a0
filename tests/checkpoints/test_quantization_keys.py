"""Settings of quantized checkpoints: each is in one list, and what is refused or not known is said."""

import itertools
from pathlib import Path
from typing import Any

import compressed_tensors.quantization as library
import pytest
import torch
import transformers
from tests.checkpoints.test_codecs import NAME, noise, same_everywhere
from tests.checkpoints.test_codecs_of_quantizers import config_of, gptq
from tests.helpers.checkpoint_files import save_folder
from tests.helpers.quantized import compressed, fp8_blocks

from actmat.checkpoints.keys import Keys
from actmat.checkpoints.resolve import open_model, open_tensors
from actmat.errors import CheckpointError
from actmat.extras.quantized import settings

CLASSES: dict[str, tuple[Any, Keys]] = {
    "bnb4": (transformers.BitsAndBytesConfig(load_in_4bit=True), settings.BITSANDBYTES_KEYS),
    "bnb8": (transformers.BitsAndBytesConfig(load_in_8bit=True), settings.BITSANDBYTES_KEYS),
    "gptq": (transformers.GPTQConfig(bits=4), settings.GPTQ_KEYS),
    "awq": (transformers.AwqConfig(), settings.AWQ_KEYS),
    "fp8": (transformers.FineGrainedFP8Config(), settings.FP8_KEYS),
    "mxfp4": (transformers.Mxfp4Config(dequantize=True), settings.MXFP4_KEYS),
}
MODELS: dict[str, tuple[Any, Keys]] = {
    "config": (library.QuantizationConfig, settings.COMPRESSED_KEYS),
    "scheme": (library.QuantizationScheme, settings.COMPRESSED_KEYS.inside["config_groups"].inside["*"]),
    "weights": (
        library.QuantizationArgs,
        settings.COMPRESSED_KEYS.inside["config_groups"].inside["*"].inside["weights"],
    ),
}


@pytest.mark.parametrize("name", CLASSES)
def test_every_setting_of_transformers_is_known(name: str) -> None:
    config, keys = CLASSES[name]
    fields = config.to_dict().keys() | vars(config).keys()
    assert not fields - keys.known, "new settings of transformers: obey them, or say why not"
    assert not any(keys.judge(config.to_dict()).values())


@pytest.mark.parametrize("name", MODELS)
def test_every_setting_of_compressed_tensors_is_known(name: str) -> None:
    model, keys = MODELS[name]
    assert not model.model_fields.keys() - keys.known, "new settings of compressed-tensors: obey them, or say why not"


def test_no_setting_is_in_two_lists() -> None:
    for _, keys in (*CLASSES.values(), *MODELS.values()):
        lists = (keys.obeyed, keys.irrelevant, keys.refused, keys.inside, keys.values)
        assert sum(map(len, lists)) == len(keys.known)


def test_the_packing_of_gptq_is_read_by_both_of_its_names(tmp_path: Path) -> None:
    """Newer versions write `format`; zero points of the two packings differ by one."""
    for n, (key, packing) in enumerate(itertools.product(("format", "checkpoint_format"), ("gptq_v2", "gptq"))):
        stored, expected = gptq(4, ordered=False, shift=int(packing == "gptq"))
        with open_model(save_folder(tmp_path / str(n), stored, config_of("gptq", bits=4, **{key: packing}))) as found:
            same_everywhere(found.tensors, NAME, expected)


@pytest.mark.parametrize(
    ("method", "entry", "words"),
    [
        ("gptq", {"format": "marlin"}, "sets format: expected gptq or gptq_v2, found 'marlin'"),
        ("gptq", {"rotation": "hadamard"}, "config.json sets rotation: weights were rotated"),
        ("gptq", {"is_marlin_format": True}, "config.json sets is_marlin_format"),
        ("gptq", {"adapter": {"rank": 8}}, "config.json sets adapter: EoRA"),
        ("awq", {"format": "gemv"}, "sets format: expected gemm, found 'gemv'"),
        ("awq", {"backend": "llm-awq"}, "the AWQ layout 'llm-awq'"),
    ],
)
def test_a_setting_that_changes_the_weights_is_refused(
    method: str, entry: dict[str, Any], words: str, tmp_path: Path
) -> None:
    stored, _ = gptq(4, ordered=False, shift=1)
    with pytest.raises(CheckpointError) as error:
        open_tensors(save_folder(tmp_path, stored, config_of(method, bits=4, **entry)))
    assert words in str(error.value)


def test_experts_of_four_bits_in_an_fp8_model_are_refused(tmp_path: Path) -> None:
    """DeepSeek-V4 stores codes of two entries per byte as int8, which no codec reads."""
    stored, _ = fp8_blocks(NAME, noise(128, 128))
    stored["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(2, 128, 64, dtype=torch.int8)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}}
    with pytest.raises(CheckpointError, match="sets expert_dtype: expected fp8, found 'fp4'"):
        open_tensors(save_folder(tmp_path, stored, config))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("format",), "marlin-24", "sets format: expected dense"),
        (("config_groups", "group_0", "format"), "mxfp6-pack-quantized", "sets config_groups.group_0.format"),
        (("moe_sparsity_config",), {"method": "prune", "num_experts": [4]}, "sets moe_sparsity_config: experts were"),
    ],
)
def test_a_format_of_compressed_tensors_that_is_not_read_is_refused(
    path: tuple[str, ...], value: Any, words: str, tmp_path: Path
) -> None:
    write, entry = compressed(num_bits=8, type="int", strategy="channel", symmetric=True)
    level = entry
    for key in path[:-1]:
        level = level[key]
    level[path[-1]] = value
    stored, _ = write(NAME, noise(32, 64))
    with pytest.raises(CheckpointError) as error:
        open_tensors(save_folder(tmp_path, stored, {"quantization_config": entry}))
    assert words in str(error.value)


def test_a_setting_that_is_not_known_is_noted(tmp_path: Path) -> None:
    write, entry = compressed(num_bits=8, type="int", strategy="channel", symmetric=True)
    stored, expected = write(NAME, noise(32, 64))
    with open_model(save_folder(tmp_path / "a", stored, {"quantization_config": entry})) as checkpoint:
        assert checkpoint.folder.notes == ()
    entry["config_groups"]["group_0"]["weights"]["twist"] = 0.5
    entry["curl"] = [1]
    entry["later"] = None
    with open_model(save_folder(tmp_path / "b", stored, {"quantization_config": entry})) as checkpoint:
        (note,) = checkpoint.folder.notes
        assert note.text.endswith("has unknown fields, which are ignored: config_groups.group_0.weights.twist, curl")
        same_everywhere(checkpoint.tensors, NAME, expected)
