"""The training loop that all experiments share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from actmat.extras.demo.tasks import generator_for
from actmat_experiments.harness.training import Resume, Schedule, descend, side_by_side

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
