"""Configurations of mergekit, run by it and by actmat: which run, and by how much the tensors differ.

    python -m benchmarks.mergekit --mergekit-python PYTHON

mergekit lives in an environment of its own (`benchmarks.tools` makes it), with the transformers of this one.
Models are tiny: those of tests/data/mergekit, and an adapter of one of them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from actmat.api.reading import read_recipe
from actmat.errors import MergeError
from actmat.run import run_recipes
from actmat.settings import RunSettings
from benchmarks.common import WORK, borrowing_python, print_table, stored_tensors, write_result
from benchmarks.provenance import REPOSITORY
from benchmarks.tools import with_mergekit

HERE = Path(__file__).parent
DATA = REPOSITORY / "tests" / "data" / "mergekit"
ROUNDING = {torch.float32: (1e-6, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}
"""dtype -> absolute and relative tolerance: of float32 that of the tests; of half precision, in which mergekit works,
two units in the last place, of the entry and of the tensor's largest one."""
SHARE = 0.01
"""Of the entries of half precision that may lie outside: equal magnitudes at the cut of TIES."""


def make_models(folder: Path) -> None:
    """Write all models."""
    for model in ("base", "a", "b", "c", "d", "e", "tied", "lora"):
        shutil.copytree(DATA / model, folder / model)
    shutil.copytree(folder / "lora", folder / "lora_a")
    generator = torch.Generator().manual_seed(5)
    weights = load_file(folder / "lora" / "adapter_model.safetensors")
    other = {n: torch.randn(t.shape, generator=generator) * t.std() for n, t in sorted(weights.items())}
    save_file(other, folder / "lora_a" / "adapter_model.safetensors")


def run_here(name: str, data: dict[str, Any], folder: Path) -> str:
    """Run one configuration; the error, empty if it ran."""
    given = dict(data)
    if "seed" in given:
        given["random_seed"] = given.pop("seed")
    file = folder / f"{name}.yml"
    file.write_text(yaml.safe_dump(given), encoding="utf-8")
    try:
        recipe = read_recipe(file, {"out": str(folder / "here" / name)})
        run_recipes([recipe], RunSettings(threads=1, durable=False, overwrite=True))
    except MergeError as error:
        return str(error).replace(f"{folder}/", "")
    return ""


def by_token(tensors: dict[str, Tensor], folder: Path, order: list[str]) -> dict[str, Tensor]:
    """The tensors with rows of tables in a given order of tokens; rows after them as they are."""
    ids = token_ids(folder)
    rows = [ids[t] for t in order]
    rows += [i for i in range(max(len(t) for n, t in tensors.items() if "embed_tokens" in n)) if i not in set(rows)]
    return {n: t[rows] if "embed_tokens" in n or "lm_head" in n else t for n, t in tensors.items()}


def token_ids(folder: Path) -> dict[str, int]:
    """Token -> row, of an output's tokenizer."""
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return dict(data["model"]["vocab"]) | {t["content"]: t["id"] for t in data["added_tokens"]}


def compare(name: str, data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Outcome, largest difference and share of entries beyond the rounding of the dtype."""
    there, here = (stored_tensors(folder / side / name) for side in ("there", "here"))
    if "tokenizer" in data or "tokenizer_source" in data:
        order = sorted(token_ids(folder / "there" / name))
        there, here = (by_token(t, folder / s / name, order) for t, s in ((there, "there"), (here, "here")))
    if there.keys() != here.keys() or any(t.shape != here[n].shape for n, t in there.items()):
        odd = sorted(there.keys() ^ here.keys()) or [n for n, t in there.items() if t.shape != here[n].shape]
        return {"outcome": "differs", "reason": f"other tensors: {', '.join(odd[:3])}"}
    if any(t.dtype != here[n].dtype for n, t in there.items()):
        return {"outcome": "differs", "reason": "other dtypes"}
    if all(torch.equal(t, here[n]) for n, t in there.items()):
        return {"outcome": "same bits", "largest": 0.0, "outside": 0.0}
    largest, outside, total = 0.0, 0, 0
    for key, want in there.items():
        atol, rtol = ROUNDING[want.dtype]
        error = (here[key].double() - want.double()).abs()
        scale = 1.0 if want.dtype == torch.float32 else float(want.double().abs().max())
        largest = max(largest, float(error.max()))
        outside += int((error > atol * scale + rtol * want.double().abs()).sum())
        total += error.numel()
    share = outside / total
    half = next(iter(there.values())).dtype != torch.float32
    good = share <= (SHARE if half else 0.0)
    return {"outcome": "same within rounding" if good else "differs", "largest": largest, "outside": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mergekit-python", type=Path, help="interpreter of an environment that holds mergekit")
    parser.add_argument("--folder", type=Path, help="keep models and outputs here")
    parser.add_argument("--only", nargs="+", help="names of configurations; prints, and writes no result")
    given = parser.parse_args()
    python = given.mergekit_python or borrowing_python(WORK / "environments" / "mergekit", with_mergekit.INSTALL)
    merges = yaml.safe_load((HERE / "cases.yml").read_text())
    cases = {n: c for n, c in merges.items() if not given.only or n in given.only}
    folder = given.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "base").exists():
        make_models(folder)
    shutil.rmtree(folder / "there", ignore_errors=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    version = "from importlib.metadata import version as v; print(*map(v, ('mergekit', 'torch', 'transformers')))"
    said = subprocess.run([python, "-c", version], capture_output=True, text=True, check=True).stdout.split()
    subprocess.run([python, HERE / "worker.py", folder], check=True)
    failed = json.loads((folder / "there.json").read_text())
    rows = []
    for name, data in cases.items():
        refused = run_here(name, data, folder)
        row: dict[str, Any] = {"name": name, "kind": data["merge_method"]}
        if failed[name] or refused:
            both = "fails in both" if failed[name] and refused else "refused here" if refused else "fails in mergekit"
            row |= {"outcome": both, "there": failed[name][:300], "reason": " ".join(refused.split())[:300]}
        else:
            row |= compare(name, data, folder)
        rows.append(row)
    print_table(rows, ["name", "kind", "outcome", "largest", "outside", "reason"])
    if not given.only:
        write_result(
            "mergekit", rows, versions_of_mergekit=dict(zip(("mergekit", "torch", "transformers"), said, strict=True))
        )


if __name__ == "__main__":
    main()
