"""Folders of sentence-transformers: modules with weights are merged by name, as the library itself reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.tolerances import F32_ELEMENTWISE, F32_FORWARD, relative_error
from tokenizers import Tokenizer

from actmat.api.merging import merge, plan
from actmat.api.verifying import verify
from actmat.checkpoints.resolve import open_model
from actmat.errors import CheckpointError, MergeError

pytest.importorskip("sentence_transformers")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(97, 123)), *(f"##{i}" for i in range(9))]
TEXTS = ["a b c", "d e", "f"]
KINDS = ("plain", "dense", "many", "splade", "sparse", "router")


def make(kind: str, folder: Path, seed: int) -> Path:
    """Save a tiny model of a kind."""
    import transformers
    from sentence_transformers import SentenceTransformer, SparseEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
    from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling, StaticEmbedding
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SparseAutoEncoder, SpladePooling

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, num_attention_heads=4, max_position_embeddings=16)
    plain = folder.with_name(f"{folder.name}-plain")
    model: Any = (transformers.BertForMaskedLM if kind == "splade" else transformers.BertModel)(config)
    model.save_pretrained(plain)
    (plain / "vocab.txt").write_text("\n".join(WORDS))
    (plain / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    norm = LayerNorm(8)
    torch.nn.init.normal_(norm.norm.weight)
    encoder = (MLMTransformer if kind == "splade" else Transformer)(str(plain))
    modules: dict[str, list[Any]] = {
        "plain": [Pooling(16, "mean"), Normalize()],
        "dense": [Pooling(16, "cls"), Dense(16, 8)],
        "many": [Pooling(16, "mean"), Dense(16, 8), norm, Dense(8, 4), Normalize()],
        "splade": [SpladePooling("max")],
        "sparse": [Pooling(16, "mean"), SparseAutoEncoder(16, hidden_dim=32, k=4)],
    }
    if kind == "router":
        encoder.save(str(plain))
        static = StaticEmbedding(Tokenizer.from_file(str(plain / "tokenizer.json")), embedding_dim=16)
        first = Router.for_query_document(query_modules=[static], document_modules=[encoder, Pooling(16, "mean")])
        encoder, modules[kind] = first, [Dense(16, 8), Normalize()]
    made: Any = SparseEncoder if kind in ("splade", "sparse") else SentenceTransformer
    made(modules=[encoder, *modules[kind]]).save(str(folder))
    return folder


def load(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer, SparseEncoder

    listed = json.loads((folder / "modules.json").read_text())
    is_sparse = any("sparse_encoder" in module["type"] for module in listed)
    return (SparseEncoder if is_sparse else SentenceTransformer)(str(folder), device="cpu")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_embeds_as_its_merged_parts_do(kind: str, tmp_path: Path) -> None:
    base, *experts = (make(kind, tmp_path / name, seed) for seed, name in enumerate(("base", "one", "two")))
    report = merge(base, experts, method="average", out=tmp_path / "out", threads=1, durable=False)
    made, right, other = load(tmp_path / "out"), load(experts[0]), load(experts[1]).state_dict()
    means = {n: (t + other[n]) / 2 if t.is_floating_point() else t for n, t in right.state_dict().items()}
    errors = {n: relative_error(t, means[n]) for n, t in made.state_dict().items() if t.is_floating_point()}
    assert {n: e for n, e in errors.items() if e > F32_ELEMENTWISE} == {}
    right.load_state_dict(means)
    found, wanted = (torch.as_tensor(m.encode(TEXTS, convert_to_tensor=True)).to_dense() for m in (made, right))
    assert relative_error(found, wanted) < F32_FORWARD
    files = {p.relative_to(base).as_posix() for p in base.rglob("*") if p.is_file()}
    assert files <= {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert verify(report.out).ok


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("kind", "has_modules"), [("plain", True), ("dense", False)])
def test_a_base_without_modules_gets_those_without_weights(kind: str, has_modules: bool, tmp_path: Path) -> None:
    experts = [make(kind, tmp_path / name, seed) for seed, name in enumerate(("one", "two"))]
    drop = [] if has_modules else ["2_Dense.*"]
    merge(tmp_path / "one-plain", experts, method="average", out=tmp_path / "out", drop=drop, durable=False)
    assert (tmp_path / "out" / "1_Pooling").exists() == has_modules
    if has_modules:
        right = load(experts[0])
        others = load(experts[1]).state_dict()
        means = {n: (t + others[n]) / 2 if t.is_floating_point() else t for n, t in right.state_dict().items()}
        right.load_state_dict(means)
        made, wanted = (torch.as_tensor(m.encode(TEXTS)) for m in (load(tmp_path / "out"), right))
        assert relative_error(made, wanted) < F32_FORWARD


def test_an_encoder_in_a_folder_of_its_own_is_refused_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('[{"path": "0_Transformer"}, {"path": "1_Pooling"}]')
    (tmp_path / "0_Transformer").mkdir()
    save_file({"w": torch.ones(2, 2)}, tmp_path / "0_Transformer" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"encoder .* at the top of the folder.* SentenceTransformer\(PATH\)"):
        open_model(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_modules_of_one_side_only_are_kept_or_refused(tmp_path: Path) -> None:
    dense, plain = make("dense", tmp_path / "dense", 0), make("plain", tmp_path / "plain", 1)
    with pytest.raises(MergeError, match=r"--drop '2_Dense\.\*'"):
        plan(plain, [dense], method="average")
    assert plan(plain, [dense], method="average", drop=["2_Dense.*"]).items
    items = plan(dense, [plain], method="average").by_name
    assert items["2_Dense.linear.weight"].reason == "expert 'plain' has no 2_Dense (2_Dense.*): copied from the base"


def test_weights_of_a_module_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "modules.json").write_text('[{"path": ""}, {"path": "1_Dense"}, {"path": "2_Router"}]')
    (tmp_path / "1_Dense").mkdir()
    save_file({"linear.weight": torch.ones(2, 2)}, tmp_path / "1_Dense" / "model.safetensors")
    with open_model(tmp_path) as model:
        assert [*model.specs] == ["w", "1_Dense.linear.weight"]
    inner = tmp_path / "2_Router" / "query"
    inner.mkdir(parents=True)
    (inner / "model.onnx").write_bytes(b"")
    with pytest.raises(CheckpointError, match="weights of the module '2_Router' cannot be read"):
        open_model(tmp_path)
