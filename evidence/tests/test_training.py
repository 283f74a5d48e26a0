"""Training of suites, and AdaMerging's loop on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.common import relative_error
from evidence.tests.helpers.tolerances import F32_ELEMENTWISE
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import actmat
from actmat.errors import AlignmentError
from actmat.extras.demo.tasks import generator_for
from actmat.extras.research.adamerging import entropy
from actmat_experiments.adamerging import learn
from actmat_experiments.harness.training import Resume, Schedule, descend, side_by_side

# The training loop that all experiments share.


X, Y = torch.randn(24, 3, generator=generator_for(0, "x")), torch.randn(24, 1, generator=generator_for(0, "y"))


def model() -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(3, 1)


def train(net: nn.Linear, schedule: Schedule, *, stop: int | None = None, **more) -> None:
    per_step = schedule.batch_size // schedule.micro_batches

    def losses(first):
        for step in range(first, schedule.steps(len(X))):
            if step == stop:
                raise KeyboardInterrupt
            yield terms(step % 3 * schedule.batch_size)

    def terms(start):
        for piece in range(schedule.micro_batches):
            at = slice(start + piece * per_step, start + (piece + 1) * per_step)
            yield nn.functional.mse_loss(net(X[at]), Y[at]) / schedule.micro_batches

    descend(list(net.parameters()), losses, schedule.steps(len(X)), schedule, **more)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(4, 8, 0.05, weight_decay=0.1),
        Schedule(4, 8, 0.05, constant=True, optimizer="adafactor", clip=None),
    ],
    ids=lambda s: s.optimizer,
)
def test_a_run_that_goes_on_ends_where_an_uninterrupted_one_does(schedule, tmp_path):
    whole, broken, again = model(), model(), model()
    train(whole, schedule)
    resume = Resume(tmp_path / "state.pt", every=5)
    with pytest.raises(KeyboardInterrupt):
        train(broken, schedule, stop=7, resume=resume)
    steps = []
    train(again, schedule, resume=resume, on_step=lambda: steps.append(1))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    assert len(steps) == 12, "progress counts the steps that were done before"
    assert not torch.equal(whole.weight, model().weight)


def test_pieces_of_a_batch_give_the_gradient_of_the_batch():
    whole, pieces = model(), model()
    train(whole, Schedule(2, 8, 0.05))
    train(pieces, Schedule(2, 8, 0.05, micro_batches=4))
    assert torch.allclose(whole.weight, pieces.weight, atol=1e-6)


def test_rates_and_gradients_are_those_of_the_schedule():
    assert Schedule(1, 1, 0.5, constant=True).rate(0, 100) == 0.5
    assert Schedule(1, 1, 0.5).rate(0, 100) == 0.05
    seen = {}
    for clip in (1e-3, None):
        net = model()
        watch = Seen(net)
        train(net, Schedule(1, 8, 0.05, clip=clip), callbacks=[watch])
        seen[clip] = float(sum(p.grad.square().sum() for p in net.parameters()) ** 0.5)
    assert seen[1e-3] < 1.001e-3 < seen[None]


class Seen:
    def __init__(self, net):
        self.net, self.events = net, []

    def before_step(self, step, loss):
        self.events.append(
            ("before", step, float(loss), self.net.weight.grad.clone(), self.net.weight.detach().clone())
        )

    def after_step(self, step):
        self.events.append(("after", step, None, None, self.net.weight.detach().clone()))


def test_callbacks_see_every_step_its_loss_and_its_gradient():
    net = model()
    seen = Seen(net)
    start = net.weight.detach().clone()
    train(net, Schedule(1, 8, 0.05), callbacks=[seen])
    assert [(e[0], e[1]) for e in seen.events] == [(w, s) for s in range(3) for w in ("before", "after")]
    first = nn.functional.mse_loss(model()(X[:8]), Y[:8])
    assert seen.events[0][2] == pytest.approx(first.item())
    assert torch.equal(seen.events[0][4], start)
    assert not torch.equal(seen.events[1][4], start)
    assert seen.events[0][3].abs().sum() > 0


def test_side_by_side_keeps_the_order_and_raises():
    assert side_by_side(lambda i: i * i, range(5), 3) == [0, 1, 4, 9, 16]
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda i: 1 / i, [1, 0], 2)


# AdaMerging's loop on a tiny model: the gradient, the descent, and what a merge makes of the coefficients.


class Net(nn.Module):
    """Two layers; two tasks look at their own outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def head(task: int, output: Tensor) -> Tensor:
    return output[:, :3] if task == 0 else output[:, 3:]


@pytest.fixture(scope="module")
def setting() -> tuple[Net, dict[str, Tensor], list[dict[str, Tensor]], list[Any]]:
    model = Net().eval()
    base = {k: v.clone() for k, v in model.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    experts = [{k: v + 0.8 * torch.randn(v.shape, generator=generator) for k, v in base.items()} for _ in range(2)]
    data = [torch.randn(3, 16, 6, generator=generator) for _ in range(2)]

    def of(task: int) -> Any:
        def batches() -> Iterator[dict[str, Tensor]]:
            yield from ({"x": x} for x in data[task])

        return batches

    return model, base, experts, [of(0), of(1)]


def merged(
    base: dict[str, Tensor], experts: list[dict[str, Tensor]], rows: dict[str, list[float]]
) -> dict[str, Tensor]:
    return {
        n: (w.double() + sum(c * (e[n].double() - w.double()) for c, e in zip(rows[n], experts, strict=True))).float()
        for n, w in base.items()
    }


def test_the_first_step_goes_down_the_finite_difference(setting: Any) -> None:
    model, base, experts, batches = setting
    one = learn(model, base, experts, batches, steps=1, logits=head, lr=1e-3)

    def loss(c: list[float]) -> float:
        weights = merged(base, experts, dict.fromkeys(base, c))
        terms = [
            entropy(head(t, torch.func.functional_call(model, weights, kwargs=next(batches[t]())))) for t in range(2)
        ]
        return float(sum(terms))

    assert one.losses[0] == pytest.approx(loss([0.3, 0.3]), rel=1e-5)
    for t in range(2):
        up, down = [0.3, 0.3], [0.3, 0.3]
        up[t] += 1e-2
        down[t] -= 1e-2
        slope = loss(up) - loss(down)
        step = float(one.values_LT[0, t]) - 0.3
        assert step == pytest.approx(-1e-3 if slope > 0 else 1e-3, rel=1e-3)  # Adam's first step is the sign


@pytest.mark.parametrize("per", ["task", "tensor"])
def test_entropy_falls_and_a_merge_has_the_coefficients(per: Any, setting: Any, tmp_path: Path) -> None:
    model, base, experts, batches = setting
    found, again = (learn(model, base, experts, batches, per=per, steps=60, lr=2e-2, logits=head) for _ in range(2))
    assert found.losses[-1] < 0.9 * found.losses[0]
    assert found.values_LT.shape == (4, 2)
    assert all(torch.equal(v, base[k]) for k, v in model.state_dict().items()), "the model is left alone"
    assert torch.equal(found.values_LT, again.values_LT)
    assert bool((found.values_LT == found.values_LT[0]).all()) == (per == "task")
    for name, tensors in (("base", base), ("e0", experts[0]), ("e1", experts[1])):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    how: dict[str, Any] = {"rules": found.rules()} if per == "tensor" else {"options": found.options(), "scope": "all"}
    places = [tmp_path / "e0", tmp_path / "e1"]
    actmat.merge(tmp_path / "base", places, out=tmp_path / "out", method="adamerging", **how)
    rows = dict(zip(found.names, found.values_LT.tolist(), strict=True))
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in merged(base, experts, rows).items():
        assert relative_error(written[name], tensor) < F32_ELEMENTWISE


def test_experts_of_other_shapes_and_tasks_without_data(setting: Any) -> None:
    model, base, experts, batches = setting
    other = [{**experts[0], "second.bias": torch.zeros(7)}, experts[1]]
    with pytest.raises(AlignmentError, match=r"'second.bias' is \(6,\) in the base and \(7,\) in expert 0"):
        learn(model, base, other, batches, logits=head)
    with pytest.raises(ValueError, match="no batches"):
        learn(model, base, experts, [lambda: iter(()), batches[1]], logits=head, steps=1)
    headless = [{k: v for k, v in e.items() if k != "second.bias"} for e in experts]
    assert "second.bias" not in learn(model, base, headless, batches, logits=head, steps=1).names
