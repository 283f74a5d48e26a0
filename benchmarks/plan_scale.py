"""What do a plan of 100,000 tensors, and a merge of 20,000 small ones, cost in time and memory?

    python -m benchmarks.plan_scale
    python -m benchmarks.plan_scale --layers 2 --small-tensors 500 --name trial

Plans are of a mixture of 66 layers with 512 experts each (102,303 tensors, 1.07e12 parameters) and two fine-tuned
copies. These checkpoints are headers and holes: files of the true size that take a few megabytes of disk, because a
plan reads headers only. *plan* prints it grouped, *plan --json* prints all of it, and
*reload* reads that JSON and makes units of it, as a worker in another process does.

Merges are averages of two experts with tensors of 16 entries, by one worker, not synced. *per tensor* is the difference
of two merges, with all tensors and with half of them, over the difference of their numbers: of the peak, and of the
processor's time.

The peak is of anonymous memory, sampled every 20 ms from outside.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import HERE, WORK, Run, actmat_command, fresh, markdown, measure, write_result

SOURCE = str(HERE.parent / "src")
SHARD_BYTES = 50_000_000_000
COLUMNS = ("case", "tensors", "wall_s", "cpu_s", "peak_anonymous_b", "per_tensor_kb", "per_tensor_cpu_ms")
RELOAD = """
import json, sys
from actmat.engine.units import plan_units
from actmat.planning import MergePlan
plan = MergePlan.from_json(json.load(open(sys.argv[1])))
assert len(plan_units([plan], [()], None)) == len(plan.items)
"""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Mixture:
    """Sizes of a mixture of experts of one trillion parameters."""

    layers: int = 66
    experts: int = 512
    hidden: int = 5120
    inner: int = 2048
    rank: int = 1536
    vocabulary: int = 160_000

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, in storage order."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            shapes |= {
                layer + "input_layernorm.weight": (self.hidden,),
                layer + "self_attn.q_a_proj.weight": (self.rank, self.hidden),
                layer + "self_attn.q_a_layernorm.weight": (self.rank,),
                layer + "self_attn.q_b_proj.weight": (2 * self.hidden, self.rank),
                layer + "self_attn.kv_a_proj_with_mqa.weight": (576, self.hidden),
                layer + "self_attn.kv_a_layernorm.weight": (512,),
                layer + "self_attn.kv_b_proj.weight": (2 * self.hidden, 512),
                layer + "self_attn.o_proj.weight": (self.hidden, self.hidden),
                layer + "post_attention_layernorm.weight": (self.hidden,),
                layer + "mlp.gate.weight": (self.experts, self.hidden),
                layer + "mlp.gate.e_score_correction_bias": (self.experts,),
                **_expert(layer + "mlp.shared_experts.", self.hidden, self.inner),
            }
            for e in range(self.experts):
                shapes |= _expert(f"{layer}mlp.experts.{e}.", self.hidden, self.inner)
        return shapes | {"model.norm.weight": (self.hidden,), "lm_head.weight": (self.vocabulary, self.hidden)}


def _expert(stem: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{stem}gate_proj.weight": (inner, hidden),
        f"{stem}up_proj.weight": (inner, hidden),
        f"{stem}down_proj.weight": (hidden, inner),
    }


def make_sparse(folder: Path, shapes: Shapes, config: Mapping[str, Any]) -> Path:
    """A sharded checkpoint in bfloat16 whose tensors are holes: all zero, of true size, and on no block of the disk."""
    fresh(folder).mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    groups = list(_shards(shapes))
    weight_map = {}
    for i, names in enumerate(groups):
        file = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        _write_sparse(folder / file, {name: shapes[name] for name in names})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _shards(shapes: Shapes) -> Iterator[list[str]]:
    names: list[str] = []
    used = 0
    for name, shape in shapes.items():
        if used + _nbytes(shape) > SHARD_BYTES:
            yield names
            names, used = [], 0
        names.append(name)
        used += _nbytes(shape)
    yield names


def _write_sparse(path: Path, shapes: Shapes) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + _nbytes(shape)]}
        end += _nbytes(shape)
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def _nbytes(shape: Sequence[int]) -> int:
    total = 2
    for size in shape:
        total *= size
    return total


def plan_rows(folder: Path, mixture: Mixture) -> list[dict[str, Any]]:
    """Plans of the mixture: printed, as JSON, and read again."""
    shapes = mixture.tensors()
    config = {"model_type": "deepseek_v3", "hidden_size": mixture.hidden, "tie_word_embeddings": False}
    places = [make_sparse(folder / name, shapes, config) for name in ("base", "expert-0", "expert-1")]
    inputs = ["--base", str(places[0]), *(x for p in places[1:] for x in ("--expert", str(p)))]
    kept = folder / "plan.json"
    as_json = "import sys; from actmat.cli.main import main; sys.stdout = open(sys.argv.pop(), 'w'); sys.exit(main())"
    commands = {
        "plan": [*actmat_command(), "plan", *inputs],
        "plan --json": [*actmat_command()[:2], as_json, "plan", *inputs, "--json", "--full", str(kept)],
        "reload": [actmat_command()[0], "-c", RELOAD, str(kept)],
    }
    return [_row(case, len(shapes), run(command)) for case, command in commands.items()]


def merge_rows(folder: Path, tensors: int) -> list[dict[str, Any]]:
    """Merges of so many small tensors, of half of them, and what a tensor adds."""
    rows = []
    for count in (tensors // 2, tensors):
        shapes = {f"model.layers.{i}.mlp.down_proj.weight": (4, 4) for i in range(count)}
        places = [make_sparse(folder / f"{name}-{count}", shapes, {}) for name in ("b", "e0", "e1")]
        inputs = ["--base", str(places[0]), *(x for p in places[1:] for x in ("--expert", str(p)))]
        flags = ["--method", "average", "--threads", "1", "--no-fsync", "--quiet", "--out", str(fresh(folder / "out"))]
        rows.append(_row("merge, small tensors", count, run([*actmat_command(), "merge", *inputs, *flags])))
    more = rows[1]["tensors"] - rows[0]["tensors"]
    rows[1]["per_tensor_kb"] = (rows[1]["peak_anonymous_b"] - rows[0]["peak_anonymous_b"]) / more / 1000
    rows[1]["per_tensor_cpu_ms"] = (rows[1]["cpu_s"] - rows[0]["cpu_s"]) / more * 1000
    return rows


def run(command: Sequence[str]) -> Run:
    """One child with the library of this working tree."""
    return measure(command, PYTHONPATH=SOURCE, OMP_NUM_THREADS="1")


def _row(case: str, tensors: int, child: Run) -> dict[str, Any]:
    return {
        "case": case,
        "tensors": tensors,
        "wall_s": child.wall_s,
        "cpu_s": child.cpu_s,
        "peak_anonymous_b": child.peak_anonymous_b,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=Mixture.layers)
    parser.add_argument("--small-tensors", type=int, default=20_000)
    parser.add_argument("--name", default="plan_scale", help="name of the result file")
    given = parser.parse_args()
    folder = WORK / "plan_scale"
    rows = [*plan_rows(folder, Mixture(layers=given.layers)), *merge_rows(folder, given.small_tensors)]
    print(markdown(rows, COLUMNS))
    print(write_result(given.name, rows, columns=COLUMNS))


if __name__ == "__main__":
    main()
