"""AdaMerging's loop on a tiny model: the gradient, the descent, and what a merge makes of the coefficients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tolerances import F32_ELEMENTWISE, relative_error
from torch import Tensor, nn

import actmat
from actmat.errors import AlignmentError
from actmat.extras.research.adamerging import entropy
from actmat_experiments.adamerging import learn


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
