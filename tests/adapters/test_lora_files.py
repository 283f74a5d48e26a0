"""LoRA files without a config (kohya, diffusers): read as adapters with their own scale, written in every layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.adapters import LLAMA, save_adapter, tiny
from tests.helpers.checkpoint_files import save_folder
from tests.helpers.located import is_adapter, open_adapter
from tests.helpers.lora_files import (
    TEXT,
    UNET,
    added,
    fused_by_diffusers,
    random_factors,
    save_diffusers,
    save_kohya,
    tiny_text,
    tiny_unet,
    weights_of,
    written,
)
from torch import Tensor

import actmat
from actmat.errors import MergeError
from actmat.experts.lora.names import first_factor
from actmat.extras.diffusion.architectures import ARCHITECTURES, text_names
from actmat.extras.diffusion.names import find_flat_names, foreign_factor, parse_factor
from actmat.report.verify import verify

EXACT = {"rtol": 1e-12, "atol": 1e-12}
RUN: dict[str, Any] = {"durable": False, "threads": 1, "compute_dtype": "float64"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A UNet and a text encoder as bases, and one adapter in kohya's layout with alpha 1."""
    folder = tmp_path_factory.mktemp("lora_files")
    for name, model in (("unet", tiny_unet()), ("text", tiny_text())):
        save_folder(folder / name, weights_of(model), {"architectures": [type(model).__name__]})
    for seed in (1, 2):
        unet, text = (random_factors(m, n, seed, alpha=1.0) for m, n in ((tiny_unet(), UNET), (tiny_text(), TEXT)))
        save_kohya(folder / f"kohya{seed}.safetensors", unet, text)
        plain = (random_factors(m, n, seed) for m, n in ((tiny_unet(), UNET), (tiny_text(), TEXT)))
        save_diffusers(folder / f"diffusers{seed}", *plain)
    return folder


def merged(place: Path, out: Path, *experts: str, base: str | None = "unet", **fields: Any) -> dict[str, Tensor]:
    given = [place / e for e in experts]
    fields = {"method": "task_arithmetic", "options": {"scaling": 1.0}, "scope": "all"} | fields
    actmat.merge(None if base is None else place / base, given, out=out, **RUN, **fields)
    return written(out)


def test_a_kohya_file_is_scaled_by_alpha_over_rank(place: Path, tmp_path: Path) -> None:
    found = merged(place, tmp_path / "out", "kohya1.safetensors")
    expected = added(weights_of(tiny_unet()), random_factors(tiny_unet(), UNET, 1, alpha=1.0))
    by_diffusers = fused_by_diffusers(place / "kohya1.safetensors", tiny_unet())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **EXACT)
        torch.testing.assert_close(by_diffusers[name], tensor, rtol=1e-6, atol=1e-6)


def test_the_other_component_is_left_out_and_named(place: Path, tmp_path: Path) -> None:
    plan = actmat.plan(place / "unet", [place / "kohya1.safetensors"])
    assert any("the base is not a text_encoder: the adapter's 2 modules" in n for n in map(str, plan.notes))
    found = merged(place, tmp_path / "out", "kohya1.safetensors", base="text")
    expected = added(weights_of(tiny_text()), random_factors(tiny_text(), TEXT, 1, alpha=1.0))
    torch.testing.assert_close({n: found[n] for n in expected}, expected, **EXACT)


def test_no_component_is_left_out_of_a_file_without_a_config_unless_it_is_said(place: Path, tmp_path: Path) -> None:
    base = place / "unet" / "model.safetensors"
    with pytest.raises(
        MergeError, match=r"2 of its modules have no tensor .*--drop 'lora_te_text_model_.*\*'"
    ) as error:
        actmat.plan(base, [place / "kohya1.safetensors"])
    flag = str(error.value).rpartition("--drop '")[2].partition("'")[0]
    found = merged(place, tmp_path / "out", "kohya1.safetensors", base=base.relative_to(place).as_posix(), drop=(flag,))
    expected = added(weights_of(tiny_unet()), random_factors(tiny_unet(), UNET, 1, alpha=1.0))
    torch.testing.assert_close({n: found[n] for n in expected}, expected, **EXACT)
    with pytest.raises(MergeError, match=r"'unknown\.\*' matches no tensor of the experts, such as 'lora_"):
        actmat.plan(base, [place / "kohya1.safetensors"], drop=("unknown.*",))
    with pytest.raises(MergeError, match=r"expert 'kohya1\.safetensors' changes nothing"):
        actmat.plan(base, [place / "kohya1.safetensors"], drop=(flag,), keep=("*",))


@pytest.mark.parametrize("with_metadata", [False, True])
def test_a_diffusers_folder_is_scaled_as_diffusers_does(with_metadata: bool, tmp_path: Path, place: Path) -> None:
    factors = random_factors(tiny_unet(), UNET[1:2], 3)
    options = {"unet_lora_adapter_metadata": {"r": 3, "lora_alpha": 6, "rank_pattern": {"to_q": 2}}}
    folder = save_diffusers(tmp_path / "lora", factors, {}, **(options if with_metadata else {}))
    found = merged(place, tmp_path / "out", str(folder))
    expected = added(weights_of(tiny_unet()), factors, 3.0 if with_metadata else 1.0)
    torch.testing.assert_close({n: found[n] for n in expected}, expected, **EXACT)
    if not with_metadata:
        for name, tensor in fused_by_diffusers(folder, tiny_unet()).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
@pytest.mark.parametrize(
    "experts", [("kohya1.safetensors", "kohya2.safetensors"), ("diffusers1", "kohya2.safetensors")]
)
def test_what_is_written_is_the_sum_of_the_deltas(
    layout: str, experts: tuple[str, str], place: Path, tmp_path: Path
) -> None:
    """Both layouts hold the same deltas, which diffusers loads and fuses; the merge of the output is that of both."""
    out = tmp_path / layout
    merged(place, out, *experts, base=None, to=layout)
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md", "actmat_manifest.json", "pytorch_lora_weights.safetensors"
    ]  # fmt: skip
    assert is_adapter(out)
    with open_adapter(out) as adapter:
        assert adapter.layout == layout
        assert not adapter.problems
        assert {m.scaling for m in adapter.modules.values()} == {1.0}
        assert adapter.parts == {"unet": len(UNET), "text_encoder": len(TEXT)}
    expected = weights_of(tiny_unet())
    for expert, seed in zip(experts, (1, 2), strict=True):
        alpha = 1.0 if expert.startswith("kohya") else None
        expected = added(expected, random_factors(tiny_unet(), UNET, seed, alpha=alpha))
    for name, tensor in fused_by_diffusers(out, tiny_unet()).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6, msg=name)
    assert verify(out).ok


def test_without_a_layout_that_of_the_experts_is_kept(place: Path, tmp_path: Path) -> None:
    found = merged(place, tmp_path / "out", "kohya1.safetensors", "kohya2.safetensors", base=None)
    assert "lora_unet_mid_block_resnets_0_conv1.alpha" in found
    flat = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
    assert found[f"{flat}.alpha"] == found[f"{flat}.lora_down.weight"].shape[0]


def test_one_component_is_written_for_peft(place: Path, tmp_path: Path) -> None:
    save_diffusers(tmp_path / "lora", random_factors(tiny_unet(), UNET[1:4], 4), {})
    merged(place, tmp_path / "out", str(tmp_path / "lora"), base=None, to="peft", rank=4)
    from peft import PeftModel

    model = PeftModel.from_pretrained(tiny_unet(), tmp_path / "out").merge_and_unload()
    expected = added(weights_of(tiny_unet()), random_factors(tiny_unet(), UNET[1:4], 4))
    for name, tensor in weights_of(model).items():
        torch.testing.assert_close(tensor, expected[name], **EXACT)


@pytest.mark.parametrize(
    ("experts", "to", "words"),
    [
        (("kohya1.safetensors",), "peft", "it has modules of several models (text_encoder, unet)"),
        (("peft",), "kohya", "does not name the pipeline component"),
        (("sgm.safetensors",), "diffusers", "they are not all of one supported architecture"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(
    experts: tuple[str, ...], to: str, words: str, place: Path, tmp_path: Path
) -> None:
    save_adapter(tmp_path / "peft", "llama", 1, **LLAMA)
    a, b = torch.ones(1, 4), torch.ones(4, 1)
    name = "lora_unet_input_blocks_4_1_proj_inside"
    save_file({f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b}, tmp_path / "sgm.safetensors")
    given = [str((place if (place / e).exists() else tmp_path) / e) for e in experts]
    with pytest.raises(MergeError) as error:
        merged(place, tmp_path / "out", *given, base=None, to=to)
    assert words in str(error.value)


FILE = {"m.lora_down.weight": torch.ones(2, 4), "m.lora_up.weight": torch.ones(3, 2), "m.alpha": torch.tensor(4.0)}
DAMAGE: list[tuple[dict[str, Tensor | None], str]] = [
    ({"m.lora_up.weight": None}, "has no factor B"),
    ({"m.lora_up.weight": torch.ones(3, 5)}, "its factors are 2 x 4 and 3 x 5"),
    ({"m.alpha": torch.ones(2)}, "has 2 entries; expected one number"),
    ({"m.alpha": torch.tensor(float("nan"))}, "is nan; expected a finite number"),
    ({"m.lora_up.weight": torch.ones(3, 2, dtype=torch.int8)}, "is int8; a quantized adapter"),
    ({"n.lora_A.weight": torch.ones(1, 4), "n.lora_B.weight": torch.ones(4, 1)}, "1 modules have no alpha"),
    ({"m.hada_w1_a": torch.ones(2, 2)}, "is of LoHa (LyCORIS)"),
    ({"m.lokr_w1": torch.ones(2, 2)}, "is of LoKr (LyCORIS)"),
    ({"m.dora_scale": torch.ones(3, 1)}, "is of DoRA"),
    ({"m.lora_mid.weight": torch.ones(2, 2)}, "with a third factor"),
    ({"model.norm.weight": torch.ones(2)}, "saved with its adapter unmerged"),
    ({"bundle_emb.ink.string_to_param.*": torch.ones(2, 4)}, "leave it out (--drop 'bundle_emb.*')"),
]


@pytest.mark.parametrize(("change", "words"), DAMAGE, ids=[w for _, w in DAMAGE])
def test_damage_of_a_file_is_named(change: dict[str, Tensor | None], words: str, tmp_path: Path) -> None:
    tensors = {n: t for n, t in {**FILE, **change}.items() if t is not None}
    save_file(tensors, tmp_path / "lora.safetensors")
    assert is_adapter(tmp_path / "lora.safetensors")
    with open_adapter(tmp_path / "lora.safetensors") as adapter:
        assert any(words in p for p in adapter.problems), adapter.problems


def test_a_file_without_what_is_no_factor_is_read(tmp_path: Path) -> None:
    save_file({**FILE, "bundle_emb.ink.string_to_param.*": torch.ones(2, 4)}, tmp_path / "lora.safetensors")
    report = actmat.merge(experts=[tmp_path / "lora.safetensors"], drop="bundle_emb.*", out=tmp_path / "o", **RUN)
    assert [n.text for n in report.plan.notes if "are not merged" in n.text]


def test_factors_are_never_merged_as_plain_tensors(place: Path, tmp_path: Path) -> None:
    """In whatever file they lie: as experts, and as a base."""
    torch.save(load_file(place / "kohya1.safetensors"), tmp_path / "kohya.pt")
    cases = (
        (place / "unet", tmp_path / "kohya.pt", "found factors of an adapter, such as 'lora_"),
        (place / "kohya1.safetensors", place / "unet", "expected a full checkpoint, found a LoRA file adapter"),
    )
    for base, expert, said in cases:
        with pytest.raises(MergeError, match=said):
            actmat.plan(base, [expert])


def test_a_base_that_cannot_tell_modules_apart_is_refused() -> None:
    specs = {n: s for n in ("a.b_c.weight", "a_b.c.weight") if (s := _spec(n))}
    found, problems = find_flat_names(specs, ["a_b_c"])
    assert not found
    assert "is ambiguous: a.b_c.weight, a_b.c.weight" in problems[0]
    twice = {n: _spec(n) for n in ("one.q.weight", "two.q.weight")}
    assert "under each of the prefixes 'one.' and 'two.'" in find_flat_names(twice, ["q"])[1][0]


@pytest.mark.parametrize(
    ("prefix", "parts"),
    [
        ("lora_te1_", ("text_encoder.", "text_encoder_2.")),
        ("lora_te2_", ("text_encoder.", "text_encoder_2.")),
        ("lora_te1_", ("text_encoders.clip_l.transformer.", "text_encoders.clip_g.transformer.")),
        ("lora_te2_", ("text_encoders.clip_l.transformer.", "text_encoders.clip_g.transformer.")),
        ("lora_unet_", ("unet.", "controlnet.")),
    ],
)
def test_the_prefix_tells_components_of_equal_names_apart(prefix: str, parts: tuple[str, str], tmp_path: Path) -> None:
    """Both encoders of SDXL have the names, here the shapes too: shapes and counts do not decide."""
    layer = "text_model.encoder.layers.{}.self_attn.q_proj"
    names = [f"{part}{layer.format(k)}.weight" for part, n in zip(parts, (2, 3), strict=True) for k in range(n)]
    base = {n: torch.randn(4, 4, dtype=torch.float64) for n in names}
    save_file(base, tmp_path / "base.safetensors")
    a, b = torch.randn(2, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    flat = prefix + layer.format(1).replace(".", "_")
    factors = {"lora_down.weight": a, "lora_up.weight": b, "alpha": torch.tensor(1.0, dtype=torch.float64)}
    save_file({f"{flat}.{n}": t for n, t in factors.items()}, tmp_path / "lora.safetensors")
    actmat.merge(
        tmp_path / "base.safetensors", [tmp_path / "lora.safetensors"], out=tmp_path / "out",
        method="task_arithmetic", options={"scaling": 1.0}, scope="all", **RUN,
    )  # fmt: skip
    changed = f"{parts[prefix == 'lora_te2_']}{layer.format(1)}.weight"
    out = written(tmp_path / "out")
    torch.testing.assert_close(out.pop(changed), base.pop(changed) + b @ a / 2, **EXACT)
    assert out.keys() == base.keys()
    assert all(torch.equal(out[n], base[n]) for n in base)


@pytest.mark.parametrize("prefix", ["", "text_encoder.", "text_encoder.text_model."])
def test_text_encoders_of_all_versions_of_transformers(prefix: str) -> None:
    names = [f"{prefix}encoder.layers.0.mlp.fc1.weight", f"{prefix}encoder.layers.1.mlp.fc1.weight"]
    flat = "text_model_encoder_layers_1_mlp_fc1"
    assert find_flat_names({n: _spec(n) for n in names}, [flat], "text_encoder") == ({flat: names[1]}, [])


def _spec(name: str) -> Any:
    from actmat.checkpoints.base import TensorSpec

    return TensorSpec(name, (2, 2), "float32", "")


def test_dots_are_put_back_as_diffusers_does() -> None:
    """Every module of a UNet and of a text encoder, held against diffusers' own conversion of names."""
    from diffusers.loaders.lora_conversion_utils import _convert_text_encoder_lora_key, _convert_unet_lora_key

    names = [
        n.removesuffix(".weight") for n, t in weights_of(tiny_unet()).items() if n.endswith("weight") and t.ndim > 1
    ]
    texts = [n.removesuffix(".weight") for n in weights_of(tiny_text()) if "layers" in n and "norm" not in n]
    texts = [n for n in texts if not n.endswith("bias")]
    dots = {n.replace(".", "_"): n for n in (*ARCHITECTURES[0].paths, *text_names(is_t5=False))}
    for prefix, modules, convert in (
        ("lora_unet_", names, _convert_unet_lora_key),
        ("lora_te_", texts, lambda key: _convert_text_encoder_lora_key(key, key.split(".")[0])),
    ):
        for name in modules:
            flat = name.replace(".", "_")
            assert dots[flat] == name
            found = parse_factor(f"{'unet' if prefix == 'lora_unet_' else 'text_encoder'}."
                                 f"{convert(f'{prefix}{flat}.lora_down.weight')}")  # fmt: skip
            assert found.path == name


def test_names_of_other_tensors_are_no_factors() -> None:
    full = list(tiny("llama").state_dict())
    assert first_factor([*full, "block.alpha"]) is None
    assert first_factor(["down_proj.lora_A.speech.weight"], {"speech_lora": {}}) is None  # of the architecture
    assert not any(map(foreign_factor, full))


def test_the_metadata_of_diffusers_must_be_json(tmp_path: Path) -> None:
    tensors = {n: t for n, t in FILE.items() if n != "m.alpha"}
    for text, words in (("{", "is not a JSON object"), (json.dumps({"use_dora": True, "r": 2}), "use_dora is set")):
        save_file(tensors, tmp_path / "lora.safetensors", {"lora_adapter_metadata": text})
        with open_adapter(tmp_path / "lora.safetensors") as adapter:
            assert any(words in p for p in adapter.problems), adapter.problems
