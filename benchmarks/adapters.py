"""Adapters: exact merging in the low-rank space, against the dense formula and against PEFT's combination by SVD.

    python -m benchmarks.adapters                                   # 8 adapters of rank 16 on a 7 B-shaped model
    python -m benchmarks.adapters --hidden 1024 --intermediate 2816 --layers 4 --vs-peft

The first form writes random adapters (hidden 4096, intermediate 11008, 32 layers, all linear layers), merges them with
ACTMat into an adapter in a process of its own, and measures time and memory from outside; then, for one layer of each
shape, the factored rule in turn with the dense formula on the materialized deltas. `--vs-peft` adds the same adapters
up with actmat and with `PeftModel.add_weighted_adapter(combination_type="svd")` on a model of the same shape, both in
float32, on two threads, each in a process of its own: choose a small model, and nothing else is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common import WORK, Run, alternate, fresh, measure, merged, once, print_table, summary, write_result


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
    run = merged(flags, scratch / "out", "--threads", "2", durable=True)
    return {"what": "actmat, to an adapter", "wall_s": run.wall_s, "peak_anonymous_b": run.peak_anonymous_b}


def per_layer(n: int, rank: int, hidden: int, intermediate: int) -> list[dict[str, Any]]:
    """The factored rule against the dense formula, on one layer of each shape."""
    from actmat.linalg.lowrank import LowRank
    from actmat.methods import get_method

    rule = get_method("actmat")
    assert rule.lowrank is not None
    rows = []
    for o, i in sorted(set(layers_of(hidden, intermediate).values())):
        rng = torch.Generator().manual_seed(0)
        deltas = [
            LowRank(torch.randn(o, rank, generator=rng) * 0.01, torch.randn(rank, i, generator=rng) / i**0.5)
            for _ in range(n)
        ]
        factored = min(once(lambda d=deltas: rule.lowrank.merge(d)) for _ in range(3))  # type: ignore[misc]
        dense = once(lambda d=deltas: rule.merge([x.dense() for x in d]))
        rows.append({"shape": f"{o}x{i}", "factored_s": factored, "dense_s": dense, "ratio": dense / factored})
    return rows


def peft_side(adapters: list[Path], out: Path, combination: str, shape: tuple[int, int, int]) -> float:
    """PEFT's combination of the adapters on a Llama of this shape, saved to `out`; seconds of the combination alone.

    `svd` asks for the exact rank and for the thin decomposition, the faster of the two that PEFT offers.
    """
    from peft import PeftModel
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, depth = shape
    heads = max(1, hidden // 128)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=depth,
        num_attention_heads=heads, num_key_value_heads=heads, vocab_size=32,
    )  # fmt: skip
    model = PeftModel.from_pretrained(LlamaForCausalLM(config).float(), adapters[0], adapter_name="a0")
    names = [f"a{t}" for t in range(len(adapters))]
    for name, place in list(zip(names, adapters, strict=True))[1:]:
        model.load_adapter(place, adapter_name=name)
    rank = min(sum(model.peft_config[n].r for n in names), hidden)
    svd = {"svd_rank": rank, "svd_full_matrices": False} if combination == "svd" else {}
    with torch.no_grad():
        seconds = once(
            lambda: model.add_weighted_adapter(names, [1.0] * len(names), "merged", combination_type=combination, **svd)
        )
    model.save_pretrained(out, selected_adapters=["merged"], save_embedding_layers=False)  # "auto" asks the hub
    return seconds


def actmat_side(adapters: list[Path], out: Path) -> float:
    """The plain sum of the adapters in factored form; seconds of the merge, reading and writing included."""
    from actmat.api.merging import merge

    settings: dict[str, Any] = {"method": "task_arithmetic", "options": {"scaling": 1.0}, "durable": False}
    return once(lambda: merge(None, adapters, out=out / "merged", threads=2, **settings))


SIDES = ("actmat", "peft-svd", "peft-cat")


def side(name: str, adapters: list[Path], out: Path, shape: tuple[int, int, int]) -> None:
    """What a child process does; its seconds go to `out/seconds.json`."""
    ours = name == "actmat"
    seconds = actmat_side(adapters, out) if ours else peft_side(adapters, out, name.removeprefix("peft-"), shape)
    (out / "seconds.json").write_text(json.dumps(seconds))


def difference(one: Path, other: Path) -> float:
    """`||D_1 - D_2||_F / ||D_2||_F` over all modules of two adapters, from their factors."""
    from actmat.experts.locate import LocatedAdapter, locate
    from actmat.linalg.lowrank import frobenius_norm, weighted_sum

    with locate(str(one)) as left, locate(str(other)) as right:
        assert isinstance(left, LocatedAdapter)
        assert isinstance(right, LocatedAdapter)
        first, second = left.adapter, right.adapter
        assert set(first.modules) == set(second.modules)
        apart = size = 0.0
        for name, module in first.modules.items():
            pair = [first.factors(module, torch.float64), second.factors(second.modules[name], torch.float64)]
            apart += frobenius_norm(weighted_sum(pair, [1.0, -1.0])) ** 2
            size += frobenius_norm(pair[1]) ** 2
    return (apart / size) ** 0.5


def against_peft(
    adapters: list[Path], scratch: Path, shape: tuple[int, int, int], repeats: int
) -> list[dict[str, Any]]:
    """The sum of the same adapters by both, float32 in and out, each run in a process of its own, in turn.

    `merge_s` is the merge inside the process: for PEFT the combination in memory alone, for actmat from files to a
    finished folder. `process_s` is all, model and adapters loaded and imports included. `cat` concatenates factors: it
    knows plain sums only, and is here to show what a sum costs without any decomposition.
    """
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}

    def run(name: str) -> Run:
        out = fresh(scratch / name)
        out.mkdir()
        hidden, intermediate, depth = shape
        sizes = ["--hidden", hidden, "--intermediate", intermediate, "--layers", depth]
        listed = [x for a in adapters for x in ("--given", a)]
        command = [sys.executable, "-m", "benchmarks.adapters", "--side", name, "--out", out, *sizes, *listed]
        measured = measure([str(c) for c in command], out, OMP_NUM_THREADS="2")
        seconds[name].append(json.loads((out / "seconds.json").read_text()))
        return measured

    runs = alternate({name: partial(run, name) for name in SIDES}, repeats)
    rows = []
    for name in SIDES:
        whole_process = summary(runs[name])
        rows.append(
            {
                "what": name,
                "merge_s": statistics.median(seconds[name]),
                "process_s": whole_process["wall_s"],
                "peak_anonymous_b": whole_process["peak_anonymous_b"],
                "merge over actmat": statistics.median(seconds[name]) / statistics.median(seconds["actmat"]),
                "difference": difference(scratch / "actmat" / "merged", scratch / name / "merged"),
            }
        )
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--vs-peft", action="store_true", help="also PEFT's SVD combination, on a model of this shape")
    parser.add_argument("--repeats", type=int, default=3, help="of --vs-peft")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--given", type=Path, action="append", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side is not None:
        side(given.side, given.given, given.out, (given.hidden, given.intermediate, given.layers))
        return
    place = WORK / f"adapters-{given.hidden}x{given.intermediate}x{given.layers}-{given.adapters}r{given.rank}"
    sizes = (given.hidden, given.intermediate)
    adapters = write_adapters(place, given.adapters, given.rank, *sizes, given.layers)
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        if given.vs_peft:
            rows = against_peft(adapters, Path(scratch), (*sizes, given.layers), given.repeats)
            print_table(rows, list(rows[0]))
            write_result("adapters-peft", rows)
            return
        rows = [whole(adapters, Path(scratch))]
    print_table(rows, list(rows[0]))
    layers = per_layer(given.adapters, given.rank, *sizes)
    print_table(layers, list(layers[0]))
    write_result("adapters", rows, layers=layers)


if __name__ == "__main__":
    main()
