"""Two models on the same inputs: what counts, what is refused, how it adds up."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actmat.errors import StatisticsError
from actmat.extras.collect.agreement import agreement


class Table(nn.Module):
    """Looks logits up by token id: `B S -> B S C`, as a language model's output."""

    def __init__(self, rows: list[list[float]]) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.tensor(rows))
        self.dropout = nn.Dropout(0.9)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.dropout(self.rows[input_ids]))


MERGED = Table([[2.0, 1.0], [0.0, 3.0], [5.0, -5.0]])
EXPERT = Table([[1.0, 2.0], [0.0, 3.0], [-5.0, 5.0]])


def kl(expert: list[float], merged: list[float]) -> float:
    p, q = ([math.exp(x) / sum(map(math.exp, row)) for x in row] for row in (expert, merged))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def test_predictions_of_all_batches_count_alike() -> None:
    """Three tokens of id 0 and one of id 1, in batches of three and one."""
    batches = [{"input_ids": torch.tensor([[0, 0, 0]])}, {"input_ids": torch.tensor([[1]])}]
    found = agreement(MERGED, EXPERT, batches)
    assert found.predictions == 4
    assert found.disagreement == pytest.approx(0.75)
    assert found.divergence == pytest.approx(0.75 * kl([1.0, 2.0], [2.0, 1.0]))


IDS, DECODED = torch.tensor([[0, 1, 2]]), {"decoder_input_ids": torch.tensor([[0, 1]])}
ENCODED = {"input_ids": torch.tensor([[0, 1]]), "attention_mask": torch.tensor([[1, 0]])} | DECODED


@pytest.mark.parametrize(
    ("batch", "mask", "predictions", "disagreement"),
    [
        ({"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 0]])}, None, 2, 0.5),
        ({"input_ids": IDS}, lambda b: b["input_ids"] == 1, 1, 0.0),
        (ENCODED, None, 2, 0.5),
        (ENCODED | {"decoder_attention_mask": torch.tensor([[1, 0]])}, None, 1, 1.0),
        (ENCODED | {"decoder_attention_mask": torch.tensor([[1, 1]]), "labels": torch.tensor([[-100, 1]])}, None, 1, 0),
    ],
    ids=["padding", "mask of one's own", "not the encoder's mask", "the decoder's mask", "targets"],
)
def test_predictions_that_count(batch: Any, mask: Any, predictions: int, disagreement: float) -> None:
    found = agreement(MERGED, EXPERT, [batch], mask=mask)
    assert (found.predictions, found.disagreement) == (predictions, disagreement)


def test_an_expert_agrees_with_itself_and_keeps_its_mode() -> None:
    EXPERT.train()
    found = agreement(EXPERT, EXPERT, [torch.tensor([[0, 1, 2]])])
    assert (found.disagreement, found.divergence, found.predictions) == (0.0, 0.0, 3)
    assert EXPERT.training
    assert EXPERT.dropout.training


def test_a_head_is_put_on_features() -> None:
    """Encoders give features; the expert's head makes answers of both."""
    torch.manual_seed(0)
    merged, expert, head = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 5)
    images = torch.randn(6, 4)
    found = agreement(merged, expert, [(images,)], logits=head)
    expected = (head(merged(images)).argmax(1) != head(expert(images)).argmax(1)).float().mean()
    assert found.disagreement == pytest.approx(float(expected))
    assert found.predictions == 6


def test_what_cannot_be_compared_is_refused() -> None:
    wider = Table([[1.0, 2.0, 3.0]] * 3)
    with pytest.raises(StatisticsError, match="same question"):
        agreement(wider, EXPERT, [torch.tensor([[0]])])
    with pytest.raises(StatisticsError, match="No predictions to compare"):
        agreement(MERGED, EXPERT, [])
    with pytest.raises(StatisticsError, match="NaN or infinite"):
        agreement(Table([[math.nan, 1.0]]), EXPERT, [torch.tensor([[0]])])
    with pytest.raises(StatisticsError, match=r"mask has the shape \(2,\)"):
        agreement(MERGED, EXPERT, [{"input_ids": IDS}], mask=lambda b: torch.ones(2))
    with pytest.raises(StatisticsError, match="has no logits"):
        agreement(MERGED, EXPERT, [torch.tensor([[0]])], logits=lambda output: "none")
