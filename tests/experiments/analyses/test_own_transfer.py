"""Theorem 3.3 on models from disk: a language model, an encoder-decoder, a classifier; the command; its errors."""

from __future__ import annotations

import json

import pytest
import torch
from tests.helpers.analyses import gaussian
from tests.helpers.merging import actmat as run_cli
from tests.tolerances import F32_PRODUCT, F32_SOLVE, F64_IDENTITY, relative_error
from torch import nn

import actmat
from actmat.errors import RecipeError
from actmat_experiments.analyses.own_transfer import _by_sample, transfer_of_models
from actmat_experiments.analyses.stages import outputs_of, stages_of
from actmat_experiments.analyses.transfer import _norms
from actmat_experiments.core import DataOptions

WORDS = [f"w{i}" for i in range(20)]
TASKS = ("a", "b")


def save_tokenizer(place):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {w: i for i, w in enumerate(["<eos>", "<unk>", *WORDS])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>").save_pretrained(place)


def save_family(place, model):
    """Base, two experts near it and their merge."""
    model.save_pretrained(place / "base")
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    for i, task in enumerate(TASKS):
        with torch.no_grad():
            for j, (name, p) in enumerate(model.named_parameters()):
                p.copy_(start[name] + 0.05 * gaussian(*p.shape, seed=100 * i + j).float())
        model.save_pretrained(place / task)
    for name in ("base", *TASKS):
        save_tokenizer(place / name)
    actmat.merge(base=place / "base", experts=[place / t for t in TASKS], method="actmat", out=place / "merged")
    for i, task in enumerate(TASKS):
        lines = [
            {"text": " ".join(WORDS[(3 * k + j * j + i) % 20] for j in range(8)), "target": WORDS[k], "label": k % 3}
            for k in range(6)
        ]
        (place / f"{task}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return place


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=22, n_positions=16))
    return save_family(tmp_path_factory.mktemp("causal"), model)


def measured(place, **options):
    how = {"text_column": "text", "max_length": 16, "batch_size": 4} | options
    return transfer_of_models(
        str(place / "base"),
        {t: str(place / t) for t in TASKS},
        str(place / "merged"),
        {t: DataOptions(str(place / f"{t}.jsonl"), **how) for t in TASKS},
    )


def holds(result):
    for task in result.tasks.values():
        assert abs(task.signed) <= task.absolute
        assert 0 < task.absolute <= task.propagated * (1 + F32_SOLVE)
        assert task.propagated <= task.bound * (1 + F32_SOLVE)
        assert any(s.zeta > 0 for s in task.stages.values())


def test_a_causal_model_obeys_the_theorem_and_its_transfer_is_that_of_the_models_own_loss(causal):
    from transformers import AutoTokenizer, GPT2LMHeadModel

    result = measured(causal)
    holds(result)
    tokenizer = AutoTokenizer.from_pretrained(causal / "base")
    for task, found in result.tasks.items():
        rows = [json.loads(line)["text"] for line in (causal / f"{task}.jsonl").read_text().splitlines()]
        changes = []
        for text in rows:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            with torch.no_grad():
                end, own = (
                    float(GPT2LMHeadModel.from_pretrained(causal / n).eval()(input_ids=ids, labels=ids).loss)
                    for n in ("merged", task)
                )
            changes.append(end - own)
        mean = sum(map(abs, changes)) / len(changes)
        assert found.absolute == pytest.approx(mean, rel=F32_SOLVE)
        assert found.signed == pytest.approx(sum(changes) / len(changes), rel=F32_SOLVE, abs=F32_PRODUCT)


def test_an_encoder_decoder_obeys_it_with_targets(tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, vocab_size=22, pad_token_id=0,
                      eos_token_id=0, decoder_start_token_id=0)  # fmt: skip
    place = save_family(tmp_path, T5ForConditionalGeneration(config))
    result = measured(place, target_column="target")
    holds(result)
    assert any("relative_attention_bias" in n for t in result.tasks.values() for n in t.stages)


def test_a_classifier_obeys_it_with_labels(tmp_path):
    from transformers import GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=22, n_positions=16, num_labels=3, pad_token_id=0)
    place = save_family(tmp_path, GPT2ForSequenceClassification(config))
    holds(measured(place, label_column="label"))
    with pytest.raises(RecipeError, match="gives no loss on this data"):
        measured(place)


def test_losses_are_cross_entropies_of_samples():
    logits, labels = gaussian(3, 5, 7), torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(0))
    labels[1, 2:] = -100
    found = _by_sample(logits, labels, shifted=False)
    expected = [nn.functional.cross_entropy(one, wanted) for one, wanted in zip(logits, labels, strict=True)]
    assert relative_error(found, torch.stack(expected)) < F64_IDENTITY
    moved = _by_sample(logits, labels, shifted=True)
    assert relative_error(moved[0], nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])) < F64_IDENTITY


def test_a_change_that_samples_share_counts_for_each():
    shared, own = gaussian(1, 4, 3), gaussian(6, 4, 3)
    assert torch.allclose(_norms(shared, 6), shared.norm().expand(6), rtol=F32_PRODUCT)
    assert torch.allclose(_norms(own, 6), own.flatten(1).norm(dim=1), rtol=F32_PRODUCT)


def test_a_stage_whose_output_is_no_tensor_has_none():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.scale, None

    model, x = Pair(), gaussian(2, 3).float()
    (stage,) = stages_of(model, lambda: model(x))
    with outputs_of(stage) as outputs:
        model(x)
    assert outputs == []


def flags(place, out, *more):
    given = ["--base", str(place / "base"), "--merged", str(place / "merged"), "--text-column", "text"]
    for task in TASKS:
        given += ["-e", f"{task}={place / task}", "--data", f"{task}={place / f'{task}.jsonl'}"]
    return ["analyze", "transfer", *given, "--limit", "4", "--out", str(out), *more]


def test_the_command_takes_models(causal, tmp_path):
    done = run_cli(flags(causal, tmp_path))
    assert done.code == 0, done.err
    stored = json.loads((tmp_path / "transfer.json").read_text())
    assert list(stored["tasks"]) == list(TASKS)
    assert all(t["absolute"] <= t["propagated"] <= t["bound"] for t in stored["tasks"].values())
    assert (tmp_path / "transfer.png").stat().st_size > 1000


def test_flags_that_do_not_fit(causal, tmp_path):
    for given, message in (
        (["analyze", "transfer", "--base", "x", "--out", str(tmp_path)], "take --base, --merged"),
        (flags(causal, tmp_path, "-e", "c=x"), "under the same names"),
        (flags(causal, tmp_path, "-m", "tsv"), "merges of a demo"),
    ):
        done = run_cli(given)
        assert done.code
        assert message in " ".join(done.err.split())


def test_models_of_other_shapes_and_texts_of_other_lengths_are_refused(causal, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    other = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=22, n_positions=16))
    other.save_pretrained(tmp_path / "base")
    data = {t: DataOptions(str(causal / f"{t}.jsonl"), text_column="text") for t in TASKS}
    experts = {t: str(causal / t) for t in TASKS}
    with pytest.raises(RecipeError, match="the same parameters"):
        transfer_of_models(str(tmp_path / "base"), experts, str(causal / "merged"), data)
    with pytest.raises(RecipeError, match="its own data"):
        transfer_of_models(str(causal / "base"), experts, str(causal / "merged"), {"a": data["a"]})
    (tmp_path / "ragged.jsonl").write_text('{"text": "w1 w2"}\n{"text": "w1 w2 w3"}\n')
    data["a"] = DataOptions(str(tmp_path / "ragged.jsonl"))
    with pytest.raises(RecipeError, match="different lengths"):
        transfer_of_models(str(causal / "base"), experts, str(causal / "merged"), data)
