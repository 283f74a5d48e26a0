"""Adapters extracted from fine-tuned models: errors against full decompositions, and PEFT's own reload."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from tests.helpers.adapters import save_peft, tiny
from tests.helpers.merging import actmat as run
from torch import Tensor

import actmat
from actmat.engine import sinks
from actmat.errors import MergeError
from actmat.report.verify import verify

FAMILIES = ("llama", "gpt2", "vit", "mixtral")
Q = "model.layers.0.self_attn.q_proj.weight"


def save(family: str, folder: Path, change: Any = None) -> dict[str, Tensor]:
    """A tiny model as transformers stores it, its parameters changed by `change(name, tensor)`; the state in memory."""
    model = tiny(family)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if change is not None:
                tensor.add_(change(name, tensor))
    model.save_pretrained(folder)
    return {n: t.clone() for n, t in model.state_dict().items()}


def noise(seed: int, *, of: Any = lambda name: True) -> Any:
    rng = torch.Generator().manual_seed(seed)

    def change(name: str, tensor: Tensor) -> Tensor:
        found = 0.1 * torch.randn(tensor.shape, generator=rng, dtype=torch.float64)
        return found if of(name) else torch.zeros_like(found)

    return change


def reloaded(family: str, folder: Path) -> dict[str, Tensor]:
    return dict(PeftModel.from_pretrained(tiny(family), folder).merge_and_unload().state_dict())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bases and models of which everything was trained."""
    folder = tmp_path_factory.mktemp("extract")
    for family in FAMILIES:
        save(family, folder / family / "base")
        torch.save(save(family, folder / family / "model", noise(1)), folder / family / "state.pt")
    return folder


def rows_of(report: actmat.MergeReport) -> dict[str, Any]:
    """Name -> the row of a tensor, with the kind "unchanged" where it is as in the base."""
    rows = {r["name"]: {**r, **r["stats"]} for r in report.manifest["modules"]}
    return {n: {**r, "kind": "unchanged"} if r["unchanged"] or r.get("norm") == 0 else r for n, r in rows.items()}


@pytest.mark.parametrize("family", ["llama", "gpt2", "vit"])
def test_full_rank_gives_the_model_back(family: str, place: Path, tmp_path: Path) -> None:
    """Norms, tables and biases are saved whole; PEFT loads the model that was given."""
    here = place / family
    report = actmat.extract(here / "base", here / "model", out=tmp_path / "out", rank=64, threads=1)
    assert report.totals.relative_error < 1e-7
    expected, found = torch.load(here / "state.pt"), reloaded(family, tmp_path / "out")
    torch.testing.assert_close(found, expected, rtol=1e-07, atol=1e-07)
    assert not [n for n, r in rows_of(report).items() if r["kind"] == "left out"]


def test_errors_are_those_of_the_full_decomposition(place: Path, tmp_path: Path) -> None:
    here = place / "llama"
    report = actmat.extract(here / "base", here / "model", out=tmp_path / "out", rank=3, threads=1)
    before, after = (load_file(here / n / "model.safetensors") for n in ("base", "model"))
    total, left = 0.0, 0.0
    for name, row in rows_of(report).items():
        if row["kind"] != "factored":
            continue
        delta = after[name] - before[name]
        s = torch.linalg.svdvals(delta)
        assert row["rank"] == 3
        assert row["relative_error"] == pytest.approx(float(s[3:].norm() / s.norm()), rel=1e-9)
        assert row["energy"] == pytest.approx(float(s[:3].square().sum() / s.square().sum()), rel=1e-9)
        total, left = total + float(s.square().sum()), left + float(s[3:].square().sum())
    assert report.totals.relative_error == pytest.approx((left / total) ** 0.5, rel=1e-9)


def test_what_is_not_changed_or_cannot_be_held_is_said(tmp_path: Path) -> None:
    save("llama", tmp_path / "base")
    save("llama", tmp_path / "model", noise(2, of=lambda n: "q_proj" in n or n == "model.norm.weight"))
    report = actmat.extract(
        tmp_path / "base", tmp_path / "model", out=tmp_path / "out", rank=2, others="leave", threads=1
    )
    kinds = {n: r["kind"] for n, r in rows_of(report).items()}
    assert [n for n, k in kinds.items() if k == "factored"] == [Q, Q.replace("0", "1", 1)]
    assert kinds["model.norm.weight"] == "left out"
    assert rows_of(report)["model.norm.weight"]["why"] == "left out as requested: no LoRA holds it"
    assert kinds["lm_head.weight"] == "unchanged"
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["modules_to_save"] is None
    assert sorted(config["target_modules"]) == [n.removesuffix(".weight") for n in (Q, Q.replace("0", "1", 1))]


def test_experts_that_are_stacked_in_memory_are_left_out(place: Path, tmp_path: Path) -> None:
    here = place / "mixtral"
    report = actmat.extract(here / "base", here / "model", out=tmp_path / "out", rank=64, threads=1)
    kinds = {n: (r["kind"], r["why"]) for n, r in rows_of(report).items() if ".experts." in n}
    assert kinds
    assert set(kinds.values()) == {("left out", "put together with others in memory, where PEFT adapts the whole")}
    rows = [r for r in rows_of(report).values() if r["kind"] in ("left out", "factored")]
    lost, total = (sum(r["norm"] ** 2 for r in some) for some in ([r for r in rows if r["kind"] == "left out"], rows))
    assert report.totals.relative_error == pytest.approx((lost / total) ** 0.5, rel=1e-6)
    assert [w.code for w in report.warnings] == ["AM203", "AM404"], "the two are unrelated"
    found, expected = reloaded("mixtral", tmp_path / "out"), torch.load(here / "state.pt")
    for name, tensor in expected.items():
        if ".experts." not in name:
            torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-7, msg=name)


def test_an_adapter_without_factors_becomes_lora(tmp_path: Path) -> None:
    save("llama", tmp_path / "base")
    config = LoraConfig(r=2, use_dora=True, target_modules=["q_proj"])
    merged = save_peft(tmp_path / "dora", "llama", 3, config)
    actmat.extract(tmp_path / "base", tmp_path / "dora", out=tmp_path / "out", rank=16, threads=1)
    for name, tensor in reloaded("llama", tmp_path / "out").items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-7, atol=1e-7)


def test_a_stopped_extraction_goes_on_with_the_same_bytes(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = place / "llama"
    run: dict[str, Any] = {"rank": 3, "threads": 1}
    actmat.extract(here / "base", here / "model", out=tmp_path / "whole", **run)
    real, calls = sinks.Svd.finish, []

    def stops(factors: Any) -> Any:
        calls.append(factors.item.name)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return real(factors)

    monkeypatch.setattr(sinks.Svd, "finish", stops)
    with pytest.raises(KeyboardInterrupt):
        actmat.extract(here / "base", here / "model", out=tmp_path / "out", **run)
    assert not (tmp_path / "out").exists()
    done = set(calls[:5])
    calls[:] = ["again"] * 6
    report = actmat.extract(here / "base", here / "model", out=tmp_path / "out", rank=3, threads=2)
    assert not report.was_finished
    assert not done & set(calls[6:])
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["README.md", "actmat_manifest.json", "adapter_config.json", "adapter_model.safetensors"]
    one, two = ((tmp_path / n / "adapter_model.safetensors").read_bytes() for n in ("whole", "out"))
    assert one == two
    assert actmat.extract(here / "base", here / "model", out=tmp_path / "out", **run).was_finished


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "pass a rank"),
        ({"rank": 0}, "rank: Input should be greater than 0"),
        ({"rank": 2, "others": "drop"}, "'save' or 'leave'; found 'drop'"),
        ({"rank": 2, "dtype": "int8"}, "dtype: "),
    ],
)
def test_wishes_that_make_no_sense_are_refused(fields: dict[str, Any], words: str, place: Path, tmp_path: Path) -> None:
    with pytest.raises(MergeError, match=words):
        actmat.extract(place / "llama" / "base", place / "llama" / "model", out=tmp_path / "out", **fields)


def test_models_that_do_not_fit_and_places_in_use_are_refused(place: Path, tmp_path: Path) -> None:
    here = place / "llama"
    for model, out, words in (
        (place / "gpt2" / "model", tmp_path / "a", "missing in expert"),
        (here / "base", tmp_path / "b", "differs from .* in no tensor"),
        (here / "model", here / "base", "is an input|is not empty|contains"),
    ):
        with pytest.raises(MergeError, match=words):
            actmat.extract(here / "base", model, out=out, rank=2, threads=1)
    assert not (tmp_path / "a").exists()
    assert not list(tmp_path.iterdir())
    bad = load_file(here / "model" / "model.safetensors")
    bad[Q][0, 0] = float("nan")
    (tmp_path / "bad").mkdir()
    save_file(bad, tmp_path / "bad" / "model.safetensors")
    with pytest.raises(MergeError, match="cannot be merged"):
        actmat.extract(here / "base", tmp_path / "bad", out=tmp_path / "c", rank=2, threads=1)
    assert not (tmp_path / "c").exists()


def test_the_command_says_what_was_done(place: Path, tmp_path: Path) -> None:
    here = place / "llama"
    given = ["extract", "--base", str(here / "base"), "--model", str(here / "model"), "--out", str(tmp_path / "out")]
    said = run([*given, "--rank", "4", "--dtype", "bfloat16"], code=0).words
    assert "15 layers of rank 4" in said
    assert "saved whole: model.embed_tokens.weight" in said
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    assert "already complete from an earlier run" in run([*given, "--rank", "4", "--dtype", "bfloat16"]).words


def test_full_experts_are_merged_into_an_adapter(place: Path, tmp_path: Path) -> None:
    """The adapter is the best approximation of the merged delta; what is beside it goes away."""
    here = place / "llama"
    save("llama", tmp_path / "other", noise(5))
    experts, run = [here / "model", tmp_path / "other"], {"durable": False, "threads": 1}
    fields: dict[str, Any] = {"method": "task_arithmetic", "options": {"scaling": 0.5}, "dtype": "float32"}
    actmat.merge(here / "base", experts, out=tmp_path / "full", **fields, **run)
    report = actmat.merge(here / "base", experts, out=tmp_path / "out", to="adapter", rank=3, **fields, **run)
    assert report.out == tmp_path / "out"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "other", "out"]
    merged, before = load_file(tmp_path / "full" / "model.safetensors"), load_file(here / "base" / "model.safetensors")
    delta = merged[Q].double() - before[Q]
    found = reloaded("llama", tmp_path / "out")[Q] - before[Q]
    s = torch.linalg.svdvals(delta)
    assert float((found - delta).norm() / s.norm()) == pytest.approx(float(s[3:].norm() / s.norm()), rel=1e-5)
    assert report.manifest["recipe"]["output"] == {"kind": "extracted", "rank": 3}
    assert verify(tmp_path / "out").problems == ()


def test_an_adapter_of_full_experts_needs_a_rank(place: Path, tmp_path: Path) -> None:
    here = place / "llama"
    with pytest.raises(MergeError, match=r"Give --base and --rank to extract"):
        actmat.merge(here / "base", [here / "model"], out=tmp_path / "out", to="adapter")
