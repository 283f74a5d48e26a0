"""Parts of the vision experiments: batches that go on, augmentation, adapters, logs."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from actmat.extras.demo.tasks import generator_for
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.training import Schedule, order_of
from actmat_experiments.vision.train import augmented


def test_batches_go_on_where_they_stopped():
    schedule = Schedule(3, 6, 0.1)
    whole = list(order_of(20, schedule, seed=0, name="a"))
    assert len(whole) == 9
    for first in (1, 3, 5, 8):
        rest = list(order_of(20, schedule, seed=0, name="a", first=first))
        assert [r.tolist() for r in rest] == [w.tolist() for w in whole[first:]]
    epoch = torch.cat(whole[:3])
    assert len(set(epoch.tolist())) == 18, "no example twice in an epoch"
    assert [w.tolist() for w in whole] != [w.tolist() for w in order_of(20, schedule, seed=1, name="a")]


def test_augmentation_moves_and_mirrors_and_depends_on_the_generator():
    images = torch.arange(2 * 3 * 16 * 16).float().reshape(2, 3, 16, 16)
    found = augmented(images, generator_for(0, "x"))
    assert found.shape == images.shape
    assert torch.equal(found, augmented(images, generator_for(0, "x")))
    assert not torch.equal(found, augmented(images, generator_for(1, "x")))
    constant = torch.full((4, 3, 16, 16), 0.5)
    assert torch.equal(augmented(constant, generator_for(0, "x")), constant), "borders are repeated, not black"


def test_every_stage_has_a_log_with_its_end_or_its_failure(tmp_path):
    console = Console(width=80)
    with console.capture() as capture, Watch(console, tmp_path) as watch:
        with watch.stage("experts: full", total=2) as stage:
            stage.advance()
            stage.log("half done")
        with pytest.raises(RuntimeError), watch.stage("experts: lora"):
            raise RuntimeError("broken")
    log = (tmp_path / "experts.log").read_text()
    assert "half done" in log
    assert log.count("begin") == 2
    assert "failed experts: lora" in log
    assert "RuntimeError('broken')" in log
    assert "experts: full: " in capture.get()
