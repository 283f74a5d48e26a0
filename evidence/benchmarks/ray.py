"""What Ray costs, and how a merge of 70 B would spread over a cluster.

    python -m benchmarks.ray
    python -m benchmarks.ray --repeats 5 --layers 8          # longer merges: the start of the workers weighs less
    python -m benchmarks.ray --only small --tensors 20000
    python -m benchmarks.ray --only schedule                 # needs no Ray, half a minute

Both run on the same two cores, in turn, pair by pair; the ratio is the median over the pairs. The Ray cluster is one
node of two cores that runs before; the workers start within the measured time. `wall_s` is the whole command, `merge_s`
the run as its manifest tells. The outputs must be the same bytes. `driver_ms` is the user and system time of the
driver's process, with its start, per tensor: the workers are not its children.

`schedule` plans a merge of a 70 B Llama and three experts from headers alone. An item takes its planned operations at
the rate that three experts' matrices of its proportions, a quarter as wide, reach on one core here. Items go longest
first to the worker that is free first, as in a merge. *disk*: time to read the inputs and write the output once at
`--disk-gbps` for all nodes together.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import statistics
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import actmat
from benchmarks.common import (
    RESULTS,
    WORK,
    Run,
    alternate,
    finish,
    merge_words,
    merged,
    program,
    read_result,
    timed,
    torch_threads,
    weights_digest,
)
from benchmarks.make_llama import Size, add_size_arguments, home, make_family, size_from, write_headers

CORES = 2
COLUMNS = ("case", "tensors", "threads_wall_s", "ray_wall_s", "wall_ratio", "merge_ratio", "driver_ms", "load")
SCHEDULE = ("nodes", "workers", "compute_s", "busy", "longest_share", "disk_s", "disk_share", "node_b")
STORE_BYTES = 200 << 20


def make_small(folder: Path, tensors: int, experts: int) -> tuple[Path, list[Path]]:
    """A checkpoint of many matrices of 16 x 16 entries, and experts of it."""
    places = [folder / "base", *(folder / f"expert-{t}" for t in range(experts))]
    config = {**Size(hidden=16, layers=tensors).config("float32")}
    for seed, place in enumerate(places):
        if not (place / "config.json").exists():
            place.mkdir(parents=True, exist_ok=True)
            values = torch.randn(tensors, 16, 16, generator=torch.Generator().manual_seed(seed))
            names = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(tensors)]
            save_file({name: values[n].clone() for n, name in enumerate(names)}, place / "model.safetensors")
            (place / "config.json").write_text(json.dumps(config))
    return places[0], places[1:]


@contextlib.contextmanager
def cluster(cores: int) -> Iterator[str]:
    """Address of a cluster of one node that counts as so many cores, on 127.0.0.1."""
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray reads it on import, children inherit it
    from ray.cluster_utils import Cluster

    node = {"num_cpus": cores, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    running = Cluster(initialize_head=True, head_node_args=node)
    try:
        yield running.address
    finally:
        running.shutdown()


def pairs(case: str, base: Path, experts: list[Path], method: str, address: str, repeats: int) -> dict[str, Any]:
    """Alternate both executors; one row of the table."""
    executors = {"threads": "threads", "ray": f"ray={address}"}
    outs = {name: WORK / "out" / f"{case}-{name}" for name in executors}
    inside: dict[str, list[float]] = {name: [] for name in executors}
    loads, words = list[float](), merge_words(base, experts, method)

    def run(name: str) -> Run:
        loads.append(round(os.getloadavg()[0], 2))
        found = merged(words, outs[name], "--set", f"executor={executors[name]}", "--threads", str(CORES))
        inside[name].append(manifest(name)["timing"]["seconds"])
        return found

    def manifest(name: str) -> dict[str, Any]:
        return dict(json.loads((outs[name] / "actmat_manifest.json").read_text()))

    found = alternate({name: partial(run, name) for name in executors}, repeats)
    count = len(manifest("ray")["tensors"])
    if len({weights_digest(out) for out in outs.values()}) > 1:
        raise SystemExit(f"{case}: the bytes depend on the executor")
    walls = {name: [r.wall_s for r in runs] for name, runs in found.items()}
    return {
        "case": case,
        "tensors": count,
        "threads_wall_s": statistics.median(walls["threads"]),
        "ray_wall_s": statistics.median(walls["ray"]),
        "wall_ratio": statistics.median(r / t for r, t in zip(walls["ray"], walls["threads"], strict=True)),
        "merge_ratio": statistics.median(r / t for r, t in zip(inside["ray"], inside["threads"], strict=True)),
        "driver_ms": 1000 * statistics.median(r.cpu_s for r in found["ray"]) / count,
        "load": max(loads),
        "loads": loads,
        "all_wall_s": {name: [round(s, 3) for s in of] for name, of in walls.items()},
        "all_merge_s": {name: [round(s, 3) for s in of] for name, of in inside.items()},
    }


# A merge of 70 B

LLAMA_70B = Size(hidden=8192, intermediate=28672, layers=80, heads=64, key_value_heads=8, vocabulary=128256)
NODES = (1, 8, 64)


@cache
def seconds_of(rows: int, width: int) -> float:
    """Time of `actmat_ridge` on a matrix, on one thread, by the rate of operations at a quarter of its sides."""
    from actmat.methods import get_method

    rule = get_method("actmat_ridge")
    deltas = [torch.randn(rows // 4, width // 4) for _ in range(3)]
    options = rule.resolve_options({})
    planned = rule.cost.operations((rows // 4, width // 4), 3, options)
    with torch_threads(1):
        return rule.cost.operations((rows, width), 3, options) * timed(lambda: rule.merge(deltas), 1) / planned


def schedule(disk_gbps: float, node_memory_b: int) -> list[dict[str, Any]]:
    """One row per number of nodes."""
    places = [write_headers(WORK / "llama-70b" / name, LLAMA_70B) for name in ("base", "one", "two", "three")]
    plan = actmat.plan(places[0], places[1:], method="actmat_ridge")
    of_matrix = [item.action == "merge" and len(item.shape) == 2 for item in plan.items]
    times = [seconds_of(*i.shape) if is_one else 0.0 for i, is_one in zip(plan.items, of_matrix, strict=True)]
    times.sort(reverse=True)
    per_node = node_memory_b // plan.peak_bytes(1)
    rows = []
    for nodes in NODES:
        free = [0.0] * (nodes * per_node)
        for seconds in times:
            heapq.heapreplace(free, free[0] + seconds)
        disk = (plan.read_bytes + plan.write_bytes) / disk_gbps / 1e9
        busy = sum(times) / max(free) / len(free)
        rows.append(
            {"nodes": nodes, "workers": len(free), "compute_s": max(free), "busy": busy, "longest_item_s": times[0]}
            | {"longest_share": times[0] / max(free), "disk_s": disk, "disk_share": disk / max(free)}
            | {"read_b": plan.read_bytes, "write_b": plan.write_bytes, "node_b": per_node * plan.peak_bytes(1)}
        )
    return rows


def main() -> None:
    parser = program(__doc__, "ray", 3)
    parser.add_argument("--only", choices=("large", "small", "schedule"), help="one of the cases")
    parser.add_argument("--disk-gbps", type=float, default=4.0, help="of the storage that all nodes share")
    parser.add_argument("--node-memory-b", type=int, default=128 << 30)
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--tensors", type=int, default=20_000, help="of the case 'small'")
    add_size_arguments(parser)
    parser.set_defaults(hidden=1024, intermediate=2816, layers=6)
    given = parser.parse_args()
    if given.only == "schedule":
        finish("ray-schedule", schedule(given.disk_gbps, given.node_memory_b), SCHEDULE, disk_gbps=given.disk_gbps)
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # children and the cluster inherit it
    there = given.only and (RESULTS / f"{given.name}.json").exists()
    kept = read_result(given.name)["rows"] if there else []  # the case that is not run again keeps its row
    rows = [row for row in kept if row["case"] != given.only]
    size = size_from(given)
    with cluster(CORES) as address:
        if given.only != "small":
            base, experts = make_family(home(WORK, size, "bfloat16"), size, given.experts, dtype="bfloat16")
            rows.append(pairs("large", base, experts, "actmat", address, given.repeats))
        if given.only != "large":
            base, experts = make_small(WORK / f"small-{given.tensors}", given.tensors, 2)
            rows.append(pairs("small", base, experts, "average", address, min(given.repeats, 2)))
    finish(given.name, rows, COLUMNS, experts=given.experts, cores_used=CORES)


if __name__ == "__main__":
    main()
