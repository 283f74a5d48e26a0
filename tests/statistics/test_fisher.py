"""The diagonal Fisher against one naive backward pass per sample and label."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.models import BY_NAME, VOCABULARY
from tests.tolerances import F32_PRODUCT, F64_IDENTITY, relative_error
from torch import Tensor, nn

from actmat.errors import StatisticsError
from actmat.extras.collect.collect import collect
from actmat.extras.collect.files import merge_statistics
from actmat.statistics import open_statistics


class Classifier(nn.Module):
    """Logits of a two-layer net, as transformers would wrap them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return type("Output", (), {"logits": self.net(x)})()


def naive(model: Classifier, x: Tensor, labels: list[Tensor]) -> dict[str, Tensor]:
    """`labels[n]`: probability of every label of sample n, over which the squared gradients are averaged."""
    out = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for n in range(len(x)):
        for label, share in enumerate(labels[n]):
            model.zero_grad()
            log_p = model.net(x[n : n + 1]).log_softmax(-1)[0, label]
            log_p.backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    out[name] += share * p.grad**2
    model.zero_grad()
    return {n: f.detach() / len(x) for n, f in out.items()}


def test_given_labels(tmp_path: Path) -> None:
    model, x = Classifier(), torch.randn(5, 4, dtype=torch.float64)
    labels = torch.tensor([0, 2, 1, 1, 0])
    batches = [{"x": x[:2], "labels": labels[:2]}, {"x": x[2:], "labels": labels[2:]}]
    collect(model, batches, fisher=True, gram=False, fisher_labels="given", out=tmp_path / "s", dtype="float64")
    expected = naive(model, x, list(torch.eye(3, dtype=torch.float64)[labels]))
    with open_statistics(tmp_path / "s") as found:
        assert found.header.kinds == {"fisher"}
        for name, value in expected.items():
            assert relative_error(found.fisher(name, dtype=torch.float64), value) < F64_IDENTITY
    assert not model.frozen.requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_drawn_labels_tend_to_the_expectation_and_follow_the_seed() -> None:
    model = Classifier()
    x = torch.randn(1, 4, dtype=torch.float64).expand(600, 4)
    probabilities = list(model.net(x[:1]).softmax(-1).detach())
    expected = naive(model, x[:1], probabilities)
    first, again, other = (
        collect(model, [{"x": x[:4]}], fisher=True, gram=False, seed=s).header.fisher for s in (1, 1, 2)
    )
    assert first == again
    assert first != other
    result = collect(model, [{"x": x}], fisher=True, gram=False, dtype="float64", seed=1)
    for name in ("net.0.weight", "net.2.bias"):
        mean = result.tensors[f"fisher.{name}"] / 600
        assert relative_error(mean, expected[name]) < 0.2  # 600 draws: standard error of 4 to 10 per cent


def test_language_models_sum_over_tokens_and_leave_padding_out(tmp_path: Path) -> None:
    case = BY_NAME["gpt2"]
    case.build().save_pretrained(tmp_path / "m")
    model = case.loader.from_pretrained(tmp_path / "m").eval()
    ids = torch.randint(3, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    labels = ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    result = collect(model, [batch], fisher=True, gram=False, fisher_labels="given")
    name = "transformer.h.0.mlp.c_fc.weight"
    total = torch.zeros_like(model.get_parameter(name))
    for n in range(2):
        log_p = model(input_ids=ids[n : n + 1], attention_mask=mask[n : n + 1]).logits.log_softmax(-1)
        value = sum(log_p[0, s, ids[n, s + 1]] for s in range(4) if mask[n, s + 1])
        (gradient,) = torch.autograd.grad(value, [model.get_parameter(name)])
        total += gradient**2
    assert relative_error(result.tensors[f"fisher.{name}"], total) < F32_PRODUCT


def test_what_the_fisher_cannot_do_is_said() -> None:
    x = torch.randn(2, 4, dtype=torch.float64)
    with pytest.raises(StatisticsError, match="needs 'labels' in every batch"):
        collect(Classifier(), [{"x": x}], fisher=True, fisher_labels="given")
    with pytest.raises(StatisticsError, match="no logits"):
        collect(nn.Linear(4, 2).double(), [{"input": x}], fisher=True)
    with pytest.raises(StatisticsError, match="needs loss="):
        collect(nn.Linear(4, 2).double(), [x], fisher=True)


def test_files_add_up_only_with_labels_from_one_source(tmp_path: Path) -> None:
    model, name = Classifier(), "net.0.weight"
    for n, source in enumerate(("given", "given", "drawn")):
        x, labels = torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 3
        collect(model, [{"x": x, "labels": labels}], fisher=True, gram=False, fisher_labels=source,
                out=tmp_path / str(n), dtype="float64")  # fmt: skip
    merge_statistics([tmp_path / "0", tmp_path / "1"], tmp_path / "both")
    with open_statistics(tmp_path / "0") as one, open_statistics(tmp_path / "1") as two:
        expected = (one.fisher(name, dtype=torch.float64) + two.fisher(name, dtype=torch.float64)) / 2
    with open_statistics(tmp_path / "both") as both:
        assert (both.header.fisher_samples, both.header.fisher_labels) == (10, "given")
        assert relative_error(both.fisher(name, dtype=torch.float64), expected) < F64_IDENTITY
    with pytest.raises(StatisticsError, match="took labels for the Fisher from elsewhere than"):
        merge_statistics([tmp_path / "0", tmp_path / "2"], tmp_path / "mixed")
