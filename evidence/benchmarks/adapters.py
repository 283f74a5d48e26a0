"""Many adapters: the methods that work on factors, and PEFT's `add_weighted_adapter`, on the same files.

    python -m benchmarks.adapters                       # 64 adapters of rank 16 on one layer of a 7 B model
    python -m benchmarks.adapters --layers 32 --only auto tsv      # the whole model, without PEFT

Adapters are random, on all seven linear maps of a layer (hidden 4096, intermediate 11008). Every row is a process of
its own on two threads, float32 in and out, imports and loading included. `merge_s` is the merge within it: for PEFT the
combination of what is in memory, for actmat from files to a finished folder (`ties` in the core space); a model of 32
layers takes 32 times that. PEFT holds the layer's weights, too. `svd` is given the exact rank, at most the width, and
the thin decomposition, the faster of its two. `difference` is that of the deltas from actmat's sum, for plain sums.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common import RESULTS, SOURCE, WORK, finish, fresh, measure, once, program, read_result


def layers_of(hidden: int, intermediate: int) -> dict[str, tuple[int, int]]:
    """Linear layers of one block, `O x I`."""
    attention = {f"self_attn.{n}_proj": (hidden, hidden) for n in "qkvo"}
    return attention | {
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }


def write_adapters(
    folder: Path, n: int, rank: int, hidden: int, intermediate: int, depth: int, only: Sequence[str] = ()
) -> list[Path]:
    """Random adapters of all maps, or of those with these names; adapters that are there already are kept."""
    maps = {k: v for k, v in layers_of(hidden, intermediate).items() if not only or k.rpartition(".")[2] in only}
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
            for name, (rows, columns) in maps.items():
                stem = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, columns, generator=rng) / columns**0.5
                tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, rank, generator=rng) * 0.01
        save_file(tensors, place / "adapter_model.safetensors", metadata={"format": "pt"})
        targets = sorted(n.rpartition(".")[2] for n in maps)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
        (place / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "random"}))
    return out


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
    svd |= {"density": 0.2} if combination == "ties" else {}
    with torch.no_grad():
        seconds = once(
            lambda: model.add_weighted_adapter(names, [1.0] * len(names), "merged", combination_type=combination, **svd)
        )
    model.save_pretrained(out, selected_adapters=["merged"], save_embedding_layers=False)  # "auto" asks the hub
    return seconds


def difference(one: Path, other: Path) -> float:
    """`||D_1 - D_2||_F / ||D_2||_F` over all modules of two adapters, from their factors."""
    from actmat.experts.locate import locate
    from actmat.experts.lora.adapter import Adapter
    from actmat.linalg.lowrank import frobenius_norm, weighted_sum

    with locate(str(one)) as first, locate(str(other)) as second:
        assert isinstance(first, Adapter)
        assert isinstance(second, Adapter)
        assert set(first.modules) == set(second.modules)
        apart = size = 0.0
        for name, module in first.modules.items():
            pair = [first.factors(module, torch.float64), second.factors(second.modules[name], torch.float64)]
            apart += frobenius_norm(weighted_sum(pair, [1.0, -1.0])) ** 2
            size += frobenius_norm(pair[1]) ** 2
    return (apart / size) ** 0.5


def actmat_side(adapters: list[Path], out: Path, method: str) -> float:
    """One method in factored form; seconds of the merge, reading and writing included."""
    from actmat.api.merging import merge

    options: dict[str, Any] = {"options": {"scaling": 1.0}} if method == "task_arithmetic" else {}
    options |= {"space": "core"} if method == "ties" else {}
    return once(lambda: merge(None, adapters, out=out / "merged", threads=2, method=method, durable=False, **options))


COLUMNS = ("tool", "method", "merge_s", "process_s", "cpu_s", "peak_anonymous_b", "difference")
OURS = ("task_arithmetic", "auto", "ct_merging", "tsv", "dc_merge", "knots", "ties")
PEFT = ("cat", "peft-ties", "svd")
SUMS = ("task_arithmetic", "cat", "svd")


def side(name: str, adapters: list[Path], out: Path, shape: tuple[int, int, int]) -> None:
    """What a child process does; its seconds go to `out/seconds.json`."""
    seconds = (
        actmat_side(adapters, out, name)
        if name in OURS
        else peft_side(adapters, out, name.removeprefix("peft-"), shape)
    )
    (out / "seconds.json").write_text(json.dumps(seconds))


def row(name: str, place: Path, scratch: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """One method or combination in a process of its own."""
    out = scratch / name
    out.mkdir()
    command = [sys.executable, "-m", "benchmarks.adapters", "--side", name, "--place", place, "--out", out]
    given = [str(word) for size, value in sizes.items() for word in (f"--{size}", value)]
    run = measure([*command, *given], OMP_NUM_THREADS="2", **SOURCE)
    seconds = json.loads((out / "seconds.json").read_text())
    costs = {"merge_s": seconds, "process_s": run.wall_s, "cpu_s": run.cpu_s, "peak_anonymous_b": run.peak_anonymous_b}
    if name == SUMS[0]:
        shutil.copytree(out / "merged", fresh(place.parent / f"{place.name}-sum"))
    found = {"tool": "actmat" if name in OURS else "PEFT", "method": name, **costs}
    if name in SUMS[1:]:
        found["difference"] = difference(place.parent / f"{place.name}-sum", out / "merged")
    return found


def main() -> None:
    """Command line."""
    parser = program(__doc__, "adapters")
    sizes = {"adapters": 64, "rank": 16, "hidden": 4096, "intermediate": 11008, "layers": 1}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", nargs="+", choices=[*OURS, *PEFT], default=[*OURS, *PEFT])
    parser.add_argument("--maps", nargs="+", default=[], help="as q_proj: adapters of these maps only")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = {name: getattr(given, name) for name in sizes}
    n, rank, *shape = sizes.values()
    place = given.place or WORK / f"adapters-{'x'.join([*map(str, sizes.values()), *given.maps])}"
    adapters = write_adapters(place, n, rank, shape[0], shape[1], shape[2], given.maps)
    if given.side:
        side(given.side, adapters, given.out, (shape[0], shape[1], shape[2]))
        return
    before = read_result(given.name) if (RESULTS / f"{given.name}.json").exists() else {"rows": []}
    same = all(before.get(name, []) == value for name, value in {**sizes, "maps": given.maps}.items())
    rows = {row["method"]: row for row in before["rows"] if same}  # those that are not run again
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        for name in given.only:
            rows[name] = row(name, place, Path(scratch), sizes)
            listed = [rows[n] for n in (*OURS, *PEFT) if n in rows]
            finish(given.name, listed, COLUMNS, maps=given.maps, **sizes)


if __name__ == "__main__":
    main()
