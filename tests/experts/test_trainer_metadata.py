"""Metadata of kohya's trainers, LyCORIS and diffusers in files without a config: nothing of it is read in silence."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoint_files import save_folder
from tests.helpers.lora_files import (
    UNET,
    fused_by_diffusers,
    random_factors,
    save_diffusers,
    save_kohya,
    tiny_unet,
    weights_of,
)

import actmat
from actmat.errors import MergeError
from actmat.extras.diffusion.lycoris import TENSORS
from actmat.extras.diffusion.metadata import ALGORITHMS, SETTINGS

LYCORIS_TENSORS = {
    *("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2", "alpha", "dora_scale", "lokr_w1"),
    *("lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t1", "lokr_t2", "lora_up", "lora_down"),
    *("lora_mid", "weight", "on_input", "w_norm", "b_norm", "a1", "a2", "b1", "b2", "bm", "diff", "diff_b"),
    *("oft_blocks", "rescale", "q_layer", "p_layer", "lambda_layer"),
}
"""`weight_list` of every module of LyCORIS 4.1.3, without `.weight`."""
LYCORIS_ARGUMENTS = {
    *("conv_dim", "conv_alpha", "dropout", "rank_dropout", "module_dropout", "algo", "disable_conv_cp", "use_conv_cp"),
    *("use_cp", "use_tucker", "use_scalar", "block_size", "train_norm", "constraint", "rescaled", "dora_wd", "preset"),
    *("wd_on_output", "full_matrix", "bypass_mode", "rs_lora", "unbalanced_factorization", "train_t5xxl", "factor"),
    *("train_llm_adapter", "loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio"),
    *("decompose_both", "constrain"),
}
"""Arguments of `lycoris.kohya.create_network` of LyCORIS 4.1.3, its deprecated ones included."""
ALGORITHM_NAMES = {"lora", "locon", "loha", "lokr", "dylora", "glora", "full", "diag-oft", "boft", "ia3", "tlora"}


def test_every_tensor_and_argument_of_lycoris_is_in_a_list() -> None:
    assert TENSORS.known >= LYCORIS_TENSORS
    assert SETTINGS.known >= LYCORIS_ARGUMENTS
    assert ALGORITHMS.known == ALGORITHM_NAMES


def test_the_lists_hold_against_the_library() -> None:
    wrapper = pytest.importorskip("lycoris.wrapper")
    modules = {*wrapper.network_module_dict.values()}
    stored = {n.removesuffix(".weight") for m in modules for n in m.weight_list}
    assert not stored - TENSORS.known
    assert not wrapper.network_module_dict.keys() - ALGORITHMS.known


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("metadata")
    save_folder(folder / "unet", weights_of(tiny_unet()))
    return folder


def kohya(folder: Path) -> dict[str, torch.Tensor]:
    model = tiny_unet()
    return load_file(save_kohya(folder / "plain.safetensors", random_factors(model, UNET, 1), {}))


def loha(folder: Path) -> dict[str, torch.Tensor]:
    o, i = weights_of(tiny_unet())[f"{UNET[1]}.weight"].shape
    stem = f"lora_unet_{UNET[1].replace('.', '_')}"
    shapes = {"hada_w1_a": (o, 2), "hada_w1_b": (2, i), "hada_w2_a": (o, 2), "hada_w2_b": (2, i)}
    return {f"{stem}.{n}": torch.ones(s, dtype=torch.float64) for n, s in shapes.items()}


@pytest.mark.parametrize("make", [kohya, loha])
@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"ss_network_args": json.dumps({"conv_dim": "4", "rank_dropout": "0.1", "rs_lora": "True"})}, ""),
        ({"ss_network_module": "networks.lora_flux", "ss_network_args": "null"}, ""),
        ({"ss_network_args": json.dumps({"curl": "0.5", "later": "False"})}, "ignored: curl"),
        ({"ss_network_args": json.dumps({"algo": "Twist"})}, "ignored: algo=twist"),
        ({"ss_network_module": "networks.twist"}, "an unknown trainer module: 'networks.twist'"),
        ({"ss_network_args": "{"}, "ss_network_args is not a JSON object"),
    ],
)
def test_a_setting_of_a_trainer_that_is_not_known_is_noted(
    make: Callable[[Path], dict[str, torch.Tensor]], metadata: dict[str, str], words: str, place: Path, tmp_path: Path
) -> None:
    save_file(make(tmp_path), tmp_path / "lora.safetensors", metadata)
    notes = [
        *map(str, actmat.plan(place / "unet", [tmp_path / "lora.safetensors"], method="average", scope="all").notes)
    ]
    found = [n for n in notes if "unknown fields" in n or "unknown trainer" in n or "JSON object" in n]
    assert [words in n for n in found] == ([True] if words else [])


def test_a_field_of_diffusers_metadata_that_is_not_known_is_noted(place: Path, tmp_path: Path) -> None:
    fields = {"r": 3, "lora_alpha": 6, "rank_pattern": dict.fromkeys(UNET[::2], 2), "curl": 0.5}
    factors = random_factors(tiny_unet(), UNET, 1)
    folder = save_diffusers(tmp_path / "lora", factors, {}, unet_lora_adapter_metadata=fields)
    notes = [*map(str, actmat.plan(place / "unet", [folder], method="average", scope="all").notes)]
    assert sum("metadata of unet has unknown fields, which are ignored: curl" in n for n in notes) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"r": 4, "target_modules": list(UNET)},
            "rank 2, 'lora_adapter_metadata' says 4: diffusers does not load",
        ),
        (
            {"r": 3, "rank_pattern": dict.fromkeys(UNET[::2], 2), "target_modules": ["other"]},
            "target_modules leaves out",
        ),
        ({"r": 3, "rank_pattern": dict.fromkeys(UNET[::2], 2), "exclude_modules": ".*"}, "exclude_modules leaves out"),
    ],
)
def test_a_config_in_metadata_that_does_not_fit_is_refused(
    fields: dict[str, object], words: str, place: Path, tmp_path: Path
) -> None:
    factors = random_factors(tiny_unet(), UNET, 1)
    folder = save_diffusers(tmp_path / "lora", factors, {}, unet_lora_adapter_metadata=fields)
    if "rank_pattern" not in fields:
        with pytest.raises(RuntimeError, match="size mismatch"):
            fused_by_diffusers(folder, tiny_unet())
    with pytest.raises(MergeError, match=words):
        actmat.plan(place / "unet", [folder], method="average", scope="all")


@pytest.mark.parametrize("key", ["modelspec.prediction_type", "ss_base_model_version"])
def test_files_for_other_models_are_warned_of(key: str, place: Path, tmp_path: Path) -> None:
    """What only the metadata of two files tell: the merged file cannot say both."""
    for name, said in (("a", "one"), ("b", "two")):
        save_file(kohya(tmp_path), tmp_path / f"{name}.safetensors", {key: said})
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    report = actmat.merge(None, files, out=tmp_path / "out.safetensors", method="average", durable=False)
    text = f"header metadata differ, and are not written: {key} (one and two)"
    assert any(text in n.text and n.severity == "warning" for n in report.plan.notes)


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("oft_blocks", "of the algorithm 'diag-oft or boft'"),
        ("diff", "of the algorithm 'full'"),
        ("lambda_layer", "of the algorithm 'tlora'"),
        ("curl", "does not belong to LoRA, LoHa"),
    ],
)
def test_a_tensor_of_another_algorithm_is_named(role: str, words: str, place: Path, tmp_path: Path) -> None:
    stem = f"lora_unet_{UNET[0].replace('.', '_')}"
    save_file(loha(tmp_path) | {f"{stem}.{role}": torch.ones(2, 2)}, tmp_path / "lora.safetensors")
    with pytest.raises(MergeError) as error:
        actmat.plan(place / "unet", [tmp_path / "lora.safetensors"], method="average", scope="all")
    assert words in str(error.value)
