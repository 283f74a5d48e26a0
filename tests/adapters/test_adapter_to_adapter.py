"""Adapters merged into an adapter that PEFT loads; test_adapter_outputs_agree.py compares it with the merged model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.adapters.test_adapter_reading import edit_tensors
from tests.helpers.adapters import LLAMA, save_adapter, tiny
from tests.helpers.checkpoint_files import edit_config
from tests.tolerances import relative_error
from torch import Tensor

import actmat
from actmat.errors import MergeError

GPT2 = {"r": 2, "lora_alpha": 5, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}


def merge(folder: Path, experts: list[Any], out: str = "out", **fields: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"method": "actmat", "compute_dtype": "float64", "durable": False, "threads": 1} | fields
    return dict(actmat.merge(None, experts, out=folder / out, **settings).manifest)


def deltas_of(folder: Path, family: str) -> dict[str, Tensor]:
    """What PEFT adds to every parameter when it loads the adapter, in float64."""
    base = tiny(family)
    before = {k: v.clone() for k, v in base.state_dict().items()}
    merged = PeftModel.from_pretrained(base, folder).merge_and_unload().state_dict()
    return {k: merged[k] - before[k] for k in before}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters of the tiny GPT-2 with different ranks and modules."""
    folder = tmp_path_factory.mktemp("gpt2")
    save_adapter(folder / "one", "gpt2", 1, **GPT2)
    save_adapter(folder / "two", "gpt2", 2, **{**GPT2, "r": 3, "target_modules": ["c_attn", "c_proj"]})
    return folder


def test_plans_say_what_users_of_a_method_should_know(pair: Path) -> None:
    for method, is_said in (("dc_merge", True), ("tsv", False)):
        notes = map(str, actmat.plan(None, [pair / "one"], method=method).notes)
        assert any(n.startswith(f"{method}: ") for n in notes) == is_said


def test_missing_modules_are_zero_deltas_and_are_listed(pair: Path) -> None:
    plan = actmat.plan(None, [pair / "one", pair / "two"])
    assert plan.output == "adapter"
    notes = "\n".join(map(str, plan.notes))
    assert "expert 'one' does not change 4 modules" in notes
    ranks = {m.name.rpartition(".")[2]: m.module.ranks for m in plan.modules}
    assert ranks == {"c_attn": (2, 3), "c_fc": (2, 0), "c_proj": (0, 3)}


def test_ranks_are_uniform_or_listed(pair: Path, tmp_path: Path) -> None:
    found = []
    for ranks in ("uniform", "pattern"):
        merge(tmp_path, [pair / "one", pair / "two"], ranks, ranks=ranks)
        config = json.loads((tmp_path / ranks / "adapter_config.json").read_text())
        assert bool(config["rank_pattern"]) == (ranks == "pattern")
        found.append(deltas_of(tmp_path / ranks, "gpt2"))
    for name, want in found[0].items():
        torch.testing.assert_close(found[1][name], want, rtol=1e-9, atol=1e-11)


def test_a_smaller_rank_is_the_best_of_its_rank_and_its_error_is_told(pair: Path, tmp_path: Path) -> None:
    manifest = merge(tmp_path, [pair / "one", pair / "two"], method="task_arithmetic", rank=2)
    given = [deltas_of(pair / n, "gpt2") for n in ("one", "two")]
    found = deltas_of(tmp_path / "out", "gpt2")
    name = "transformer.h.0.attn.c_attn.weight"
    full = 0.4 * (given[0][name] + given[1][name])
    u, s, vh = torch.linalg.svd(full, full_matrices=False)
    torch.testing.assert_close(found[name], u[:, :2] @ torch.diag(s[:2]) @ vh[:2], rtol=1e-9, atol=1e-11)
    row = next(m for m in manifest["modules"] if m["name"] + ".weight" == name)
    assert row["stats"]["relative_error"] == pytest.approx(float(s[2:].norm() / s.norm()))
    assert 0 < manifest["output"]["relative_error"] < 1


def test_weights_and_scale(pair: Path, tmp_path: Path) -> None:
    experts = [{"path": str(pair / "one"), "weight": 2.0}, {"path": str(pair / "two"), "weight": -1.0}]
    merge(tmp_path, experts, method="task_arithmetic", options={"scaling": 1.0}, scale=0.5)
    one, two = (deltas_of(pair / n, "gpt2") for n in ("one", "two"))
    found = deltas_of(tmp_path / "out", "gpt2")
    for name, delta in found.items():
        torch.testing.assert_close(delta, one[name] - 0.5 * two[name], rtol=1e-9, atol=1e-11)


def test_a_sum_has_the_experts_own_rows(tmp_path: Path) -> None:
    """Up to a power of two each: nothing is decomposed, and nothing rounded twice."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for seed, folder in enumerate(folders):
        save_adapter(folder, "llama", seed, **LLAMA)
    rows = merge(tmp_path, folders, method="task_arithmetic")["modules"]
    norms = [{n: float(d.norm()) for n, d in deltas_of(folder, "llama").items()} for folder in folders]
    one, two, summed = (load_file(f / "adapter_model.safetensors") for f in (*folders, tmp_path / "out"))
    for name in (n for n in summed if n.endswith("lora_A.weight")):
        experts_rows = torch.cat([one[name], two[name]])
        assert torch.equal(torch.frexp(summed[name]).mantissa, torch.frexp(experts_rows).mantissa)
    for row in rows:
        assert row["stats"]["error_norm"] == 0
        assert row["stats"]["expert_norms"] == pytest.approx([n[row["name"] + ".weight"] for n in norms])


def test_a_sum_in_half_precision_survives_small_scalings(tmp_path: Path) -> None:
    """The weight and `alpha / r` would make `B` subnormal; a share of the size of `A` keeps its digits."""
    for seed in (1, 2):
        save_adapter(tmp_path / f"e{seed}", "gpt2", seed, **{**GPT2, "lora_alpha": 2**-12})
    merge(tmp_path, [tmp_path / "e1", tmp_path / "e2"], method="average", dtype="float16")
    one, two, found = (deltas_of(tmp_path / n, "gpt2") for n in ("e1", "e2", "out"))
    for name, delta in found.items():
        assert relative_error(delta, (one[name] + two[name]) / 2) < 2**-10


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("ties", {}, "on dense deltas"),
        ("dare", {}, "on dense deltas"),
        ("actmat", {"trim": 0.5}, "'trim' is not available for low-rank deltas"),
    ],
)
def test_what_has_no_low_rank_form_runs_densely_and_says_so(
    method: str, options: dict[str, float], said: str, pair: Path, tmp_path: Path
) -> None:
    plan = actmat.plan(None, [pair / "one", pair / "two"], method=method, options=options)
    assert plan.output == "adapter"
    assert all(said in m.reason for m in plan.modules)
    manifest = merge(tmp_path, [pair / "one", pair / "two"], method=method, options=options, rank=16)
    assert manifest["output"]["relative_error"] <= 1e-12  # rank 16 is all there is
    assert any(bool(d.any()) for d in deltas_of(tmp_path / "out", "gpt2").values())


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "embedding": ("gpt2", {"r": 2, "target_modules": ["wpe"]}),
    "convolutions": ("vision", {"r": 2, "target_modules": ["line", "plane", "point", "head"]}),
    "parameters": ("mixtral", {"r": 2, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "lora_bias": ("gpt2", {"r": 2, "target_modules": ["c_fc"], "fan_in_fan_out": True, "lora_bias": True}),
    "rslora": ("llama", {**LLAMA, "use_rslora": True, "rank_pattern": {"v_proj": 4}, "alpha_pattern": {"v_proj": 1}}),
    "modules_to_save": ("vit", {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["classifier"]}),
    "bias": ("gpt2", {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_module_survives_the_round_trip(kind: str, tmp_path: Path) -> None:
    family, options = KINDS[kind]
    for seed in (1, 2):
        save_adapter(tmp_path / f"e{seed}", family, seed, **options)
    merge(tmp_path, [tmp_path / "e1", tmp_path / "e2"], method="average")
    one, two, found = (deltas_of(tmp_path / n, family) for n in ("e1", "e2", "out"))
    assert any(bool(d.any()) for d in found.values())
    for name, delta in found.items():
        torch.testing.assert_close(delta, (one[name] + two[name]) / 2, rtol=1e-9, atol=1e-11, msg=name)


def test_all_bad_inputs_in_one_message(tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", "llama", 1, **LLAMA)
    save_adapter(tmp_path / "b", "llama", 2, **LLAMA)
    edit_config(tmp_path / "a", base_model_name_or_path="org/one")
    edit_config(tmp_path / "b", base_model_name_or_path="org/other")
    edit_tensors(tmp_path / "b", lambda t: t.pop(next(n for n in t if "lora_A" in n)))
    with pytest.raises(MergeError) as error:
        merge(tmp_path, [tmp_path / "a", tmp_path / "b"], method="slerp")
    text = str(error.value)
    for word in ("different bases", "half of a pair", "reads the base"):
        assert word in text, text
    assert not (tmp_path / "out").exists()


def test_other_bases_can_be_forced(tmp_path: Path) -> None:
    for n in "ab":
        save_adapter(tmp_path / n, "llama", ord(n), **LLAMA)
        edit_config(tmp_path / n, base_model_name_or_path=f"org/{n}")
    assert merge(tmp_path, [tmp_path / "a", tmp_path / "b"], any_base=True)["modules"]


def test_nan_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    for n in "ab":
        save_adapter(tmp_path / n, "llama", ord(n), **LLAMA)
    edit_tensors(tmp_path / "b", lambda t: [v.view(-1)[:2].fill_(float("nan")) for v in list(t.values())[:2]])
    with pytest.raises(MergeError, match=r"2 problem\(s\)"):
        merge(tmp_path, [tmp_path / "a", tmp_path / "b"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
