"""One layer and the head of a Llama of 1.1 B parameters, whole processes: `actmat` against the published formula.

    python -m benchmarks.layer
    python -m benchmarks.layer --hidden 512 --intermediate 1408 --vocabulary 1000 --repeats 1

Three experts in bfloat16 whose deltas have singular values `i^-0.7`. *actmat* is the command with two workers, *full*
the same with `solver=eigh`, which decomposes all of every `S`; *naive* evaluates the formula with a pseudo-inverse by
SVD in float32, matrix by matrix, on two threads, and writes no file. `times_slower` is against *actmat*.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.common import WORK, Run, finish, merge_words, merged, once, program, torch_threads
from benchmarks.make_llama import INITIAL_RMS, Size, noise
from benchmarks.matrix import make_deltas, naive_actmat

COLUMNS = ("way", "threads", "wall_s", "cpu_s", "peak_anonymous_b", "times_slower", "load")
SPECTRUM, EXPERTS, THREADS = "power0.7", 3, 2


def make_inputs(folder: Path, size: Size) -> tuple[Path, list[Path]]:
    """Base and experts, made once."""
    places = [folder / "base", *(folder / f"expert-{t}" for t in range(EXPERTS))]
    if (folder / "made").exists():
        return places[0], places[1:]
    shapes = {n: s for n, s in size.tensors().items() if len(s) == 2 and "embed" not in n}
    stored: list[dict[str, torch.Tensor]] = [{} for _ in places]
    for name, shape in shapes.items():
        base = noise(name, shape, 0).mul_(INITIAL_RMS).bfloat16()
        stored[0][name] = base
        for own, delta in zip(stored[1:], make_deltas(EXPERTS, *shape, SPECTRUM), strict=True):
            own[name] = (base.float() + delta).bfloat16()
    for place, tensors in zip(places, stored, strict=True):
        place.mkdir(parents=True, exist_ok=True)
        save_file(tensors, place / "model.safetensors", {"format": "pt"})
        (place / "config.json").write_text(json.dumps(size.config("bfloat16")))
    (folder / "made").touch()
    return places[0], places[1:]


def merge(base: Path, experts: list[Path], solver: str) -> Any:
    """One merge by the command."""
    os.sync()
    words = merge_words(base, experts, "actmat", "--option", f"solver={solver}", "--threads", str(THREADS))
    return merged(words, WORK / "out" / f"layer-{solver}")


def formula(base: Path, experts: list[Path]) -> None:
    """The published formula on every matrix."""
    before = load_file(base / "model.safetensors")
    after = [load_file(e / "model.safetensors") for e in experts]
    for name, tensor in before.items():
        tensor.float().add_(naive_actmat([e[name].float() - tensor.float() for e in after]))


def main() -> None:
    """Run all ways in turn and write benchmarks/results/layer.json."""
    parser = program(__doc__, "layer", 3)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--full-repeats", type=int, default=1, help="runs of the slower ways")
    given = parser.parse_args()
    size = Size(hidden=given.hidden, intermediate=given.intermediate, layers=1, vocabulary=given.vocabulary)
    base, experts = make_inputs(WORK / f"layer-{given.hidden}-{given.intermediate}-{given.vocabulary}", size)
    loads: dict[str, list[float]] = {"actmat": [], "full": [], "naive": []}
    runs: dict[str, list[Run]] = {way: [] for way in loads}
    for repeat in range(given.repeats):
        for way in loads if repeat < given.full_repeats else ("actmat",):
            loads[way].append(os.getloadavg()[0])
            if way == "naive":
                with torch_threads(THREADS):
                    seconds = once(lambda: formula(base, experts))
                runs[way].append(Run(seconds, seconds, 0))
            else:
                runs[way].append(merge(base, experts, "auto" if way == "actmat" else "eigh"))
            print(f"  {way} {runs[way][-1].wall_s:.1f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for way, done in runs.items():
        measures = ("wall_s",) if way == "naive" else ("wall_s", "cpu_s", "peak_anonymous_b")
        row = {"way": way, **{k: statistics.median(getattr(r, k) for r in done) for k in measures}}
        rows.append({**row, "all_wall_s": [r.wall_s for r in done], "load": max(loads[way])})
    for row in rows:
        row |= {"threads": THREADS, "times_slower": row["wall_s"] / rows[0]["wall_s"]}
    finish(given.name, rows, COLUMNS, experts=EXPERTS, spectrum=SPECTRUM)


if __name__ == "__main__":
    main()
