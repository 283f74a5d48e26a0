"""Divergences against naive float64, with all classes and with the most probable ones only."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from actmat.diagnostics.answers import UNENDED
from actmat.errors import StatisticsError
from actmat.extras.tune.evaluate import compare_answers, default_predict, keep_answers, own_right
from actmat.extras.tune.inputs import InputBatch, cut_unended, labeled_by_answers


class Table(nn.Module):
    """Logits by token."""

    def __init__(self, table_VC: Tensor) -> None:
        super().__init__()
        self.table_VC = table_VC

    def forward(self, ids: Tensor) -> Tensor:
        return self.table_VC[ids]


def tables(classes: int) -> tuple[Table, Table]:
    rng = torch.Generator().manual_seed(classes)
    return Table(torch.randn(9, classes, generator=rng) * 2), Table(torch.randn(9, classes, generator=rng) * 2)


def naive_divergence(p_logits_C: Tensor, q_logits_C: Tensor) -> float:
    p, q = (x.double().softmax(-1) for x in (p_logits_C, q_logits_C))
    return sum(float(a * (a / b).log()) for a, b in zip(p, q, strict=True))


BATCH = InputBatch(
    {"ids": torch.tensor([[0, 1, 2], [3, 4, 0]])},
    torch.tensor([[True, True, False], [True, False, False]]),
    torch.tensor([[1, 2, -100], [0, -100, -100]]),
)


@pytest.mark.parametrize("classes", [5, 40])
def test_sums_per_sample_are_those_of_a_naive_computation(classes: int) -> None:
    expert, merged = tables(classes)
    kept = keep_answers(expert, [BATCH], default_predict)
    found = compare_answers(merged, [BATCH], kept, default_predict)
    p, q = expert.table_VC, merged.table_VC
    wanted = [naive_divergence(p[0], q[0]) + naive_divergence(p[1], q[1]), naive_divergence(p[3], q[3])]
    assert found.divergence == pytest.approx(wanted, rel=1e-5)
    assert found.predictions == (2, 1)
    differing = [int(p[i].argmax() != q[i].argmax()) for i in (0, 1, 3)]
    assert found.differing == (differing[0] + differing[1], differing[2])
    right = [int(q[i].argmax() == label) for i, label in ((0, 1), (1, 2), (3, 0))]
    assert found.right == (right[0] + right[1], right[2])
    surprise = [-float(q[i].double().log_softmax(-1)[label]) for i, label in ((0, 1), (1, 2), (3, 0))]
    assert found.surprise == pytest.approx([surprise[0] + surprise[1], surprise[2]], rel=1e-5)


def test_the_most_probable_classes_and_the_rest_as_one_bound_the_divergence_from_below() -> None:
    expert, merged = tables(200)
    everything = compare_answers(merged, [BATCH], keep_answers(expert, [BATCH], default_predict, top=200),
                                 default_predict)  # fmt: skip
    previous = [0.0, 0.0]
    for top in (4, 16, 64):
        kept = keep_answers(expert, [BATCH], default_predict, top=top)
        assert kept[0].log_p_PK.shape == (3, top)
        found = compare_answers(merged, [BATCH], kept, default_predict).divergence
        assert all(a < b for a, b in zip(previous, found, strict=True))
        assert all(a < b for a, b in zip(found, everything.divergence, strict=True))
        previous = list(found)
    p, q = (t.table_VC.double().softmax(-1)[3] for t in (expert, merged))
    top4 = p.topk(4).indices
    groups = [(p[top4[i]], q[top4[i]]) for i in range(4)] + [(1 - p[top4].sum(), 1 - q[top4].sum())]
    kept = keep_answers(expert, [BATCH], default_predict, top=4)
    by_hand = float(sum(a * (a / b).log() for a, b in groups))
    assert compare_answers(merged, [BATCH], kept, default_predict).divergence[1] == pytest.approx(by_hand, rel=1e-4)


@pytest.mark.parametrize("top", [4, 200])
def test_an_expert_does_not_diverge_from_itself(top: int) -> None:
    expert, _ = tables(200)
    found = compare_answers(expert, [BATCH], keep_answers(expert, [BATCH], default_predict, top=top), default_predict)
    assert max(found.divergence) < 1e-5
    assert sum(found.differing) == 0


def test_a_candidate_that_gives_nan_is_far_and_does_not_stop_the_search() -> None:
    expert, merged = tables(5)
    merged.table_VC[0] = torch.nan
    found = compare_answers(merged, [BATCH], keep_answers(expert, [BATCH], default_predict), default_predict)
    assert found.divergence[0] > 100


def test_what_cannot_be_compared_is_refused() -> None:
    expert, _ = tables(5)
    with pytest.raises(StatisticsError, match="expert is NaN"):
        keep_answers(Table(torch.full((9, 5), torch.nan)), [BATCH], default_predict)
    with pytest.raises(StatisticsError, match="inputs have the shape"):
        keep_answers(expert, [InputBatch(BATCH.arguments, torch.ones(2, 2, dtype=torch.bool), None)],
                     default_predict)  # fmt: skip
    with pytest.raises(StatisticsError, match="no logits"):
        default_predict(nn.Flatten(0), {"input": torch.ones(3)})


def test_a_label_that_a_model_has_no_class_for_is_never_right() -> None:
    expert, merged = tables(5)
    batch = replace(BATCH, labels=torch.tensor([[4, 7, 0], [1, 0, 0]]))
    found = compare_answers(merged, [batch], keep_answers(expert, [batch], default_predict), default_predict)
    log_q = merged.table_VC.log_softmax(-1)
    assert found.labeled == (2, 1)
    assert found.right[0] == int(log_q[0].argmax() == 4)
    assert found.surprise[0] == pytest.approx(1e4 - float(log_q[0, 4]))
    assert found.surprise[1] == pytest.approx(-float(log_q[3, 1]))


def test_right_answers_that_an_own_answer_begins_with_need_no_pass_of_their_own() -> None:
    """Right: begun with, begun with but longer, another, one without tokens; the answers of both parts agree."""
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    none = -100
    own = InputBatch(
        {"ids": ids}, torch.tensor([[False, True, True, False]] * 4), torch.tensor([[none, 3, 4, none]] * 4)
    )
    known = torch.tensor(
        [[none, 3, none, none, none], [none, 3, 4, 1, none], [none, 2, none, none, none], [none] * 5],
    )
    right = InputBatch({"ids": torch.nn.functional.pad(ids, (0, 1))}, known != none, known)
    labeled, others = labeled_by_answers(own, right)
    assert labeled.labels.tolist() == [[none, 3, none, none], *[[none] * 4] * 3]
    assert torch.equal(others.labels, known[1:3])
    table = Table(torch.nn.functional.one_hot(torch.tensor([0, 2, 3, 4, 1]), 5).float())
    parts = [labeled, others]
    assert own_right(parts, [keep_answers(table, [b])[0] for b in parts]) == pytest.approx(2 / 3)
    assert own_right([replace(own, labels=None)], keep_answers(table, [own])) is None


def test_answers_without_an_end_are_cut_and_a_causal_model_reads_no_further() -> None:
    class CountingForCausalLM(nn.Module):
        generation_config = SimpleNamespace(eos_token_id=7)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return nn.functional.one_hot(input_ids.cumsum(1) % 9, 9).float()

    model, width = CountingForCausalLM(), 2 + 12
    ids = torch.ones(2, width, dtype=torch.long)
    counted = torch.zeros(2, width, dtype=torch.bool)
    counted[0, 1:-1], counted[1, 1:5] = True, True
    labels = torch.full((2, width), -100)
    labels[0, 1:-1], labels[1, 1:5] = 1, torch.tensor([1, 1, 1, 7])
    whole = InputBatch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, counted, labels)
    cut, unended = cut_unended(whole, model)
    assert unended == [True, False]
    assert cut.counted.sum(1).tolist() == [UNENDED, 4]
    assert cut.lengths == [1 + UNENDED, 5], "prompts of two tokens, of which the second predicts"
    short = cut.without_padding()
    (seen,), (first,) = keep_answers(model, [short]), keep_answers(model, [cut])
    assert torch.equal(seen.best_P, first.best_P)
