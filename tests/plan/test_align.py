"""How tensors of the experts are matched with those of the base, from names and shapes alone."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from actmat.checkpoints.memory import hold_model
from actmat.experts.stored import StoredDeltas
from actmat.layout.patterns import compile_pattern
from actmat.layout.types import LayoutMap, Role, TensorLayout
from actmat.planning.targets import BaseTargets, targets_of

W = torch.zeros(4, 3)


def run(
    base: Mapping[str, Tensor],
    *experts: Mapping[str, Tensor],
    ties: Mapping[str, str] | None = None,
    kept: tuple[str, ...] = (),
    roles: Mapping[str, Role] | None = None,
) -> BaseTargets:
    layouts = {n: TensorLayout((roles or {}).get(n, Role.LINEAR), "") for n in base}
    labels = [f"e{t}" for t in range(len(experts))]
    in_memory = [hold_model({n: t.clone() for n, t in e.items()}) for e in (base, *experts)]
    opened = [StoredDeltas(e) for e in in_memory[1:]]
    return targets_of(in_memory[0], opened, labels, LayoutMap(layouts, ties or {}), frozenset(kept))


def tied(found: BaseTargets) -> dict[str, tuple[str, ...]]:
    return {t.name: t.tied for t in found.targets}


def sources(found: BaseTargets) -> dict[str, tuple[str | None, ...]]:
    return {t.name: tuple(s and s.name for s in t.sources) for t in found.targets}


def test_kept_tensors_and_buffers_need_no_counterpart() -> None:
    found = run(
        {"a": W, "head": W, "ids": W.long()}, {"a": W, "head": W[:1]}, kept=("head",), roles={"ids": Role.BUFFER}
    )
    assert found.problems == ()
    assert sources(found)["ids"] == (None,)


def test_extra_tensors_are_refused_with_the_flag_that_drops_them() -> None:
    found = run({"a": W}, {"a": W, "x": W, "y.b": W, "ids": W.int()})
    assert found.ignored == (("ids",),)
    assert "has 'x' 4x3 and 1 more, which the base lacks" in found.problems[0]
    assert found.problems[0].endswith("(--drop 'x', --drop 'y.*')")


def test_another_vocabulary_is_called_by_its_name() -> None:
    roles = {"embed": Role.EMBEDDING, "lm_head.weight": Role.LINEAR, "mlp": Role.LINEAR}
    found = run(
        dict.fromkeys(roles, W),
        {"embed": torch.zeros(6, 3), "lm_head.weight": torch.zeros(6, 3), "mlp": W[:2]},
        roles=roles,
    )
    assert ["another vocabulary (6 tokens instead of 4" in p for p in found.problems] == [True, True, False]


def test_an_extra_prefix_of_an_expert() -> None:
    base = {"layers.0.w": W, "norm": W}
    found = run(base, {f"model.{n}": t for n, t in base.items()}, base)
    assert found.problems == ()
    assert sources(found)["norm"] == ("model.norm", "norm")
    assert found.ignored == ((), ())
    assert "under the prefix 'model.'" in found.notes[0]


def test_a_prefix_that_an_expert_lacks() -> None:
    base = {"bert.layers.0.w": W, "bert.norm": W, "head": W}
    found = run(base, {n.removeprefix("bert."): t for n, t in base.items()})
    assert found.problems == ()
    assert sources(found)["bert.norm"] == ("norm",)
    assert "without the prefix 'bert.'" in found.notes[0]


def test_a_prefix_is_not_made_up() -> None:
    found = run({"a.w": W, "b.w": W}, {"a.w": W, "c.w": W})
    assert len(found.problems) == 1
    assert sources(found)["b.w"] == (None,)


def test_ties_count_once_whatever_is_stored() -> None:
    ties = {"lm_head": "embed"}
    both, alone = {"embed": W, "lm_head": W}, {"embed": W}
    found = run(both, both, alone, ties=ties)
    assert tied(found) == {"embed": ("lm_head",)}
    assert sources(found)["embed"] == ("embed", "embed")
    assert found.problems == ()
    found = run(alone, both, {"lm_head": W}, ties=ties)
    assert tied(found) == {"embed": ()}
    assert sources(found)["embed"] == ("embed", "lm_head")
    assert found.problems == ()


def test_a_tie_of_other_shapes_is_two_tensors() -> None:
    found = run({"embed": W, "lm_head": W[:2]}, {"embed": W, "lm_head": W[:2]}, ties={"lm_head": "embed"})
    assert set(tied(found)) == {"embed", "lm_head"}
    assert found.problems == ()


def test_a_circle_of_ties_ends() -> None:
    found = run({"a": W, "b": W}, {"a": W, "b": W}, ties={"a": "b", "b": "a"})
    assert sum(1 + len(aliases) for aliases in tied(found).values()) == 2


def layers(at: str, count: int = 3) -> dict[str, Tensor]:
    return {f"{at}.layers.{i}.{n}.weight": W for i in range(count) for n in ("attn.q", "mlp.up")}


def test_a_part_that_an_expert_lacks_is_one_problem_with_one_pattern() -> None:
    base = {
        **layers("model"),
        **layers("model.visual"),
        **layers("mtp"),
        **{f"model.layers.{i}.bias": W for i in range(3)},
    }
    found = run(base, layers("model"))
    assert len(found.problems) == 3
    for pattern, count in (("model.visual.*", 6), ("mtp.*", 6), ("model.layers.*.bias", 3)):
        (problem,) = (p for p in found.problems if f"'{pattern}'" in p)
        assert problem.startswith(f"{count} tensors ")
        assert problem.endswith(f"(--keep '{pattern}')")
    kept = frozenset(
        n for n in base if any(compile_pattern(p)(n) for p in ("model.visual.*", "mtp.*", "model.layers.*.bias"))
    )
    assert run(base, layers("model"), kept=tuple(kept)).problems == ()


def test_layers_that_an_expert_lacks_are_named_apart_from_those_it_has() -> None:
    (problem,) = run(layers("model"), layers("model", 2)).problems
    assert "2 tensors 'model.layers.2.*' are missing" in problem


def test_another_layout_is_not_to_be_kept() -> None:
    base = {f"model.layers.{i}.attn.{n}.weight": W for i in range(2) for n in ("qkv", "o")}
    expert = {f"model.layers.{i}.attn.{n}.weight": W for i in range(2) for n in ("q", "k", "v", "o")}
    (problem,) = run(base, expert).problems
    assert "'model.layers.*.attn.qkv.*' are missing" in problem
    assert "it has 'model.layers.0.attn.q.weight'" in problem
    assert "keep" not in problem


@pytest.mark.parametrize(
    ("base", "expert"),
    [
        ("model.language_model", "model"),
        ("model", "model.language_model"),
        ("model.language_model", "language_model.model"),
        ("language_model.model", "model.language_model"),
        ("language_model.model", "model"),
    ],
)
def test_the_language_model_of_a_multimodal_one_is_recognized(base: str, expert: str) -> None:
    heads = [
        "language_model.lm_head.weight" if at.startswith("language_model") else "lm_head.weight"
        for at in (base, expert)
    ]
    found = run(
        {**layers(base), heads[0]: W, **layers("model.visual")},
        {**layers(expert), heads[1]: W},
        kept=tuple(layers("model.visual")),
    )
    assert found.problems == ()
    assert found.ignored == ((),)
    assert sources(found)[f"{base}.layers.1.mlp.up.weight"] == (f"{expert}.layers.1.mlp.up.weight",)
    assert sources(found)[heads[0]] == (heads[1],)
    (problem,) = run({**layers(base), heads[0]: W, **layers("vision")}, {**layers(expert), heads[1]: W}).problems
    assert problem.endswith("(--keep 'vision.*')")
