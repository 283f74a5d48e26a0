"""Mixtures of adapters by name: read, refused, merged exactly; and vLLM's plug-in interface, by a stand-in of it."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tolerances import F32_ELEMENTWISE

from actmat.errors import MergeError
from actmat_vllm import Mixtures, parse_mixture

BASE = "org/base"
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


def save_lora(folder: Path, rank: int = 4, seed: int = 0, **config: Any) -> torch.Tensor:
    """An adapter of one module; its delta."""
    rng = torch.Generator().manual_seed(seed)
    a, b = torch.randn((rank, 16), generator=rng), torch.randn((16, rank), generator=rng)
    folder.mkdir(parents=True)
    save_file({f"{MODULE}.lora_A.weight": a, f"{MODULE}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none",
              "base_model_name_or_path": BASE, "task_type": "CAUSAL_LM"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return 8 / rank * (b.double() @ a.double())


def delta_of(folder: Path) -> torch.Tensor:
    config = json.loads((folder / "adapter_config.json").read_text())
    stored = load_file(folder / "adapter_model.safetensors")
    a, b = (stored[f"{MODULE}.lora_{x}.weight"].double() for x in "AB")
    return config["lora_alpha"] / config["r"] * (b @ a)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("math", (("math", 1.0),)),
        ("math*0.7+code*0.3", (("math", 0.7), ("code", 0.3))),
        ("a.b-c_d*-1e-2+x", (("a.b-c_d", -0.01), ("x", 1.0))),
        *((text, None) for text in ("", "+", "a+", "a++b", "../a", "/a", "a/b", "a*", "a*nan", "a*1*2")),
        *((text, None) for text in (".a", "a b", "a;b")),
        ("+".join(["a"] * 33), None),
    ],
)
def test_names_are_mixtures(text: str, parts: tuple[tuple[str, float], ...] | None) -> None:
    found = parse_mixture(text)
    assert (None if found is None else found.parts) == parts


def test_a_mixture_is_exact_and_kept_by_its_hash(tmp_path: Path) -> None:
    math, code = save_lora(tmp_path / "math", 4, 1), save_lora(tmp_path / "code", 2, 2)
    mixtures = Mixtures(tmp_path, tmp_path / "cache", 8)
    assert mixtures.find(BASE, "math") == tmp_path / "math"
    folder = mixtures.find(BASE, "math*0.7+code*-0.3")
    assert folder is not None
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config.get("rank_pattern") or {}, config["base_model_name_or_path"]) == (6, {}, BASE)
    expected = 0.7 * math - 0.3 * code
    assert float((delta_of(folder) - expected).norm() / expected.norm()) < F32_ELEMENTWISE  # factors are float32
    before = (folder / "adapter_model.safetensors").stat().st_mtime_ns
    assert mixtures.find(BASE, "math*0.7+code*-0.3") == folder
    assert (folder / "adapter_model.safetensors").stat().st_mtime_ns == before
    assert mixtures.find(BASE, "math*0.7+code*-0.2") != folder
    (tmp_path / "code" / "adapter_config.json").write_text(
        (tmp_path / "code" / "adapter_config.json").read_text().replace('"lora_alpha": 8', '"lora_alpha": 16')
    )
    assert mixtures.find(BASE, "math*0.7+code*-0.3") != folder
    half = mixtures.find(BASE, "math*0.5")
    assert half is not None
    assert float((delta_of(half) - 0.5 * math).norm() / math.norm()) < F32_ELEMENTWISE


def test_what_a_server_cannot_take_is_refused_with_the_reason(tmp_path: Path) -> None:
    save_lora(tmp_path / "math", 16)
    save_lora(tmp_path / "code", 16)
    save_lora(tmp_path / "other", 4, base_model_name_or_path="org/other")
    save_lora(tmp_path / "dora", 4, use_dora=True)
    mixtures = Mixtures(tmp_path, tmp_path / "cache", 16)
    assert mixtures.find(BASE, "unknown") is None
    assert mixtures.find(BASE, "math+unknown") is None
    assert mixtures.find(BASE, "../math") is None
    for name, words in (
        ("math+code", "rank 16 \\+ 16 = 32, above the largest of this server, 16"),
        ("other", "was trained on org/other"),
        ("dora*0.5", "found use_dora"),
    ):
        with pytest.raises(MergeError, match=words):
            mixtures.find(BASE, name)
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the plug-in uses of vLLM, as its source has it: a resolver's base class, a registry, a request."""

    class LoRAResolver(ABC):
        @abstractmethod
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any: ...

    class Registry:
        resolvers: ClassVar[dict[str, LoRAResolver]] = {}

        def register_resolver(self, name: str, resolver: LoRAResolver) -> None:
            self.resolvers[name] = resolver

    @dataclass
    class LoRARequest:
        lora_name: str
        lora_int_id: int
        lora_path: str

        def __post_init__(self) -> None:
            if self.lora_int_id < 1:
                raise ValueError(f"id must be > 0, got {self.lora_int_id}")

    names = ("vllm", "vllm.lora", "vllm.lora.request", "vllm.lora.resolver")
    found = {name: types.ModuleType(name) for name in names}
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    vars(found["vllm.lora.request"])["LoRARequest"] = LoRARequest
    vars(found["vllm.lora.resolver"]).update(LoRAResolver=LoRAResolver, LoRAResolverRegistry=Registry())
    monkeypatch.delitem(sys.modules, "actmat_vllm.resolver", raising=False)
    yield Registry
    sys.modules.pop("actmat_vllm.resolver", None)


def test_vllm_asks_for_a_mixture_and_gets_it(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_lora(tmp_path / "math", 4, 1)
    save_lora(tmp_path / "code", 2, 2)
    monkeypatch.setenv("ACTMAT_VLLM_ADAPTERS", str(tmp_path))
    monkeypatch.setenv("ACTMAT_VLLM_MAX_RANK", "6")
    plugin = importlib.import_module("actmat_vllm.resolver")
    plugin.register()
    resolver = vllm.resolvers["actmat mixtures"]

    def ask(name: str) -> Any:
        return asyncio.run(resolver.resolve_lora(BASE, name))

    one, other = ask("math*0.7+code*0.3"), ask("code")
    assert one.lora_name == "math*0.7+code*0.3"
    assert Path(one.lora_path).parent == tmp_path / ".mixtures"
    assert (Path(one.lora_path) / "adapter_config.json").is_file()
    assert other.lora_path == str(tmp_path / "code")
    assert 0 < one.lora_int_id != other.lora_int_id > 0
    for name in ("my-adapter", "no-adapter"):  # vLLM takes equal numbers for one adapter
        save_lora(tmp_path / name)
    assert ask("my-adapter").lora_int_id != ask("no-adapter").lora_int_id
    assert ask("nobody") is None
    assert ask("math+math") is None
    assert "above the largest of this server" in caplog.text


def test_the_plug_in_says_what_is_wrong_with_its_settings(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = importlib.import_module("actmat_vllm.resolver")
    vllm.resolvers.clear()
    monkeypatch.delenv("ACTMAT_VLLM_ADAPTERS", raising=False)
    plugin.register()
    assert not vllm.resolvers
    monkeypatch.setenv("ACTMAT_VLLM_ADAPTERS", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="which is no directory"):
        plugin.register()
    monkeypatch.setenv("ACTMAT_VLLM_ADAPTERS", str(tmp_path))
    monkeypatch.setenv("ACTMAT_VLLM_MAX_RANK", "many")
    with pytest.raises(ValueError, match="a whole number above 0, found 'many'"):
        plugin.register()
