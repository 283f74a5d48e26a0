"""`keep_sums`: an expert that is added to a finished merge gives the bytes of a merge of all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.merging import EMBEDDING, INNER, NORM, Q0, WIDTH, Family
from tests.tolerances import F32_ELEMENTWISE, relative_error

import actmat
from actmat.errors import AlignmentError, CheckpointError, MergeError, RecipeError
from actmat.growing import add_experts, remove_experts
from actmat.methods import METHODS
from actmat.planning import regions
from actmat.progress import NoProgress
from actmat.recipe import make_recipe
from actmat.run import run_recipes
from actmat.settings import RunSettings

ADDITIVE = sorted(m.name for m in METHODS if m.finish_sum is not None)
WEIGHTS = [0.7, -0.2, 1.3]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of 64 entries, so that most tensors have several."""
    monkeypatch.setattr(regions, "CHUNK", 64)


def weights_of(out: Path) -> dict[str, bytes]:
    """Weight files of an output, those of its sums included."""
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*.safetensors"))}


def record_of(out: Path) -> dict[str, Any]:
    """The manifest without what depends on the run, on where things lie, and on what the plan reads."""
    manifest = json.loads((out / "actmat_manifest.json").read_text())
    found = {k: v for k, v in manifest.items() if k not in ("timing", "content", "recipe")}
    for entry in (found["base"], *found["experts"]):
        for key in ("location", "from_here"):
            entry.pop(key, None)
    found["output"]["side_files"].pop("README.md")
    return found


def merged(family: Family, out: Path, count: int, method: str = "average", **fields: Any) -> Path:
    experts = [{"path": str(p), **({"weight": w} if fields.get("weighted") else {})}
               for p, w in zip(family.experts[:count], WEIGHTS, strict=False)]  # fmt: skip
    fields = {k: v for k, v in fields.items() if k != "weighted"}
    actmat.merge(str(family.base), experts, out=out, method=method, keep_sums=True, **fields)
    return out


def save_lora(folder: Path, modules: dict[str, int], seed: int) -> None:
    """A LoRA adapter of rank 2 for these modules of layer 0, by their number of rows."""
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, rows in modules.items():
        stem = f"base_model.model.model.layers.0.{module}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(2, WIDTH, generator=rng)
        tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, 2, generator=rng)
    folder.mkdir()
    targets = [m.rpartition(".")[2] for m in modules]
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def unread(family: Family) -> list[Path]:
    """Take the first two experts away, as somebody does who has no room for them; returns where they are."""
    return [e.rename(e.with_suffix(".away")) for e in family.experts[:2]]


def back(away: list[Path]) -> None:
    for path in away:
        path.rename(path.with_suffix(""))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("method", ADDITIVE)
def test_an_added_expert_gives_the_bytes_of_all(method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """With weights, shards, a tensor that only the new expert changes, and one that cancels."""
    family = Family.make(tmp_path, experts=3, dtype=dtype)
    start = load_file(family.base / "model.safetensors")
    start[NORM][0] = -0.0
    family.change(family.base, lambda t: t.update(start))
    for expert in family.experts:
        family.change(expert, lambda t: t[NORM].__setitem__(0, -0.0))
    for expert in family.experts[:2]:
        family.change(expert, lambda t: t.update({Q0: start[Q0], "lm_head.weight": start["lm_head.weight"]}))
    family.change(family.experts[2], lambda t: t.update({"lm_head.weight": start["lm_head.weight"]}))
    step = torch.full_like(start[EMBEDDING], 0.5)
    for expert, sign in zip(family.experts[:2], (1, -1), strict=True):
        family.change(expert, lambda t, s=sign: t.update({EMBEDDING: start[EMBEDDING] + s * step}))
    fields: dict[str, Any] = {"weighted": True, "max_shard_size": "1KB", "scale": 0.9}
    if method == "linear":
        fields["options"] = {"normalize": False}
    whole = merged(family, tmp_path / "whole", 3, method, threads=1, **fields)
    out = merged(family, tmp_path / "out", 2, method, threads=2, **fields)
    away = unread(family)
    report = add_experts(out, [{"path": str(family.experts[2]), "weight": WEIGHTS[2]}], settings=RunSettings(threads=2))
    assert report.from_sums
    assert weights_of(out) == weights_of(whole)
    assert len([n for n in weights_of(out) if not n.startswith("actmat_sums")]) > 1
    back(away)
    assert record_of(out) == record_of(whole)
    assert actmat.verify(out).ok, actmat.verify(out).problems


def test_without_sums_the_weights_are_the_same(tmp_path: Path) -> None:
    family = Family.make(tmp_path, experts=2)
    kept = merged(family, tmp_path / "kept", 2)
    actmat.merge(family.base, family.experts, out=tmp_path / "plain", method="average")
    name = "model.safetensors"
    assert (kept / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    sums = load_file(kept / "actmat_sums" / name)
    start, *experts = [load_file(f / name) for f in (family.base, *family.experts)]
    for tensor, first in start.items():
        wanted = sum(e[tensor].double() - first.double() for e in experts)
        assert relative_error(sums[tensor], wanted) < F32_ELEMENTWISE


def test_one_at_a_time_and_elsewhere(tmp_path: Path) -> None:
    family = Family.make(tmp_path, experts=4)
    experts = [str(e) for e in family.experts]
    one = actmat.merge(family.base, experts[:1], out=tmp_path / "1", method="task_arithmetic", keep_sums=True)
    previous = Path(one.out)
    for n, expert in enumerate(experts[1:], start=2):
        report = add_experts(previous, [expert], to=tmp_path / str(n))
        assert previous.is_dir(), "the earlier output stays"
        previous = Path(report.merged.out)
    whole = actmat.merge(family.base, experts, out=tmp_path / "whole", method="task_arithmetic", keep_sums=True)
    assert weights_of(previous) == weights_of(Path(whole.out))


def test_adapters_are_added(tmp_path: Path) -> None:
    """Of adapters, the first two train other tensors than the last, which was copied so far."""
    family = Family.make(tmp_path, experts=0)
    attention, both = {"self_attn.q_proj": WIDTH}, {"self_attn.q_proj": WIDTH, "mlp.up_proj": INNER}
    for n, modules in enumerate((attention, attention, both)):
        save_lora(tmp_path / f"lora{n}", modules, seed=n)
    adapters = [str(tmp_path / f"lora{n}") for n in range(3)]
    whole = actmat.merge(family.base, adapters, out=tmp_path / "whole", method="task_arithmetic", keep_sums=True)
    actmat.merge(family.base, adapters[:2], out=tmp_path / "out", method="task_arithmetic", keep_sums=True)
    for path in adapters[:2]:
        shutil.rmtree(path)
    assert add_experts(tmp_path / "out", [adapters[2]]).from_sums
    assert weights_of(tmp_path / "out") == weights_of(Path(whole.out))
    assert record_of(tmp_path / "out")["tensors"] == record_of(Path(whole.out))["tensors"]


def test_removal_merges_the_others(tmp_path: Path) -> None:
    family = Family.make(tmp_path, experts=3)
    out = merged(family, tmp_path / "out", 3, "task_arithmetic", weighted=True)
    report = remove_experts(out, ["expert1"])
    assert not report.from_sums
    experts = [{"path": str(family.experts[n]), "weight": WEIGHTS[n]} for n in (0, 2)]
    actmat.merge(family.base, experts, out=tmp_path / "rest", method="task_arithmetic", keep_sums=True)
    assert weights_of(out) == weights_of(tmp_path / "rest")
    with pytest.raises(RecipeError, match="without an expert 'expert1'"):
        remove_experts(out, ["expert1"])


def test_a_merge_without_sums_reads_all(tmp_path: Path) -> None:
    family = Family.make(tmp_path, experts=3)
    experts = [str(e) for e in family.experts]
    out = Path(actmat.merge(family.base, experts[:2], out=tmp_path / "out", method="ties").out)
    report = add_experts(out, [experts[2]])
    assert not report.from_sums
    assert "kept no sums" in report.why_read
    actmat.merge(family.base, experts, out=tmp_path / "whole", method="ties")
    assert weights_of(out) == weights_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"method": "actmat"}, "merged by 'actmat', whose result is no function of the sum"),
        ({"method": "task_arithmetic", "normalize": True}, "drop 'normalize'"),
        ({"postprocess": {"norm_cap": "mean"}}, "drop 'postprocess'"),
        ({"post": ["svc"], "method": "task_arithmetic"}, "drop 'post'"),
        ({"allow_nonfinite": True}, "drop 'allow_nonfinite'"),
        ({"files_from": "expert0"}, "drop 'files_from'"),
    ],
)
def test_what_no_sum_can_continue_is_refused(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    family = Family.make(tmp_path, layers=1)
    given = {"method": "average", **fields}
    with pytest.raises(AlignmentError) as refused:
        actmat.plan(family.base, family.experts, keep_sums=True, **given)
    assert said in str(refused.value)


def test_changed_sums_bases_and_names_are_refused(tmp_path: Path) -> None:
    family = Family.make(tmp_path, experts=3, layers=1)
    out, new = merged(family, tmp_path / "out", 2), str(family.experts[2])
    before = weights_of(out)
    with pytest.raises(MergeError, match="expert1"):
        add_experts(out, [{"path": new, "name": "expert1"}])
    for name, place in (("a sum", -1), ("a sampled sum", 4096)):
        damaged = shutil.copytree(out, tmp_path / name)
        file = damaged / "actmat_sums" / "model.safetensors"
        bad = bytearray(file.read_bytes())
        bad[place] ^= 1
        file.write_bytes(bytes(bad))
        (problem,) = actmat.verify(damaged, inputs=False).problems
        assert "of the sums" in problem
        with pytest.raises(CheckpointError, match=r"sum of .* has another content hash"):
            add_experts(damaged, [new])
    assert weights_of(out) == before, "a failed addition leaves the output as it was"
    base = (family.base / "model.safetensors").read_bytes()
    family.change(family.base, lambda t: t[NORM].add_(1))
    with pytest.raises(CheckpointError, match=rf"'{NORM}' of the base has another content hash"):
        add_experts(out, [new])
    (family.base / "model.safetensors").write_bytes(base)
    shutil.rmtree(out / "actmat_sums")
    with pytest.raises(CheckpointError, match="is gone"):
        add_experts(out, [new])


def test_an_interrupted_addition_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family.make(tmp_path, experts=3)
    whole = merged(family, tmp_path / "whole", 3)
    out, new = merged(family, tmp_path / "out", 2), str(family.experts[2])

    class Stop(NoProgress):
        seen = 0

        def tensor(self, name: str, nbytes: int) -> None:
            self.seen += 1
            if self.seen == 4:
                raise KeyboardInterrupt

    before = weights_of(out)
    with pytest.raises(KeyboardInterrupt):
        add_experts(out, [new], progress=Stop(), settings=RunSettings(threads=1))
    assert weights_of(out) == before
    report = add_experts(out, [new], settings=RunSettings(threads=1))
    assert report.merged.resumed >= 3
    assert weights_of(out) == weights_of(whole)


def test_parts_and_processes_keep_the_same_sums(tmp_path: Path) -> None:
    """Parts write them to shared files; a diagnosis beside them changes no byte."""
    family = Family.make(tmp_path, experts=2)
    whole = merged(family, tmp_path / "whole", 2)
    experts = [str(e) for e in family.experts]
    for part in ("1/2", "2/2"):
        actmat.merge_part(family.base, experts, part=part, out=tmp_path / "parts", method="average", keep_sums=True)
    actmat.finish(tmp_path / "parts")
    assert weights_of(tmp_path / "parts") == weights_of(whole)
    actmat.merge(
        family.base, experts, out=tmp_path / "seen", method="average", keep_sums=True, diagnose=True, overwrite=True
    )
    assert weights_of(tmp_path / "seen") == weights_of(whole)
    given = {"base": str(family.base), "experts": experts, "keep_sums": True}
    recipes = [make_recipe({**given, "method": m, "out": str(tmp_path / m)}) for m in ("average", "linear")]
    with pytest.raises(RecipeError, match="one merge at a time"):
        run_recipes(recipes)
    save_lora(tmp_path / "lora", {"self_attn.q_proj": WIDTH}, 1)
    with pytest.raises(MergeError, match="goes with a full model"):
        actmat.plan(experts=[str(tmp_path / "lora")], method="average", keep_sums=True)
