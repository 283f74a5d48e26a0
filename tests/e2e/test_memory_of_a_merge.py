"""Peak memory of merges in processes of their own: at most what the plan announces, and not far below."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.helpers.checkpoint_files import save_folder

MERGE = """
import json, sys, threading, time
from actmat.recipe import make_recipe
from actmat.run import plan_recipe, run_recipes
from actmat.settings import RunSettings

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    over = False
    while not over:  # a last look when all is done
        over = done.wait(0.005)
        peak.append(max(peak.pop(), anonymous()))

recipe = make_recipe(json.loads(sys.argv[1]))
start = anonymous()
peak, done = [start], threading.Event()
thread = threading.Thread(target=watch)
thread.start()
plan = plan_recipe(recipe)
run_recipes([recipe], RunSettings(threads=1, durable=False))
done.set()
thread.join()
print(json.dumps({
    "start": start, "peak": peak[0], "foretold": plan.peak_bytes(1), "items": plan.process_bytes,
    "largest": max(item.cost.host_bytes for item in plan.items),
}))
"""


def measured(folder: Path, models: list[dict[str, torch.Tensor]], **fields: object) -> dict[str, int]:
    """Memory of a merge in a child process, in bytes: at its start, at its peak, and as its plan foretells it."""
    paths = [folder / str(k) for k in range(len(models))]
    for path, tensors in zip(paths, models, strict=True):
        save_folder(path, tensors, {})
    recipe = {"base": str(paths[0]), "experts": list(map(str, paths[1:])), "out": str(folder / "out"), **fields}
    command = [sys.executable, "-c", MERGE, json.dumps(recipe)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(found.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_a_tall_head_takes_what_the_plan_says(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    heads = [{"lm_head.weight": torch.randn(131072, 256, generator=draw)} for _ in range(3)]
    found = measured(tmp_path, heads, method="actmat", scope="all")
    assert found["peak"] <= found["foretold"]
    grown = found["peak"] - found["start"]
    # two copies of a delta are counted that only deltas far from 1 take, which are scaled
    assert 0.55 * found["largest"] <= grown <= found["largest"]


def test_many_small_tensors_are_counted(tmp_path: Path) -> None:
    count = 2000
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(count)]
    models = [{name: torch.full((4, 4), float(k)) for name in names} for k in range(3)]
    found = measured(tmp_path, models, method="average")
    assert found["peak"] <= found["foretold"]
    grown = found["peak"] - found["start"]
    counted = found["items"] + found["largest"] - 300_000_000
    assert 0.5 * counted <= grown <= counted


@pytest.mark.slow
def test_an_average_takes_no_more_memory_for_more_checkpoints(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)]
    grown = {}
    for count in (3, 48):
        (tmp_path / str(count)).mkdir()
        models = [{name: torch.full((1024, 2048), float(k)) for name in names} for k in range(count)]
        found = measured(tmp_path / str(count), models, method="linear", scope="all")
        assert found["peak"] <= found["foretold"]
        grown[count] = found["peak"] - found["start"]
    assert grown[48] < grown[3] + 45 * 300_000, grown  # a sample of each of the 45 others, no chunk of 2 MB
