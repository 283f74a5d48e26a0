"""Adapters of the hub, against a stand-in: what a plan transfers of them, and what the records say of their files."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.hub import HubStandIn, hub_stand_in

import actmat

ADAPTERS = ["org/adapter0", "org/adapter1"]
FIELDS = {"method": "average", "output": {"kind": "adapter"}}

WIDE = 300_000
"""Columns, so that the weights are larger than what is read for a header."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStandIn]:
    monkeypatch.chdir(tmp_path)
    with hub_stand_in(monkeypatch, tmp_path / "cache") as stand_in:
        publish(stand_in, tmp_path)
        yield stand_in


def publish(hub: HubStandIn, folder: Path) -> None:
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q"]}
    for n, name in enumerate(ADAPTERS):
        (place := folder / "remote" / name).mkdir(parents=True)
        factors = {"lora_A": torch.full((1, WIDE), 1.0 + n), "lora_B": torch.tensor([[1.0], [2.0 + n]])}
        named = {f"base_model.model.q.{k}.weight": v for k, v in factors.items()}
        save_file(named, place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text(json.dumps(config))
        hub.add(name, place)


def test_a_plan_of_adapters_transfers_their_headers_only(hub: HubStandIn, tmp_path: Path) -> None:
    whole = (tmp_path / "remote" / ADAPTERS[0] / "adapter_model.safetensors").stat().st_size
    actmat.plan(None, ADAPTERS, **FIELDS)
    assert 0 < hub.bytes_of("adapter_model.safetensors") < whole


def test_the_manifest_names_files_of_the_hub_by_repository(hub: HubStandIn, tmp_path: Path) -> None:
    actmat.merge(None, ADAPTERS, out=tmp_path / "out", **FIELDS)
    text = (tmp_path / "out" / "actmat_manifest.json").read_text()
    assert str(tmp_path / "cache") not in text
    files = [e["files"][0]["path"] for e in json.loads(text)["experts"]]
    assert files == [f"{name}/adapter_model.safetensors" for name in ADAPTERS]
    assert hub.bytes_of("adapter_model.safetensors") > 8 * WIDE
    actmat.verify(tmp_path / "out", inputs=True)


@pytest.mark.parametrize(
    ("named", "is_said"), [("org/base", False), ("/data/base/", False), ("org/other", True), ("", False)]
)
def test_an_adapter_that_names_another_base_is_told(hub: HubStandIn, tmp_path: Path, named: str, is_said: bool) -> None:
    (base := tmp_path / "remote" / "base").mkdir()
    save_file({"q.weight": torch.ones(3, 4)}, base / "model.safetensors")
    (base / "config.json").write_text('{"model_type": "llama"}')
    hub.add("org/base", base)
    (adapter := tmp_path / "adapter").mkdir()
    factors = {"lora_A": torch.ones(1, 4), "lora_B": torch.ones(3, 1)}
    save_file({f"base_model.model.q.{k}.weight": v for k, v in factors.items()}, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q"], "base_model_name_or_path": named}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    notes = " ".join(map(str, actmat.plan("org/base", [adapter], method="average", output={"kind": "model"}).notes))
    said = "adapters name another base (adapter: org/other): unless it is a copy of org/base, the merge is wrong"
    assert (said in notes) == ("another base" in notes) == is_said
