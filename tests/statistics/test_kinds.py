"""A kind of statistics is a declaration and a measure, an entry each: collected, stored and read like others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.grams import padded_batches
from tests.helpers.models import BY_NAME, VOCABULARY
from tests.tolerances import F64_IDENTITY, relative_error
from torch import Tensor, nn

from actmat.errors import StatisticsError
from actmat.extras.collect.batches import Batch
from actmat.extras.collect.collect import collect
from actmat.extras.collect.combine import merge_statistics
from actmat.extras.collect.inputs.layer_inputs import LayerInputs
from actmat.extras.collect.measures import MEASURES, Run, StoredTensors, store_sums
from actmat.statistics import open_statistics
from actmat.statistics.kinds import KINDS, SumKind, get_kind


class RowTotal:
    """A running sum of rows."""

    def __init__(self, width: int) -> None:
        self.sum = torch.zeros(width, dtype=torch.float64)
        self.rows = 0

    def add(self, rows_NI: Tensor) -> None:
        self.sum += rows_NI.double().sum(0)
        self.rows += len(rows_NI)


class MeanInput:
    """Mean input of every layer, over the tokens of all batches."""

    def __init__(self, run: Run) -> None:
        self._inputs = LayerInputs(
            run.model, run.binding, lambda width, groups: RowTotal(width), mask=run.settings.mask
        )

    def add(self, batch: Batch) -> None:
        self._inputs.add(batch)

    def close(self) -> None:
        self._inputs.close()

    def store(self, out: StoredTensors) -> dict[str, Any]:
        found = list(self._inputs.sums())
        (count,) = {named.sum.rows for named in found}
        sums = {r.parameter: named.sum.sum for named in found for r in named.readers}
        return store_sums("mean_input", count, sums, out)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(KINDS, "mean_input", SumKind("mean_input", noun="mean input"))
    monkeypatch.setitem(MEASURES, "mean_input", MeanInput)
    return "mean_input"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double().eval()


def data(seed: int, n: int = 6) -> Tensor:
    return torch.randn(n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_a_registered_kind_is_collected_stored_and_read_back(toy: str, tmp_path: Path) -> None:
    net, x = model(), torch.cat([data(1), data(2)])
    collect(net, [data(1), data(2)], kinds=[toy], dtype="float64", out=tmp_path / "s")
    expected = {"0.weight": x.mean(0), "2.weight": net[:2](x).mean(0)}
    with open_statistics(tmp_path / "s") as found:
        assert found.header.kinds == {"gram", toy}
        for name, mean in expected.items():
            assert relative_error(found.read(toy, name, dtype=torch.float64), mean) < F64_IDENTITY
        assert get_kind(toy).summary(found.header) == "the mean input of 2 tensors"


def test_a_registered_kind_alone_is_measured_without_padding(toy: str, tmp_path: Path) -> None:
    case = BY_NAME["gpt2"]
    case.build().save_pretrained(tmp_path / "m")
    net = case.loader.from_pretrained(tmp_path / "m").double().eval()
    (batch,) = padded_batches(VOCABULARY, n=1)
    seen: list[Tensor] = []
    layer = net.get_submodule("transformer.h.0.mlp.c_fc")
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        net(**batch)
    handle.remove()
    result = collect(net, [batch], gram=False, kinds=[toy], dtype="float64")
    tokens = seen[0][batch["attention_mask"].bool()]
    total = result.tensors[f"{toy}.transformer.h.0.mlp.c_fc.weight"]()
    assert result.header.kinds == {toy}
    assert result.header.others[toy].count == len(tokens)
    assert relative_error(total, tokens.sum(0)) < F64_IDENTITY


def test_files_with_a_registered_kind_add_up(toy: str, tmp_path: Path) -> None:
    for n in (1, 2):
        collect(model(), [data(n)], kinds=[toy], dtype="float64", out=tmp_path / str(n))
    merge_statistics([tmp_path / "1", tmp_path / "2"], tmp_path / "both")
    collect(model(), [data(1), data(2)], kinds=[toy], dtype="float64", out=tmp_path / "once")
    with open_statistics(tmp_path / "both") as both, open_statistics(tmp_path / "once") as once:
        assert both.header.others[toy].count == once.header.others[toy].count == 12
        for name in ("0.weight", "2.weight"):
            one, other = (f.read(toy, name, dtype=torch.float64) for f in (both, once))
            assert relative_error(one, other) < F64_IDENTITY


def test_a_file_is_still_read_where_its_kind_is_not_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as registered:
        registered.setitem(KINDS, "mean_input", SumKind("mean_input"))
        registered.setitem(MEASURES, "mean_input", MeanInput)
        collect(model(), [data(1)], kinds=["mean_input"], out=tmp_path / "s")
    with open_statistics(tmp_path / "s") as found:
        assert found.gram("0.weight").shape == (5, 5)
        assert found.raw("mean_input.0.weight").shape == (5,)
        with pytest.raises(StatisticsError, match="Unknown kind of statistics 'mean_input'; known are gram, fisher"):
            found.read("mean_input", "0.weight")


def test_an_unknown_kind_is_refused_before_anything_runs(tmp_path: Path) -> None:
    def batches() -> Iterator[Tensor]:
        raise AssertionError("a batch was asked for")
        yield data(1)

    with pytest.raises(StatisticsError, match=r"'fsher'.*Did you mean 'fisher'"):
        collect(model(), batches(), kinds=["fsher"], out=tmp_path / "s")


def test_hooks_are_removed_when_a_batch_fails(toy: str) -> None:
    net = nn.TransformerEncoderLayer(8, 2, 16)
    hooked = []

    def hooks() -> int:
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in net.modules())

    with pytest.raises(RuntimeError):  # the second batch has another width
        collect(
            net,
            [torch.randn(3, 1, 8), torch.randn(3, 1, 7)],
            kinds=[toy],
            progress=lambda samples, tokens: hooked.append(hooks()),
        )
    assert hooked[0] > 0
    assert hooks() == 0


def squares(net: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return net(batch["0"]).square().sum()


def test_fisher_files_add_up_only_with_labels_from_one_source(tmp_path: Path) -> None:
    for n, labels in ((1, "given"), (2, "given"), (3, "drawn")):
        options: dict[str, Any] = {"gram": False, "fisher": True, "loss": squares, "dtype": "float64"}
        collect(model(), [data(n)], out=tmp_path / str(n), fisher_labels=labels, **options)
    merge_statistics([tmp_path / "1", tmp_path / "2"], tmp_path / "both")
    with open_statistics(tmp_path / "1") as one, open_statistics(tmp_path / "2") as two:
        expected = (one.fisher("0.weight", dtype=torch.float64) + two.fisher("0.weight", dtype=torch.float64)) / 2
    with open_statistics(tmp_path / "both") as both:
        assert (both.header.fisher_samples, both.header.fisher_labels) == (12, "given")
        assert relative_error(both.fisher("0.weight", dtype=torch.float64), expected) < F64_IDENTITY
    with pytest.raises(StatisticsError, match="took labels for the Fisher from elsewhere than"):
        merge_statistics([tmp_path / "1", tmp_path / "3"], tmp_path / "mixed")
