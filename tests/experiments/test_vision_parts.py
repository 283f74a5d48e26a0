"""Parts of the vision experiments: batches that go on, augmentation, adapters, logs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from actmat.extras.demo.model import Head
from actmat.extras.demo.tasks import generator_for
from actmat_experiments.harness.models import with_adapter
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.training import Schedule, Training, order_of
from actmat_experiments.vision.backbones import PLAIN_SCALE, Backbone
from actmat_experiments.vision.images import Examples
from actmat_experiments.vision.train import augmented, finetune

VIT = Backbone("vit", 16, PLAIN_SCALE)


def examples(n: int = 20) -> Examples:
    rng = np.random.default_rng(0)
    return Examples(rng.integers(0, 255, (n, 16, 16, 3), dtype=np.uint8), torch.arange(n) % 2)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    from transformers import ViTConfig, ViTModel

    folder = tmp_path_factory.mktemp("base")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ViTModel(ViTConfig(image_size=16, patch_size=8, **sizes), add_pooling_layer=False).save_pretrained(folder)
    return folder


def head() -> Head:
    return Head(torch.randn(2, 8, generator=generator_for(0, "head")), torch.zeros(2))


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


def test_an_interrupted_expert_goes_on_to_the_same_weights(base, tmp_path):
    schedule = Schedule(2, 5, 1e-2)
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    how = Training("a", 0, schedule, save_every=4)
    finetune(VIT, base, head(), examples(), how, tmp_path / "whole")
    steps = []

    def stop() -> None:
        steps.append(1)
        if len(steps) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(VIT, base, head(), examples(), how, tmp_path / "broken", on_step=stop)
    assert (tmp_path / "broken" / "state.pt").is_file()
    finetune(VIT, base, head(), examples(), how, tmp_path / "broken")
    whole, broken = (load_file(tmp_path / w / "model.safetensors") for w in ("whole", "broken"))
    assert all(torch.equal(whole[n], broken[n]) for n in whole)
    assert not (tmp_path / "broken" / "state.pt").exists()
    start = load_file(base / "model.safetensors")
    assert any(not torch.equal(whole[n], start[n]) for n in whole)


def test_only_the_factors_of_an_adapter_are_trained_and_the_base_is_not(base, tmp_path):
    before = {n: t.clone() for n, t in load_file(base / "model.safetensors").items()}
    seen = []
    schedule = Schedule(1, 5, 1e-2)

    def callbacks(model):
        seen.append({n for n, p in model.named_parameters() if p.requires_grad})
        return ()

    fixed = head()
    weight = fixed.weight_CD.clone()
    how = Training("a", 0, schedule, "lora", rank=2)
    finetune(VIT, base, fixed, examples(), how, tmp_path / "adapter", callbacks=callbacks)
    assert seen[0]
    assert all(".lora_" in name for name in seen[0])
    assert all(torch.equal(t, before[n]) for n, t in load_file(base / "model.safetensors").items())
    assert torch.equal(fixed.weight_CD, weight)
    images = PLAIN_SCALE(torch.from_numpy(examples(3).pixels_NSSC))
    with torch.no_grad():
        expert, start = (
            VIT.features(m, images) for m in (with_adapter(VIT.load, base, tmp_path / "adapter"), VIT.load(base))
        )
    assert not torch.allclose(expert, start, atol=1e-4)


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
