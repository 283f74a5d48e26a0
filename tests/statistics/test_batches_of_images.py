"""Batches that hold pixels and no tokens are recorded as images, whoever measures them."""

import pytest
import torch
from torch import Tensor, nn

from actmat.extras.collect.collect import collect
from actmat.statistics.header import is_of_images


class Sees(nn.Module):
    """Takes pixels, and tokens too if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, pixel_values: Tensor, input_ids: Tensor | None = None) -> Tensor:
        del input_ids
        return self.layer(pixel_values)


PIXELS, TOKENS = torch.ones(3, 4), torch.ones(3, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batches", "of_images"),
    [
        ([{"pixel_values": PIXELS}], True),
        ([{"pixel_values": PIXELS, "input_ids": TOKENS}], False),
        ([{"pixel_values": PIXELS}, {"pixel_values": PIXELS, "input_ids": TOKENS}], False),
        ([PIXELS], False),
    ],
)
def test_images_are_images_from_python_too(batches: list[dict[str, Tensor] | Tensor], of_images: bool) -> None:
    found = collect(Sees(), batches)
    assert is_of_images(found.header) is of_images
    assert found.header.data[0].details == ({"inputs": "images"} if of_images else {})
