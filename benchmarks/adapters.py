"""Adapters: exact merging in the low-rank space, against the dense formula and against PEFT's combination by SVD.

    python -m benchmarks.adapters                                   # 8 adapters of rank 16 on a 7 B-shaped model
    python -m benchmarks.adapters --hidden 256 --intermediate 688 --layers 2 --vs-peft
    python -m benchmarks.adapters --folder ADAPTERS                 # a table over folders of real adapters

The first form writes random adapters (hidden 4096, intermediate 11008, 32 layers, all linear layers), merges them with
ACTMat into an adapter in a process of its own, and measures time and memory from outside; then, for one layer of each
shape, the factored rule in turn with the dense formula on the materialised deltas. `--vs-peft` merges the same adapters
with `PeftModel.add_weighted_adapter(combination_type="svd")` on a model of the same shape: choose a small one.
`--folder` merges every group (a sub-folder of adapters) with every method that has a low-rank form.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common import WORK, markdown, measure, once, write_result


def layers_of(hidden: int, intermediate: int) -> dict[str, tuple[int, int]]:
    """Linear layers of one block, `O x I`."""
    attention = {f"self_attn.{n}_proj": (hidden, hidden) for n in "qkvo"}
    return attention | {
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }


def write_adapters(folder: Path, n: int, rank: int, hidden: int, intermediate: int, depth: int) -> list[Path]:
    """Random adapters; those that are there already are kept."""
    out = []
    for t in range(n):
        place = folder / f"adapter-{t}"
        out.append(place)
        if (place / "adapter_config.json").is_file():
            continue
        place.mkdir(parents=True, exist_ok=True)
        rng = torch.Generator().manual_seed(t)
        tensors = {}
        for layer in range(depth):
            for name, (rows, columns) in layers_of(hidden, intermediate).items():
                stem = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, columns, generator=rng) / columns**0.5
                tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, rank, generator=rng) * 0.01
        save_file(tensors, place / "adapter_model.safetensors", metadata={"format": "pt"})
        targets = sorted(n.rpartition(".")[2] for n in layers_of(hidden, intermediate))
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
        (place / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "random"}))
    return out


def whole(adapters: list[Path], scratch: Path) -> dict[str, Any]:
    """One merge in a process of its own."""
    flags = [x for a in adapters for x in ("-e", a)]
    call = "from actmat.cli.main import main; main()"
    command = [sys.executable, "-c", call, "merge", *flags, "--out", scratch / "out", "-q", "--threads", "2"]
    run = measure(command, scratch / "out")
    return {"what": "actmat, to an adapter", "wall_s": run.wall_s, "peak_anonymous_b": run.peak_anonymous_b}


def per_layer(n: int, rank: int, hidden: int, intermediate: int) -> list[dict[str, Any]]:
    """The factored rule against the dense formula, on one layer of each shape."""
    from actmat.linalg.lowrank import LowRank
    from actmat.methods import get_method

    rule = get_method("actmat")
    assert rule.merge_lowrank is not None
    rows = []
    for o, i in sorted(set(layers_of(hidden, intermediate).values())):
        rng = torch.Generator().manual_seed(0)
        deltas = [
            LowRank(torch.randn(o, rank, generator=rng) * 0.01, torch.randn(rank, i, generator=rng) / i**0.5)
            for _ in range(n)
        ]
        factored = min(once(lambda d=deltas: rule.merge_lowrank(d)) for _ in range(3))  # type: ignore[misc]
        dense = once(lambda d=deltas: rule.merge([x.dense() for x in d]))
        rows.append({"shape": f"{o}x{i}", "factored_s": factored, "dense_s": dense, "ratio": dense / factored})
    return rows


def against_peft(adapters: list[Path], hidden: int, intermediate: int, depth: int) -> dict[str, Any]:
    """The same adapters by PEFT, on a Llama of the same shape, exact rank; loading is not counted on either side."""
    from peft import PeftModel
    from transformers import LlamaConfig, LlamaForCausalLM

    from actmat.api import merge

    heads = max(1, hidden // 128)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=depth,
        num_attention_heads=heads, num_key_value_heads=heads, vocab_size=32,
    )  # fmt: skip
    model = PeftModel.from_pretrained(LlamaForCausalLM(config), adapters[0], adapter_name="a0")
    names = ["a0"]
    for t, place in enumerate(adapters[1:], 1):
        model.load_adapter(place, adapter_name=f"a{t}")
        names.append(f"a{t}")
    rank = sum(model.peft_config[n].r for n in names)
    peft = once(
        lambda: model.add_weighted_adapter(
            names, [1.0] * len(names), "merged", combination_type="svd", svd_rank=min(rank, hidden)
        )
    )
    with tempfile.TemporaryDirectory() as out:
        ours = once(lambda: merge(None, adapters, method="task_arithmetic", out=Path(out) / "out"))
    return {"what": "add_weighted_adapter, svd", "peft_s": peft, "actmat_s": ours, "ratio": peft / ours}


def real(folder: Path) -> list[dict[str, Any]]:
    """Every group of adapters below `folder`, with every method that has a low-rank form."""
    from actmat.api import merge
    from actmat.checkpoints.adapter_open import is_adapter
    from actmat.errors import MergeError
    from actmat.methods import METHODS

    rows = []
    for group in sorted(p for p in folder.iterdir() if p.is_dir()):
        files = sorted([*group.iterdir(), *group.glob("*/*.pt")])
        adapters = [p for p in files if is_adapter(p)]
        for method in (m.name for m in METHODS if m.merge_lowrank is not None and not m.needs_statistics):
            with tempfile.TemporaryDirectory() as out:
                began = time.perf_counter()
                try:
                    report = merge(None, adapters, method=method, out=Path(out) / "out")
                except MergeError as error:
                    rows.append({"group": group.name, "method": method, "result": str(error.problems[0])[:60]})
                    continue
                seconds = time.perf_counter() - began
                size = (Path(out) / "out" / "adapter_model.safetensors").stat().st_size
            stats = [m["stats"] for m in report.manifest["modules"] if "norm" in m["stats"]]
            total = sum(s["sum_norm"] ** 2 for s in stats) ** 0.5
            rows.append(
                {
                    "group": group.name,
                    "adapters": len(adapters),
                    "method": method,
                    "modules": len(stats),
                    "rank": max(s["numerical_rank"] for s in stats),
                    "written_b": size,
                    "merge_s": seconds,
                    "planned_b": report.plan.peak_bytes(2),
                    "norm/sum": sum(s["norm"] ** 2 for s in stats) ** 0.5 / total,
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown, columns of the first."""
    return markdown(rows, tuple(rows[0]))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--vs-peft", action="store_true", help="also PEFT's SVD combination, on a model of this shape")
    parser.add_argument("--folder", type=Path, help="groups of real adapters; nothing else is measured")
    given = parser.parse_args()
    if given.folder is not None:
        print(table(real(given.folder)))
        return
    place = WORK / f"adapters-{given.hidden}x{given.intermediate}x{given.layers}-{given.adapters}r{given.rank}"
    sizes = (given.hidden, given.intermediate)
    adapters = write_adapters(place, given.adapters, given.rank, *sizes, given.layers)
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        rows = [whole(adapters, Path(scratch))]
    print(table(rows))
    layers = per_layer(given.adapters, given.rank, *sizes)
    print(table(layers))
    more: dict[str, Any] = {"layers": layers}
    if given.vs_peft:
        more["peft"] = [against_peft(adapters, *sizes, given.layers)]
        print(table(more["peft"]))
    write_result("adapters", rows, **more)


if __name__ == "__main__":
    main()
