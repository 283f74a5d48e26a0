"""A merge method of your own beside five others: accuracy on two tasks of scanned digits, as a table and a plot."""

from pathlib import Path

import torch
from matplotlib.figure import Figure

import actmat
from actmat.extras.demo.model import features, load_encoder
from actmat.extras.demo.training import DemoSettings, fit_heads, load_data


def largest(deltas, *, scale=1.0):
    """Entry by entry, the delta of largest size."""
    stacked = torch.stack(list(deltas))
    return scale * stacked.gather(0, stacked.abs().argmax(0, keepdim=True))[0]


tasks, models = ("parity", "large"), Path("demo-output")
data = load_data(DemoSettings(), seed=0)
encoder = load_encoder(models / "base")
heads = fit_heads(encoder, data, DemoSettings())
right = {}
for method in (largest, "average", "task_arithmetic", "ties", "tsv", "actmat"):
    merged = actmat.merge(models / "base", [models / "experts" / task for task in tasks], method=method)
    encoder.load_state_dict(merged.tensors)
    tests = {task: data[task].test for task in tasks}
    answers = [heads[n](features(encoder, t.images_NHW)).argmax(1) == t.labels_N for n, t in tests.items()]
    right[getattr(method, "__name__", method)] = torch.stack(answers).double().mean(0)

axes = Figure(layout="constrained").subplots()
for name, scores in right.items():
    gains = 100 * (scores - right["average"])
    half = 1.96 * gains.std() / len(gains) ** 0.5
    print(f"{name:16}{scores.mean():.1%}{gains.mean():+6.1f} ±{half:.1f} over the average")
    axes.errorbar(gains.mean(), name, xerr=half, fmt="o", capsize=3)
axes.set_xlabel("points above the average, 95 % interval over photographs")
axes.figure.savefig("my_method.png")
