"""Places of several deltas: each once, together, whatever hands them over; and room for what becomes of them."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.spectra import random_deltas
from torch import Tensor

from actmat.linalg.chunks import Streamed
from actmat.linalg.masks.threshold import true_indices
from actmat.methods import all_methods, get_method


class OneBuffer(Sequence[Tensor]):
    """Deltas that come through one buffer per expert, overwritten by every chunk, and in no other way."""

    def __init__(self, deltas: list[Tensor]) -> None:
        self._deltas = deltas
        self.shape, self.dtype = tuple(deltas[0].shape), deltas[0].dtype

    def __len__(self) -> int:
        return len(self._deltas)

    def __getitem__(self, t: Any) -> Any:
        raise AssertionError("a rule that streams asked for a whole delta")

    def walk(self) -> Iterator[tuple[int, list[Tensor]]]:
        buffers, numel = [torch.empty(16, dtype=self.dtype) for _ in self._deltas], self._deltas[0].numel()
        for start in range(0, numel, 16):
            size = min(16, numel - start)
            both = zip(buffers, self._deltas, strict=True)
            yield start, [b[:size].copy_(d.flatten()[start : start + size]) for b, d in both]

    def result(self) -> Tensor:
        return torch.full(self.shape, float("nan"), dtype=self.dtype)


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("ties", {}),
    ("ties", {"variant": "mergekit", "density": [0.1, 1.0, 0.5]}),
    ("ties", {"variant": "actmat", "weights": [1.0, 2.0, 0.5], "reduce": "sum"}),
    ("breadcrumbs", {"density": [0.5, 0.9, 0.0], "gamma": [0.1, 0.3, 1.0], "weights": [1.0, 2.0, 0.5]}),
    ("breadcrumbs", {"sign_election": True, "reduce": "mean"}),
    ("dare", {"rule": "ties"}),
    ("dare", {"rule": "average", "density": 0.7}),
]


@pytest.mark.parametrize("n_experts", [1, 3])
@pytest.mark.parametrize(("name", "options"), CALLS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_rules_that_stream_ask_for_chunks_only(name: str, options: dict[str, Any], n_experts: int) -> None:
    """The same bits, whatever hands the deltas over; chunks of 16 against one of all 91 entries."""
    method = get_method(name)
    deltas = [d.float().mul(8).round() for d in random_deltas(n_experts, 7, 13)]  # many equal magnitudes
    given = {k: v[:n_experts] if isinstance(v, list) else v for k, v in options.items()}
    assert method.streams(method.resolve_options({k: v for k, v in given.items() if k != "weights"}))

    def merged(source: Sequence[Tensor]) -> Tensor:
        needs: dict[str, Any] = {}
        if method.is_random:
            needs["generator"] = torch.Generator().manual_seed(5)
        return method.merge(source, **needs, **given).value

    streamed = OneBuffer(deltas)
    assert isinstance(streamed, Streamed)
    assert torch.equal(merged(deltas), merged(streamed))


def test_every_rule_that_streams_is_among_the_calls() -> None:
    """Others combine: the engine never calls them with chunks."""
    streaming = {m.name for m in all_methods() if m.access.streams and m.combine is None}
    assert streaming == {name for name, _ in CALLS}


@settings(max_examples=60)
@given(flags=st.lists(st.booleans(), max_size=40))
def test_true_indices_are_those_of_nonzero(flags: list[bool]) -> None:
    assert true_indices(torch.tensor(flags, dtype=torch.bool)).tolist() == [i for i, f in enumerate(flags) if f]
