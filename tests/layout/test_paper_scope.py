import pytest

from actmat.checkpoints.base import TensorSpec
from actmat.layout.paper import paper_scope


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "matrix", "reason"),
    [
        ("a.weight", (8, 4), "float32", True, "2-D"),
        ("visual.proj", (768, 512), "float32", True, "stored orientation"),
        ("relative_attention_bias.weight", (32, 12), "bfloat16", True, "2-D"),
        ("position_embedding.weight", (50, 768), "float32", True, "2-D"),
        ("h.0.attn.c_attn.weight", (768, 2304), "float32", True, "2-D"),
        ("text_projection", (512, 512), "float32", False, "text_projection"),
        ("text_projection.weight", (512, 512), "float32", False, "text_projection"),
        ("x.weight", (19_999, 4), "float32", True, "below 20000"),
        ("x.weight", (20_000, 4), "float32", False, "20000"),
        ("x.weight", (4, 20_000), "float32", False, "20000"),
        ("conv.weight", (8, 3, 4, 4), "float32", False, "4-D"),
        ("a.bias", (8,), "float32", False, "1-D"),
        ("ids", (8, 8), "int64", False, "int64"),
    ],
)
def test_paper_rule(name: str, shape: tuple[int, ...], dtype: str, matrix: bool, reason: str) -> None:
    applies, why = paper_scope(name, TensorSpec(name, shape, dtype, "f"))
    assert applies is matrix
    assert reason in why
