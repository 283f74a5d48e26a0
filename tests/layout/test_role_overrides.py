import pytest

from actmat.checkpoints.base import TensorSpec
from actmat.errors import RecipeError
from actmat.layout.resolve import resolve_layout
from actmat.layout.types import Block, Role, RoleOverride, TensorLayout

SHAPES = {"a.qkv.weight": (12, 4), "a.dense.weight": (4, 4), "a.norm.weight": (4,), "a.conv.weight": (4, 2, 3)}
SPECS = {n: TensorSpec(n, s, "float32", "f") for n, s in SHAPES.items()}
SPECS["ids"] = TensorSpec("ids", (4, 4), "int64", "f")


def resolve(*overrides: RoleOverride) -> dict[str, TensorLayout]:
    return dict(resolve_layout(SPECS, None, overrides).tensors)


def problems(*overrides: RoleOverride) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        resolve(*overrides)
    return caught.value.problems


def test_the_first_matching_override_wins_and_says_so() -> None:
    layouts = resolve(RoleOverride("a.dense.*", Role.EMBEDDING), RoleOverride("a.*.weight", Role.VECTOR))
    assert layouts["a.dense.weight"] == TensorLayout(Role.EMBEDDING, "set by the recipe")
    assert layouts["a.conv.weight"] == TensorLayout(Role.VECTOR, "set by the recipe")
    assert layouts["ids"].reason != "set by the recipe"


def test_an_orientation_alone_keeps_the_role_and_drops_blocks_of_the_other_axis() -> None:
    layout = resolve(RoleOverride("a.dense.weight", orientation="IO"))["a.dense.weight"]
    assert (layout.role, layout.orientation) == (Role.LINEAR, "IO")
    (problem,) = problems(RoleOverride("a.qkv.weight", orientation="IO"))
    assert "needs blocks" in problem


def test_blocks_alone_make_a_packed_layer() -> None:
    blocks = (Block("b", 2, 4, 3), Block("a", 0, 2, 3))
    layout = resolve(RoleOverride("a.qkv.weight", blocks=blocks))["a.qkv.weight"]
    assert (layout.role, layout.blocks) == (Role.FUSED_LINEAR, blocks)


def test_a_packed_layer_can_be_declared_one_matrix() -> None:
    layout = resolve(RoleOverride("a.qkv.weight", Role.LINEAR))["a.qkv.weight"]
    assert layout == TensorLayout(Role.LINEAR, "set by the recipe")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (RoleOverride("a.norm.weight", Role.LINEAR), "linear needs 2 axes, this tensor has 1"),
        (RoleOverride("a.dense.weight", Role.CONVOLUTION), "at least 3 axes"),
        (RoleOverride("a.dense.weight", Role.STACKED_EXPERTS), "needs 3 axes"),
        (RoleOverride("ids", Role.LINEAR), "integers and booleans are buffers"),
        (RoleOverride("a.dense.weight", Role.FUSED_LINEAR), "needs blocks"),
        (RoleOverride("a.dense.weight", Role.LINEAR, blocks=(Block("q", 0, 4),)), "fused_linear"),
        (RoleOverride("a.conv.weight", orientation="IO"), "only linear maps"),
        (RoleOverride("a.qkv.weight", blocks=(Block("q", 0, 13),)), "exactly once; found q"),
        (RoleOverride("a.qkv.weight", blocks=(Block("q", 0, 6),)), "exactly once; found q"),
        (RoleOverride("a.qkv.weight", blocks=(Block("q", 0, 6), Block("k", 5, 12))), "exactly once; found q"),
        (RoleOverride("a.qkv.weight", blocks=(Block("q", 0, 6), Block("k", 7, 12))), "exactly once; found q"),
        (RoleOverride("a.qkv.weight", blocks=(Block("q", 3, 3),)), "exactly once; found q"),
        (RoleOverride("a.qkv.weight", blocks=(Block("q", 0, 2, 5),)), "exactly once; found q"),
        (RoleOverride("a.qkv.weight", blocks=(Block("q", 0, 2, 3), Block("k", 2, 4, 2))), "exactly once; found q"),
        (RoleOverride("a.norm.weigth", Role.VECTOR), "matches no tensor"),
    ],
)
def test_an_override_that_does_not_fit_is_an_error(override: RoleOverride, message: str) -> None:
    (problem,) = problems(override)
    assert message in problem
    assert override.match in problem


def test_all_problems_come_at_once() -> None:
    found = problems(
        RoleOverride("a.norm.weight", Role.LINEAR),
        RoleOverride("a.qkv.weight", blocks=(Block("q", 0, 13),)),
        RoleOverride("a.norm.*", Role.VECTOR),
        RoleOverride("b.*", Role.VECTOR),
    )
    assert len(found) == 4
    assert any("taken by an earlier override" in problem for problem in found)
