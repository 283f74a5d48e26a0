"""The bytes of an output depend only on recipe and inputs, and every byte of an input is read exactly once."""

import dataclasses
import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.models import perturbed
from tests.helpers.open_merges import merge_tensors, output
from tests.helpers.sessions import started
from tests.tolerances import F32_ELEMENTWISE, relative_error
from torch import Tensor

from actmat.checkpoints.base import Tensors, TensorSpec, View
from actmat.checkpoints.memory import hold_model
from actmat.checkpoints.model import Model
from actmat.engine.executors.threads import ThreadExecutor
from actmat.engine.inputs import Inputs
from actmat.engine.reader import ItemReader
from actmat.engine.resources import Resources
from actmat.errors import RecipeError
from actmat.experts.stored import StoredDeltas
from actmat.planning import work
from actmat.planning.regions import CHUNK
from actmat.planning.statistics import ExpertStatistics
from actmat.recipe import make_recipe
from actmat.run import run_recipes
from actmat.settings import RunSettings

# The bytes of an output depend only on recipe and inputs: not on threads, other variants, order or hash seeds.


LARGE = "model.layers.0.mlp.down_proj.weight"
CONFIG = {"model_type": "phi3", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
Family = tuple[dict[str, Tensor], list[dict[str, Tensor]]]


@pytest.fixture(scope="module")
def family() -> Family:
    """Packed, stacked, tall, small and odd tensors; the second expert leaves one layer as it was."""
    torch.manual_seed(1)
    start = {
        "model.embed_tokens.weight": torch.randn(60, 32),
        "model.layers.0.self_attn.qkv_proj.weight": torch.randn(64, 32),
        "model.layers.0.mlp.experts.gate_up_proj": torch.randn(3, 2 * 16, 32),
        "model.layers.0.mlp.experts.down_proj": torch.randn(3, 32, 16),
        LARGE: torch.randn(CHUNK // 24 + 5, 48),
        "model.layers.1.self_attn.o_proj.weight": torch.randn(32, 32).bfloat16(),
        "model.layers.1.input_layernorm.weight": torch.randn(33),
    }
    start[LARGE][-1, -1] = -0.0
    experts = [perturbed(start, n) for n in (1, 2, 3)]
    for expert in experts:
        expert[LARGE].view(-1)[CHUNK:] = start[LARGE].view(-1)[CHUNK:]  # its last chunk never changed
    experts[1]["model.layers.1.self_attn.o_proj.weight"] = start["model.layers.1.self_attn.o_proj.weight"]
    return start, experts


def merge_open(
    models: Sequence[Model], out: Path, variants: Sequence[Mapping[str, Any]], workers: int
) -> list[dict[str, Tensor]]:
    """Plan and execute variants of one merge, as the public functions do, over a base and experts that are open."""
    base, *experts = models
    shared = {"base": "base", "experts": [f"expert{i}" for i in range(len(experts))], "method": "actmat"}
    recipes = tuple(make_recipe(shared | fields) for fields in variants)
    inputs = Inputs(recipes, base, [StoredDeltas(e) for e in experts], ExpertStatistics.none(recipes[0].labels))
    folders = [out / str(number) for number in range(len(variants))]
    with started(inputs, folders, in_memory=True) as run:
        executor = ThreadExecutor(inputs, run.writers, Resources(workers, 1 << 33))
        run.survey(executor)
        run.take(executor.run(run.spec, run.units))
        assert not run.findings.fatal, run.findings.problems()
        run.finish()
    return [load_file(folder / "model.safetensors") for folder in folders]


def merged(family: Family, out: Path, *variants: Mapping[str, Any], workers: int = 1) -> list[dict[str, Tensor]]:
    start, experts = family
    return merge_open([hold_model(t, config=CONFIG) for t in (start, *experts)], out, variants, workers)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree bit by bit (`torch.equal` takes -0.0 for 0.0)."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


RECIPES: dict[str, dict[str, Any]] = {
    "average": {"method": "average"},
    "actmat": {"method": "actmat"},
    "actmat, another cut-off": {"method": "actmat", "options": {"rtol": 1e-3}},
    "paper": {"method": "actmat", "scope": "paper"},
    "dare": {"method": "dare", "options": {"density": 0.5}},
    "dare, all": {"method": "dare", "scope": "all"},
    "ties": {"method": "ties", "scope": "all"},
    "model_stock": {"method": "model_stock", "scope": "all"},
    "karcher": {"method": "karcher", "scope": "all", "options": {"include_base": True}},
    "ties, global": {"method": "ties", "options": {"trim": "global"}},
    "ties, global, all": {"method": "ties", "scope": "all", "options": {"trim": "global"}},
    "tsv": {"method": "tsv"},
    "stepped": {"method": "task_arithmetic", "post": "mean_norm"},
    "kept": {"method": "actmat", "keep": ["*.down_proj.*", "*experts*"]},
    "half": {"method": "average", "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def alone(family: Family, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """Every recipe in a run of its own, with one worker."""
    return {k: merged(family, tmp_path_factory.mktemp("alone"), fields)[0] for k, fields in RECIPES.items()}


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [n for n in wanted if not same_bytes(found[n], wanted[n])] == []


def test_deltas_held_or_read_again_between_two_passes(
    family: Family,
    alone: dict[str, dict[str, Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = ItemReader.base_chunk
    starts: list[int] = []

    def noted(self: ItemReader, start: int, numel: int) -> Tensor:
        starts.append(start)
        return read(self, start, numel)

    monkeypatch.setattr(ItemReader, "base_chunk", noted)
    assert_same(merged(family, tmp_path / "held", RECIPES["ties"])[0], alone["ties"])
    assert not starts, "small tensors are held"
    monkeypatch.setattr(work, "HELD_BYTES", 0)
    assert_same(merged(family, tmp_path / "streamed", RECIPES["ties"])[0], alone["ties"])
    assert CHUNK in starts, "the large tensor was not streamed"


PAIRS = ["average + actmat", "dare + average", "paper + actmat", "tsv + ties, global", "ties + model_stock",
         "karcher + dare, all"]  # fmt: skip


@pytest.mark.parametrize("names", [tuple(RECIPES), *(tuple(pair.split(" + ")) for pair in PAIRS)], ids=" + ".join)
@pytest.mark.parametrize("workers", [1, 2])
def test_several_variants_in_one_run(
    names: tuple[str, ...], workers: int, family: Family, alone: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    together = merged(family, tmp_path, *(RECIPES[n] for n in names), workers=workers)
    for name, tensors in zip(names, together, strict=True):
        assert_same(tensors, alone[name])
    distinct = {hashlib.sha256(t[LARGE].float().numpy().tobytes()).hexdigest() for t in together}
    assert len(distinct) > len(names) / 2, "the variants do not differ: nothing was tested"


def test_order_of_storage(family: Family, alone: dict[str, dict[str, Tensor]], tmp_path: Path) -> None:
    start, experts = family
    turned = {n: start[n] for n in reversed(start)}, [{n: e[n] for n in sorted(e)} for e in experts]
    for name in ("actmat", "dare"):
        assert_same(merged(turned, tmp_path / name, RECIPES[name])[0], alone[name])


def test_a_second_run_gives_the_same_manifest(family: Family, tmp_path: Path) -> None:
    start, experts = family
    manifests = [
        dict(merge_tensors(start, experts, tmp_path, out=tmp_path / "out", overwrite=True, threads=n).manifest)
        for n in (1, 2)
    ]
    for manifest in manifests:
        del manifest["timing"]
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize("method", ["average", "actmat", "task_arithmetic", "ties"])
def test_unchanged_tensors_keep_the_bits_of_the_base(method: str, tmp_path: Path) -> None:
    start = {
        "a.weight": torch.tensor([[-0.0, 1.0], [2.0, -0.0]]),
        "b.weight": torch.tensor([[1.0, -3.0], [0.5, -0.0]]).bfloat16(),
        "c.bias": torch.tensor([-0.0, float("inf")]),
        "d.weight": torch.randn(4, 4, generator=torch.Generator().manual_seed(0)),
    }
    moved = {**start, "d.weight": start["d.weight"] + 1}
    wider = {n: t.double() for n, t in start.items()}
    wider["c.bias"] = start["c.bias"]
    report = merge_tensors(start, [moved, wider], tmp_path, method=method, scope="all")
    found = output(report)
    assert all(same_bytes(found[n], start[n]) for n in ("a.weight", "b.weight", "c.bias"))
    assert not torch.equal(found["d.weight"], start["d.weight"])
    flags = {r["name"]: r["unchanged"] for r in report.manifest["tensors"]}
    assert flags == {"a.weight": True, "b.weight": True, "c.bias": True, "d.weight": False}


@pytest.mark.parametrize(("field", "value"), [("base", "elsewhere"), ("compute_dtype", "float64")])
def test_recipes_of_one_run_must_share_the_reading(field: str, value: Any, tmp_path: Path) -> None:
    fields = {"base": "base", "experts": ["one"], "out": str(tmp_path / "a")}
    recipes = [make_recipe(fields), make_recipe({**fields, "out": str(tmp_path / "b"), field: value})]
    with pytest.raises(RecipeError, match=f"'{field}' differs"):
        run_recipes(recipes)


def test_weights_may_differ_within_a_run(family: Family, tmp_path: Path) -> None:
    start, experts = family
    merge_tensors(start, experts, tmp_path)
    places = [tmp_path / f"expert{n}.safetensors" for n in range(3)]
    recipes = [
        make_recipe(
            {
                "base": str(tmp_path / "base.safetensors"),
                "experts": [{"path": str(p), "weight": w} for p, w in zip(places, weights, strict=True)],
                "method": "average",
                "out": str(tmp_path / f"weights{number}"),
            }
        )
        for number, weights in enumerate(((1.0, 1.0, 1.0), (1.0, 0.0, 3.0)))
    ]
    equal, unequal = (output(r) for r in run_recipes(recipes, RunSettings(durable=False)))
    first, _, third = (e[LARGE].double() - start[LARGE].double() for e in experts)
    assert relative_error(unequal[LARGE], start[LARGE].double() + (first + 3 * third) / 4) < F32_ELEMENTWISE
    assert not torch.equal(equal[LARGE], unequal[LARGE])


# Every byte of every input is read exactly once, whatever the rule, the layout and the number of variants.


class CountingTensors(View):
    """A wrapper that behaves like the wrapped tensors and counts.

    Attributes:
        calls: name -> number of `read` and `read_into` calls that succeeded.
        bytes_read: name -> bytes that they returned: exactly `specs[name].nbytes` for a tensor that was read once,
            whole or in chunks.
    """

    def __init__(self, inner: Tensors) -> None:
        super().__init__([inner])
        self.inner, self.specs, self.aliases = inner, inner.specs, inner.aliases
        self.calls: Counter[str] = Counter()
        self.bytes_read: Counter[str] = Counter()
        self._lock = threading.Lock()

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Read and count."""
        self.inner.read_into(spec.name, start, out)
        with self._lock:
            self.calls[spec.name] += 1
            self.bytes_read[spec.name] += len(out)

    def read_other_than_once(self, names: Iterable[str] | None = None) -> dict[str, float]:
        """Name -> how many times its bytes were read, for the tensors (of `names`) where that is not once.

        Tensors without bytes are left out.
        """
        chosen = self.specs if names is None else names
        times = {name: self.bytes_read[name] / self.specs[name].nbytes for name in chosen if self.specs[name].nbytes}
        return {name: count for name, count in times.items() if count != 1}


def tensors() -> dict[str, Tensor]:
    """One tensor of several chunks, packed ones, a stack of experts, a tie, a buffer, an empty one."""
    torch.manual_seed(0)
    table = torch.randn(60, 32)
    return {
        "model.embed_tokens.weight": table,
        "lm_head.weight": table,
        "model.layers.0.self_attn.qkv_proj.weight": torch.randn(64, 32),
        "model.layers.0.mlp.gate_up_proj.weight": torch.randn(2 * 48, 32),
        "model.layers.0.mlp.experts.gate_up_proj": torch.randn(3, 2 * 16, 32),
        "model.layers.0.mlp.experts.down_proj": torch.randn(3, 32, 16),
        LARGE: torch.randn(CHUNK // 32 + 5, 48),
        "model.layers.0.input_layernorm.weight": torch.randn(32),
        "position_ids": torch.arange(9),
        "unused.bias": torch.empty(0),
    }


def run(tmp_path: Path, variants: Sequence[Mapping[str, Any]], *, workers: int = 1) -> list[CountingTensors]:
    start = tensors()
    experts = [perturbed(start, 1), perturbed(start, 2)]
    for e in experts:
        e["lm_head.weight"] = e["model.embed_tokens.weight"]
    models = [hold_model(t, config=CONFIG | {"tie_word_embeddings": True}) for t in (start, *experts)]
    counting = [CountingTensors(model.tensors) for model in models]
    merge_open(
        [dataclasses.replace(m, tensors=c) for m, c in zip(models, counting, strict=True)], tmp_path, variants, workers
    )
    return counting


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "average": [{"method": "average"}],
    "actmat": [{"method": "actmat"}],
    "ties per tensor": [{"method": "ties", "options": {"trim": "tensor"}}],
    "stepped": [{"method": "actmat", "post": "mean_norm"}],
    "task arithmetic stepped": [{"method": "task_arithmetic", "post": "mean_norm"}],
    "several cut-offs": [{"options": {"rtol": r}} for r in (1e-6, 1e-4, 1e-2)],
    "several kinds of rule": [{"method": m} for m in ("average", "actmat", "dare", "tsv", "task_arithmetic")],
    "several scopes": [{"scope": s} for s in ("linear", "paper", "all")],
    "kept in one": [{"keep": ["*.down_proj*"]}, {}],
}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("variants", VARIANTS.values(), ids=VARIANTS.keys())
def test_once(variants: list[dict[str, Any]], workers: int, tmp_path: Path) -> None:
    base, *experts = run(tmp_path, variants, workers=workers)
    assert base.read_other_than_once() == {}, "a tied tensor too, once under each name: they must hold the same bytes"
    for expert in experts:
        assert expert.read_other_than_once(expert.specs.keys() - {"position_ids"}) == {}
        assert expert.bytes_read["position_ids"] == 0


def test_a_large_tensor_is_read_in_chunks(tmp_path: Path) -> None:
    base, first, _ = run(tmp_path, [{"method": "average"}])
    assert base.calls[LARGE] == first.calls[LARGE] == -(-base.specs[LARGE].numel // CHUNK) > 1


def test_kept_tensors_are_not_read_from_experts(tmp_path: Path) -> None:
    _, first, second = run(tmp_path, [{"keep": ["*.down_proj*"]}])
    kept = [n for n in first.specs if "down_proj" in n]
    assert len(kept) == 2
    assert all(first.bytes_read[n] == second.bytes_read[n] == 0 for n in kept)


def test_a_threshold_over_the_model_costs_whole_further_readings(tmp_path: Path) -> None:
    """`trim=global` must see every delta before the first is merged; it may not read them in part or at random."""
    base, *experts = run(tmp_path, [{"method": "ties", "scope": "all", "options": {"trim": "global"}}])
    times = {c.bytes_read[LARGE] / c.specs[LARGE].nbytes for c in (base, *experts)}
    assert len(times) == 1
    assert times.pop() in (2.0, 3.0, 4.0, 5.0)
