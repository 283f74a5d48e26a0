"""Fine-tuning: batches, loss in pieces, stopping, going on after an interruption, LoRA."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from benchmarks.common import relative_error
from evidence.tests.helpers.language import some_items, tiny_model
from evidence.tests.helpers.tolerances import F32_PRODUCT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actmat.engine.resources import one_thread
from actmat_experiments.harness.models import add_adapter, is_adapter, with_adapter
from actmat_experiments.harness.training import Progress
from actmat_experiments.language.exams import chosen
from actmat_experiments.language.models import load_t5
from actmat_experiments.language.train import FineTuning, batch_at, finetune, summed_loss

SETTINGS = FineTuning(
    learning_rate=1e-2,
    batch_size=8,
    piece_tokens=40,
    max_updates=12,
    validate_every=4,
    patience=5,
    precision="no",
    max_length=16,
)
TRAIN, VALIDATION = some_items(40, seed=1), some_items(16, seed=2)


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def fit(folder, model=None, settings=SETTINGS, **more) -> tuple[object, Progress]:
    folder.mkdir(exist_ok=True)
    model = model or tiny_model()
    done = finetune(model, TRAIN, VALIDATION, settings, seed=3, purpose="test", folder=folder, **more)
    return model, done


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine stalls at times
@given(n=st.integers(1, 30), size=st.integers(1, 40), epochs=st.integers(1, 3))
def test_batches_pass_over_all_items_again_and_again(n: int, size: int, epochs: int) -> None:
    n_batches = -(-n * epochs // size)
    stream = [i for update in range(n_batches) for i in batch_at(n, update, size, 5, "x")]
    assert len(stream) == n_batches * size
    for epoch in range(epochs):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_the_loss_is_that_of_transformers_and_pieces_add_up() -> None:
    model = tiny_model()
    items = TRAIN[:6]
    whole = summed_loss(model, items, 0, "cpu")
    pieces = sum(summed_loss(model, [item], 0, "cpu") for item in items)
    assert relative_error(pieces.detach(), whole.detach()) < F32_PRODUCT
    (item,) = TRAIN[:1]
    own = model(input_ids=torch.tensor([item.prompt]), labels=torch.tensor([item.target])).loss * len(item.target)
    assert relative_error(summed_loss(model, [item], 0, "cpu").detach(), own.detach()) < F32_PRODUCT


def test_adafactor_moves_every_tensor_by_a_share_of_its_size(tmp_path) -> None:
    one = replace(SETTINGS, max_updates=1, learning_rate=1e-2, optimizer="adafactor")
    model, _ = fit(tmp_path, settings=one)
    start = dict(tiny_model().named_parameters())
    moved = {n: float(((p - start[n]).norm() / start[n].norm()).detach()) for n, p in model.named_parameters()}
    assert max(moved.values()) < 1.01e-2
    assert moved["shared.weight"] > 1e-3  # only the embeddings of tokens that were seen move
    assert all(share > 5e-3 for name, share in moved.items() if name.endswith("wi.weight"))


class Interrupted(Exception):
    pass


@pytest.mark.parametrize(("dropout", "optimizer"), [(0.1, "adamw"), (0.0, "adafactor")])
def test_an_interrupted_run_ends_with_the_same_weights(tmp_path, dropout: float, optimizer) -> None:
    chosen_settings = replace(SETTINGS, optimizer=optimizer)

    def model():
        made = tiny_model()
        for module in made.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = dropout
        return made

    def stop(progress: Progress) -> None:
        if progress.update == 6:
            raise Interrupted

    straight, done = fit(tmp_path / "straight", model(), chosen_settings)
    with pytest.raises(Interrupted):
        fit(tmp_path / "broken", model(), chosen_settings, on_update=stop)
    seen = []
    again, done_again = fit(tmp_path / "broken", model(), chosen_settings, on_update=lambda p: seen.append(p.update))
    assert seen == list(range(5, 13))  # from the validation at 4
    assert done_again == done
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), again.parameters(), strict=True))


def test_patience_ends_a_run_and_the_best_weights_are_kept(tmp_path, monkeypatch) -> None:
    import actmat_experiments.language.train as module

    judged = iter([0.5, 0.75, 0.625, 0.75])
    kept = []

    def answers(model, items, **rest) -> torch.Tensor:
        kept.append(copy.deepcopy(model.state_dict()))
        labels = torch.tensor([item.label for item in items])
        wrong = round((1 - next(judged)) * len(items))
        return torch.where(torch.arange(len(items)) < wrong, 1 - labels, labels)

    monkeypatch.setattr(module, "chosen", answers)
    settings = FineTuning(
        learning_rate=1e-2, batch_size=4, max_updates=99, validate_every=1, patience=2, precision="no"
    )
    model, done = fit(tmp_path, settings=settings)
    assert done == Progress(update=4, best=0.75, best_update=2, stale=2)
    assert all(torch.equal(model.state_dict()[n], t) for n, t in kept[1].items())


def test_bfloat16_autocast_trains_float32_weights(tmp_path) -> None:
    model, done = fit(tmp_path, settings=replace(SETTINGS, max_updates=2, validate_every=2, precision="bf16"))
    assert done.update == 2
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.isfinite().all() for p in model.parameters())


def test_lora_adapts_all_linear_layers_but_the_output_and_leaves_the_base(tmp_path) -> None:
    base = tiny_model()
    base.save_pretrained(tmp_path / "base")
    before = copy.deepcopy(base.state_dict())
    linear = {n for n, m in base.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    torch.manual_seed(0)
    model = add_adapter(tiny_model(), 2, alpha=2, task="SEQ_2_SEQ_LM")
    fit(tmp_path / "run", model)
    assert {
        n.split(".lora_")[0].removeprefix("base_model.model.") for n, p in model.named_parameters() if p.requires_grad
    } == linear
    left = {n.removeprefix("base_model.model.").replace(".base_layer", ""): t for n, t in model.state_dict().items()}
    assert all(torch.equal(left[n], t) for n, t in before.items())

    model.save_pretrained(tmp_path / "adapter")
    assert is_adapter(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 2)
    loaded = with_adapter(load_t5, tmp_path / "base", tmp_path / "adapter").merge_and_unload()
    assert torch.equal(chosen(loaded, VALIDATION), chosen(model, VALIDATION))
