"""One recipe over adapters, written as an adapter and as a model: the same merge."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.adapters.test_adapter_to_adapter import deltas_of
from tests.helpers.adapters import save_adapter, tiny
from torch import Tensor

import actmat
from actmat.planning import regions

GPT2: dict[str, Any] = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
"""Conv1D: stored as `I O`; `c_attn` packs three maps."""
STACKS: dict[str, Any] = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": ["q_proj", "down_proj", "embed_tokens"]},
    "gpt2": GPT2,
    "mixtral": STACKS,
}
EVERY_RANK = 999
"""More than any module has, so that nothing is cut off."""
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("dare", {}),
    ("dare", {"rescale": "l1"}),
    ("della", {}),
    ("knots", {"rule": "dare"}),
    ("ties", {"trim": "global"}),
    ("breadcrumbs", {}),
    ("actmat", {}),
]


FACTORED: list[tuple[str, dict[str, Any]]] = [
    ("actmat", {"normalize": "norm", "power": 0.5}),
    ("actmat_ridge", {}),
    ("actmat", {"center": True}),
    ("cart", {}),
    ("dc_merge", {}),
    ("wudi", {}),
    ("swudi", {}),
    ("tsv", {}),
    ("iso_c", {}),
    ("iso_cts", {}),
    ("knots", {}),
    ("task_arithmetic", {"scaling": 0.7}),
    ("average", {}),
    ("linear", {}),
]
"""Methods whose adapters are merged by their factors."""
CASES = [
    *itertools.product(METHODS, FAMILIES, (regions.CHUNK, 100)),
    *((rule, "gpt2", regions.CHUNK) for rule in FACTORED),
]


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Per family: a base, stored by the names in memory, and two adapters of different ranks."""
    folder = tmp_path_factory.mktemp("agree")
    for family, options in FAMILIES.items():
        save_base(folder / family / "base", family)
        for n in (1, 2):
            save_adapter(folder / family / f"a{n}", family, n, r=1 + n, **options)
    return folder


def save_base(folder: Path, family: str, values: Mapping[str, Tensor] | None = None) -> None:
    """The tiny model as it is in memory, or with other values: stacks of experts are one tensor."""
    model = tiny(family)
    if values is not None:
        model.load_state_dict(values)
    model.config.save_pretrained(folder)
    tensors = {n: t.contiguous() for n, t in model.state_dict().items()}
    if getattr(model.config, "tie_word_embeddings", False):  # a ViT's does not tell
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def merged(group: Path, out: Path, to: str, **fields: Any) -> dict[str, Tensor]:
    """Deltas of the output to the base, float64; PEFT folds an adapter into it."""
    fields = {"compute_dtype": "float64", "durable": False, "threads": 1, **fields}
    if to == "adapter":
        fields["rank"] = EVERY_RANK
    actmat.merge(group / "base", [group / "a1", group / "a2"], out=out / to, to=to, **fields)
    if to == "adapter":
        return deltas_of(out / to, group.name)
    base, found = (load_file(f / "model.safetensors") for f in (group / "base", out / to))
    return {n: found[n] - base[n] for n in base}


def differences(group: Path, out: Path, **fields: Any) -> dict[str, float]:
    """Relative difference of the two outputs, for every tensor that the merge changes."""
    model, adapter = (merged(group, out, to, **fields) for to in ("model", "adapter"))
    norms = {n: float(model[n].norm()) for n in model}
    assert not any(bool(adapter[n].any()) for n, norm in norms.items() if not norm)
    return {n: float((model[n] - adapter[n]).norm()) / norm for n, norm in norms.items() if norm}


@pytest.mark.parametrize(("rule", "family", "chunk"), CASES, ids=str)
def test_an_adapter_and_a_model_are_one_merge(
    rule: tuple[str, dict[str, Any]], family: str, chunk: int, groups: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(regions, "CHUNK", chunk)
    found = differences(groups / family, tmp_path, method=rule[0], options=rule[1], scope="all")
    assert len(found) >= 4
    assert max(found.values()) <= 1e-9, found
