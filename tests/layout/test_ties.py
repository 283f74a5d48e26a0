import pytest
from tests.helpers.tinymodels import build, specs_of

from actmat.checkpoints.base import TensorSpec
from actmat.layout.resolve import resolve_layout
from actmat.layout.ties import tied_partner
from actmat.layout.types import LayoutMap, Role

TABLE = (60, 32)


def resolve(shapes: dict[str, tuple[int, ...]], config: dict[str, object] | None) -> LayoutMap:
    return resolve_layout({n: TensorSpec(n, s, "float32", "f") for n, s in shapes.items()}, config)


def model_says(model: object) -> dict[str, str]:
    """Tied names of a model in memory: same storage under two names."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, tensor in model.state_dict().items():
        other = first.setdefault(tensor.data_ptr(), name)
        if other != name:
            ties[name] = other
    return ties


@pytest.mark.parametrize(
    "family", ["llama", "llama_tied", "gpt2", "bert", "t5", "bloom", "mpt", "modernbert", "whisper"]
)
def test_a_full_state_dict_is_tied_exactly_where_its_tensors_share_memory(family: str) -> None:
    model = build(family)
    resolved = resolve_layout(specs_of(model.state_dict()), model.config.to_dict())
    groups = {frozenset({a, b}) for a, b in resolved.ties.items()}
    truth = model_says(model)
    # one parameter may have any of its names as the canonical one: compare the classes, not the direction
    canonical = {name: truth.get(name, name) for pair in groups for name in pair}
    assert all(len({canonical[name] for name in pair}) == 1 for pair in groups)
    assert len(groups) == len(truth)
    for name, source in resolved.ties.items():
        assert source not in resolved.ties, "a canonical name is not tied itself"
        assert resolved.tensors[name].role is resolved.tensors[source].role
        assert source in resolved.tensors[name].reason


T5 = dict.fromkeys(("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), TABLE)


@pytest.mark.parametrize(
    ("config", "head_is_tied"),
    [
        ({"model_type": "t5"}, True),
        ({"model_type": "t5", "tie_word_embeddings": False}, False),
        ({"model_type": "t5", "tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
        ({"model_type": "mt5", "tie_word_embeddings": True}, False),
    ],
)
def test_t5_always_shares_its_embedding_and_only_some_share_the_head(
    config: dict[str, object], head_is_tied: bool
) -> None:
    resolved = resolve(T5 | {"lm_head.weight": TABLE}, config)
    expected = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"} | (
        {"lm_head.weight"} if head_is_tied else set()
    )
    assert resolved.ties == dict.fromkeys(expected, "shared.weight")
    assert resolved.tensors["lm_head.weight"].role is (Role.EMBEDDING if head_is_tied else Role.LINEAR)


LLAMA = {"model.embed_tokens.weight": TABLE, "lm_head.weight": TABLE}
CTRL = {"transformer.w.weight": TABLE, "lm_head.weight": TABLE}
VLM = {"model.language_model.embed_tokens.weight": TABLE, "lm_head.weight": TABLE}


@pytest.mark.parametrize(
    ("shapes", "config", "tied"),
    [
        (LLAMA, {"model_type": "llama", "tie_word_embeddings": True}, True),
        (LLAMA, {"model_type": "llama", "tie_word_embeddings": False}, False),
        (LLAMA, {"model_type": "llama"}, False),
        (LLAMA, {"model_type": "gemma"}, True),
        (LLAMA, None, False),
        (VLM, {"model_type": "x", "text_config": {"model_type": "llama", "tie_word_embeddings": True}}, True),
        (VLM, {"model_type": "x", "text_config": {"model_type": "gemma2"}}, True),
        (VLM, {"model_type": "x", "tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, False),
        (CTRL, {"model_type": "ctrl"}, True),
        ({**LLAMA, "lm_head.weight": (61, 32)}, {"model_type": "llama", "tie_word_embeddings": True}, False),
    ],
)
def test_the_config_decides_then_the_family(
    shapes: dict[str, tuple[int, ...]], config: dict[str, object] | None, tied: bool
) -> None:
    resolved = resolve(shapes, config)
    assert ("lm_head.weight" in resolved.ties) is tied
    assert resolved.tensors["lm_head.weight"].role is (Role.EMBEDDING if tied else Role.LINEAR)


def test_the_table_of_the_same_part_of_the_model_is_the_one_shared() -> None:
    shapes = {
        "vision.embeddings.weight": TABLE,
        "text.decoder.embed_tokens.weight": TABLE,
        "text.lm_head.weight": TABLE,
        "text.other.embed_tokens.weight": (7, 32),
    }
    assert resolve(shapes, {"tie_word_embeddings": True}).ties == {
        "text.lm_head.weight": "text.decoder.embed_tokens.weight"
    }


def test_a_head_stored_for_its_missing_table_is_the_embedding() -> None:
    shapes = {"lm_head.weight": TABLE, "model.wpe.weight": (16, 32)}
    config = {"tie_word_embeddings": True, "vocab_size": TABLE[0]}
    layout = resolve(shapes, config).tensors["lm_head.weight"]
    assert layout.role is Role.EMBEDDING
    assert "stored under this name only" in layout.reason


def test_partner_of_a_name_that_another_tool_did_not_store() -> None:
    tied = {"model_type": "llama", "tie_word_embeddings": True}
    assert tied_partner("lm_head.weight", ["model.embed_tokens.weight"], tied) == "model.embed_tokens.weight"
    assert tied_partner("model.embed_tokens.weight", ["lm_head.weight"], tied) == "lm_head.weight"
    assert tied_partner("lm_head.weight", ["model.embed_tokens.weight"], {"model_type": "llama"}) is None
    assert tied_partner("model.norm.weight", ["model.embed_tokens.weight"], tied) is None
    assert tied_partner("encoder.embed_tokens.weight", ["shared.weight"], {"model_type": "t5"}) == "shared.weight"
