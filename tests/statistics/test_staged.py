"""RegMean++: block by block on what comes through the merged blocks, against its published code; resumed, refused."""

import copy
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoint_files import save_lora
from tests.helpers.grams import linear_grams
from tests.helpers.tinymodels import build
from tests.tolerances import F32_PRODUCT, F32_SOLVE, relative_error
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import actmat
from actmat.api.measuring import staged_statistics
from actmat.errors import StatisticsError
from actmat.extras.collect.collect import collect
from actmat.statistics import open_statistics

GOLDEN = Path(__file__).parents[1] / "parity" / "closed_forms" / "regmeanpp.safetensors"
LABELS = ("one", "two", "three")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 10), nn.Linear(10, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.relu(self.fc1(x)))


class Toy(nn.Module):
    """The network of the golden case."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


class Case:
    """Checkpoints and batches of the golden case in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.golden = folder, load_file(GOLDEN)
        self.names = [key.removesuffix("::base") for key in self.golden if key.endswith("::base")]
        base = {n: self.golden[f"{n}::base"] for n in self.names}
        self._save("base", base)
        for t, label in enumerate(LABELS):
            self._save(label, {n: base[n] + self.golden[f"{n}::deltas"][t] for n in self.names})
        self.reads: list[str] = []

    def _save(self, label: str, tensors: dict[str, Tensor]) -> None:
        (self.folder / label).mkdir()
        save_file({n: t.contiguous() for n, t in tensors.items()}, self.folder / label / "model.safetensors")

    def model(self, label: str = "base") -> Toy:
        found = Toy().double()
        found.load_state_dict(load_file(self.folder / label / "model.safetensors"))
        return found.double()

    def batches(self) -> dict[str, Callable[[], Iterable[Tensor]]]:
        def make(t: int, label: str) -> list[Tensor]:
            self.reads.append(label)
            return [self.golden["inputs::x_t"][t].double()]

        return {label: (lambda t=t, label=label: make(t, label)) for t, label in enumerate(LABELS)}

    def staged(self, **given: Any) -> dict[str, Path]:
        """Statistics of the golden case, with other arguments where some are given."""
        usual = {
            "model": self.model(),
            "base": self.folder / "base",
            "experts": {label: self.folder / label for label in LABELS},
            "batches": self.batches(),
            "out": self.folder / "statistics",
            "compute_dtype": "float64",
        }
        return staged_statistics(**usual | given)

    def merged(self, statistics: dict[str, Path]) -> dict[str, Tensor]:
        """The merge of whole models from these statistics."""
        actmat.merge(
            self.folder / "base",
            [{"path": str(self.folder / label), "name": label} for label in LABELS],
            out=self.folder / "merged",
            overwrite=True,
            method="regmean",
            options={"off_diagonal": 0.95},
            statistics=statistics,
            compute_dtype="float64",
            dtype="float64",
            durable=False,
        )
        return load_file(self.folder / "merged" / "model.safetensors")

    def error(self, merged: dict[str, Tensor]) -> float:
        delta = [merged[n] - self.golden[f"{n}::base"].double() for n in self.names]
        want = [self.golden[f"{n}::expected_delta64"] for n in self.names]
        return relative_error(torch.cat([d.flatten() for d in delta]), torch.cat([w.flatten() for w in want]))


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_equals_the_published_code(case: Case) -> None:
    model = case.model()
    statistics = case.staged(model=model)
    assert case.error(case.merged(statistics)) < 2e-12
    assert case.error({n: p.detach() for n, p in model.named_parameters()}) < 2e-12, "it is left as the last stage"
    assert set(statistics) == set(LABELS)
    with open_statistics(statistics["one"]) as found:
        assert set(found.header.places) == {n for n in case.names if n.startswith("blocks") and "weight" in n}
        assert found.header.samples == case.golden["inputs::x_t"].shape[1]


def test_statistics_of_the_experts_themselves_give_another_merge(case: Case) -> None:
    plain = {}
    for label, make in case.batches().items():
        given = {"checkpoint": case.folder / label, "compute_dtype": "float64", "dtype": "float64"}
        collect(case.model(label), make(), out=case.folder / f"plain-{label}", **given)
        plain[label] = case.folder / f"plain-{label}"
    assert case.error(case.merged(plain)) > 0.1


def test_an_interrupted_call_goes_on(case: Case) -> None:
    want = case.merged(case.staged())
    assert case.reads == [*LABELS] * 3
    for lost in ("two", "stages/0001/three", "stages/0002"):
        shutil.rmtree(case.folder / "statistics" / lost)
    case.reads.clear()
    again = case.merged(case.staged())
    assert case.reads == ["three", *LABELS]
    assert all(torch.equal(again[n], want[n]) for n in case.names)


def test_float32(case: Case) -> None:
    batches = {n: (lambda make=make: [x.float() for x in make()]) for n, make in case.batches().items()}
    statistics = case.staged(model=case.model().float(), batches=batches, compute_dtype="float32")
    assert case.error(case.merged(statistics)) < F32_SOLVE


def test_what_cannot_be_measured_is_refused(case: Case) -> None:
    assert case.staged(blocks="blocks").keys() == set(LABELS)
    other = case.folder / "other"
    with pytest.raises(StatisticsError, match="other models or settings"):
        case.staged(off_diagonal=0.5)
    with pytest.raises(StatisticsError, match="no module 'layers'"):
        case.staged(out=other, blocks="layers")
    with pytest.raises(StatisticsError, match="one list of blocks; found none"):
        case.staged(out=other, model=nn.Linear(2, 2))
    adapter = save_lora(case.folder / "adapter", {"a": (torch.ones(1, 2), torch.ones(2, 1))})
    batches = {label: case.batches()[label] for label in ("one", "two")}
    with pytest.raises(StatisticsError) as caught:
        case.staged(out=other, experts={"one": case.folder / "one", "lora": adapter}, batches=batches)
    problems = "\n".join(caught.value.problems)
    for says in ("'lora' is an adapter", "'lora' has no batches", "'two', which is no expert"):
        assert says in problems
    short = {n: t for n, t in load_file(case.folder / "two" / "model.safetensors").items() if "fc2" not in n}
    save_file(short, case.folder / "two" / "model.safetensors")
    with pytest.raises(StatisticsError, match="lacks 6 tensors"):
        case.staged(out=other)


@pytest.mark.parametrize(("family", "blocks"), [("llama", "model.layers"), ("gpt2", "transformer.h")])
def test_transformers_models_see_the_merged_blocks_below(family: str, blocks: str, tmp_path: Path) -> None:
    """Every stored Gram is that of an expert's block in a model whose lower blocks are those of the final merge."""
    base = build(family)
    base.save_pretrained(tmp_path / "base")
    experts, batches, generator = {}, {}, torch.Generator().manual_seed(3)
    for label in ("math", "code"):
        own = copy.deepcopy(base)
        for parameter in own.parameters():
            parameter.data += 0.2 * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
        own.save_pretrained(tmp_path / label)
        experts[label] = own
        ids = torch.randint(3, 60, (4, 9), generator=generator)
        batches[label] = lambda ids=ids: [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    places = {label: tmp_path / label for label in experts}
    statistics = staged_statistics(copy.deepcopy(base), tmp_path / "base", places, batches, out=tmp_path / "s")
    options = {"off_diagonal": 0.95}
    actmat.merge(
        tmp_path / "base",
        [{"path": str(place), "name": label} for label, place in places.items()],
        out=tmp_path / "merged",
        method="regmean",
        options=options,
        statistics=statistics,
        durable=False,
    )
    hybrid = type(base).from_pretrained(tmp_path / "merged")
    checked = 0
    for index, layer in enumerate(hybrid.get_submodule(blocks)):
        before = copy.deepcopy(layer.state_dict())
        for label, own in experts.items():
            layer.load_state_dict(own.get_submodule(f"{blocks}.{index}").state_dict())
            grams = linear_grams(
                hybrid,
                (nn.Linear, Conv1D),
                lambda label=label: hybrid(**batches[label]()[0]),
                lambda name, states: None,
            )
            with open_statistics(statistics[label]) as found:
                stored = {n: parts[0].gram for n, parts in found.header.places.items()}
                for name, want in grams.items():
                    if name.startswith(f"{blocks}.{index}."):
                        gram = found.gram(stored[f"{name}.weight"], mean="sum", dtype=torch.float64)
                        assert relative_error(gram, want) < F32_PRODUCT, (label, name)
                        checked += 1
        layer.load_state_dict(before)
    assert checked == 2 * 2 * (7 if family == "llama" else 4)
