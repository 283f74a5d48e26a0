"""The paper's figures: what is stored, under which row, and what the tables print beside ours."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from benchmarks.common import relative_error
from evidence.tests.helpers.analyses import gaussian
from evidence.tests.helpers.terminal import console_text
from evidence.tests.helpers.tolerances import F64_ORACLE

from actmat import merge_matrices
from actmat.errors import RecipeError
from actmat.layout.patterns import compile_pattern
from actmat.linalg.lowrank import LowRank
from actmat.methods import get_method
from actmat_experiments import paper
from actmat_experiments.analyses.packed import packed
from actmat_experiments.harness.report import PAPER_ROWS, paper_lines, show, show_paper
from actmat_experiments.harness.request import TableRequest
from actmat_experiments.harness.results import Score, append_scores
from actmat_experiments.harness.rows import candidates
from actmat_experiments.harness.suite import score_file

MODELS = ("T5-base", "T5-large", "ViT-B/16", "ViT-B/32", "ViT-L/14")
PRINTED = {
    "full": {
        "base": (54.0, 51.3, 55.5, 48.2, 65.2),
        "experts": (76.0, 82.4, 94.6, 90.4, 94.1),
        "regmean": (74.5, 80.8, 87.6, 83.0, 90.0),
        "task_arithmetic_1": (60.5, 59.8, 24.3, 26.5, 41.8),
        "average": (64.8, 50.9, 72.2, 65.5, 79.3),
        "iso_c_paper": (66.1, 57.6, 88.4, 81.6, 90.5),
        "tsv_paper": (72.9, 74.7, 88.8, 83.3, 91.1),
        "actmat": (76.0, 79.8, 89.5, 82.9, 92.2),
    },
    "lora": {
        "base": (54.0, 51.3, 55.5, 52.0, 65.2),
        "experts": (76.5, 79.2, 84.1, 80.7, 89.0),
        "regmean": (75.9, 77.7, 80.3, 76.5, 86.9),
        "task_arithmetic_1": (54.2, 55.0, 66.1, 53.5, 77.6),
        "average": (62.2, 57.2, 64.3, 56.8, 72.4),
        "iso_c_paper": (56.1, 52.1, 57.5, 50.4, 66.8),
        "knots_iso_c": (64.7, 69.4, 74.9, 70.4, 83.6),
        "tsv_paper": (72.2, 75.4, 78.4, 73.0, 85.4),
        "knots_tsv": (67.6, 71.1, 74.8, 69.6, 83.4),
        "actmat": (72.0, 76.7, 78.6, 74.6, 86.1),
    },
}
"""Averages as Tables 4 and 5 of the paper print them, in the order of `MODELS`."""
TUNED = {"full": (71.4, 69.7, 76.1, 69.7, 84.3), "lora": (66.7, 70.9, 75.7, 70.5, 83.0)}
"""Task arithmetic on validation data."""
REASONING = {"base": 34.5, "experts": 54.1, "regmean": 45.7, "task_arithmetic": 41.9, "average": 41.8,
             "iso_c_paper": 40.1, "tsv_paper": 43.6,             "actmat": 45.9}  # fmt: skip


@pytest.mark.parametrize("regime", ["full", "lora"])
def test_averages_over_benchmarks_are_those_that_the_paper_prints(regime):
    for row, averages in PRINTED[regime].items():
        for model, printed in zip(MODELS, averages, strict=True):
            assert paper.paper_figures(model, regime)[row, "default"] == pytest.approx(printed, abs=1e-9), (row, model)
    for model, printed in zip(MODELS, TUNED[regime], strict=True):
        assert paper.paper_figures(model, regime)["task_arithmetic", "tuned"] == printed


def test_reasoning_averages_are_over_five_benchmarks_at_one_answer():
    found = paper.paper_figures(paper.REASONING, "full")
    assert {row: found[row, "default"] for row in REASONING} == REASONING
    tasks = paper.paper_tasks(paper.REASONING, "full")["actmat"]
    assert {n for n in tasks if "@" not in n} == {"humaneval", "humaneval_plus", "aime24", "aime25", "ifeval"}
    assert all(tasks[n] > tasks[n.partition("@")[0]] for n in tasks if "@" in n)


def test_no_figure_stands_by_a_row_that_does_not_exist():
    kinds = ("gram", "fisher")
    for regime in ("full", "lora"):
        rows = {row.name for row in candidates(None, regime, 8, kinds)[0]} | {"base", "experts"}
        for model in MODELS:
            missing = {row for row, _ in paper.paper_figures(model, regime)} - rows
            assert not missing
            assert not {"iso_c", "tsv", "ties"} & {row for row, _ in paper.paper_figures(model, regime)}


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("encoder.layers.0.self_attn.q_proj.weight", True),
        ("encoder.layers.0.self_attn.out_proj.weight", True),
        ("layers.0.attention.o_proj.weight", True),
        ("visual.transformer.resblocks.3.attn.in_proj_weight", True),
        ("encoder.block.0.layer.0.SelfAttention.o.weight", True),
        ("encoder.block.0.layer.1.DenseReluDense.wo.weight", False),
        ("encoder.layer.0.attention.attention.query.weight", True),
        ("encoder.layer.0.attention.output.dense.weight", True),
        ("encoder.layer.0.output.dense.weight", False),
        ("layers.0.mlp.fc1.weight", False),
        ("layers.0.attention.q_proj.bias", False),
    ],
)
def test_the_weights_of_packed_attention(name, packed):
    assert compile_pattern(paper.ATTENTION)(name) is packed


def authors(row, deltas):
    """The authors' rules, transcribed in float64."""
    total = sum(deltas)
    n_out, n_in = total.shape
    if row in ("iso_c_paper", "knots_iso_c", "knots_iso_c_rms"):
        parts, outer = total, torch.eye(n_out, dtype=torch.float64)
        if row != "iso_c_paper":
            u, s, vh = torch.linalg.svd(torch.cat(deltas, dim=1), full_matrices=False)
            parts, outer = sum(vh.reshape(-1, len(deltas), n_in)[:, t] for t in range(len(deltas))), u * s
        u, s, vh = torch.linalg.svd(parts, full_matrices=False)
        level = s.square().mean().sqrt() if row.endswith("rms") else s.mean()
        return outer @ (level * u @ vh)
    if row == "tsv_paper":
        kept = min(n_out, n_in) // len(deltas)
        parts = [torch.linalg.svd(d, full_matrices=False) for d in deltas]
        left, right = torch.cat([u[:, :kept] for u, _, _ in parts], 1), torch.cat([v[:kept] for _, _, v in parts])
        polar = [a @ b for a, _, b in (torch.linalg.svd(x, full_matrices=False) for x in (left, right))]
        return polar[0] @ torch.diag(torch.cat([s[:kept] for _, s, _ in parts])) @ polar[1]
    return total


@pytest.mark.parametrize("row", [*paper.VARIANTS, *paper.LORA_VARIANTS])
def test_a_row_is_the_rule_of_the_authors_code(row):
    method, options = (paper.VARIANTS | paper.LORA_VARIANTS)[row]
    deltas = list(gaussian(3, 12, 18))
    found = merge_matrices(method, deltas, **options)
    if row in ("ties_paper", "knots_tsv"):  # held to the authors' own results in tests/parity
        assert found.shape == deltas[0].shape
        return
    assert relative_error(found, authors(row, deltas)) < F64_ORACLE


def test_rms_keeps_the_norm_of_a_full_sum_and_is_exact_on_factors():
    deltas = list(gaussian(3, 12, 18))
    found = merge_matrices("iso_c", deltas, mean="rms")
    assert float(found.norm()) == pytest.approx(float(sum(deltas).norm()), rel=F64_ORACLE)
    pairs = [LowRank(b, a) for b, a in zip(gaussian(3, 12, 2), gaussian(3, 2, 18, seed=1), strict=True)]
    dense = [p.dense() for p in pairs]
    for method, options in (("iso_c", {}), ("knots", {"rule": "iso_c", "order": "actmat"})):
        declared = get_method(method)
        assert declared.lowrank is not None
        factored = declared.lowrank.merge(pairs, **declared.resolve_options({"mean": "rms", **options})).value.dense()
        plain = merge_matrices(method, dense, mean="rms", **options)
        assert relative_error(factored, plain) < F64_ORACLE
        assert relative_error(plain, merge_matrices(method, dense, **options)) > 0.01


def scores(rows, tasks):
    return [
        Score("vision", "full", row, "default", task, 0, 50, 100, model="ViT-B/16") for row in rows for task in tasks
    ]


def test_figures_per_benchmark_are_shown_for_the_rows_and_tasks_at_hand():
    tasks = ("mnist", "cars", "elsewhere")
    rows = ("base", "actmat", "iso_c", "iso_c_paper")
    found = paper_lines(rows, tasks, paper.paper_tasks("ViT-B/16", "full"))
    assert found == {
        "base": ["51.7", "64.7", "-"],
        "actmat": ["99.5", "79.8", "-"],
        "iso_c_paper": ["98.8", "82.7", "-"],
    }
    assert paper_lines(rows, ("elsewhere",), paper.paper_tasks("ViT-B/16", "full")) == {}


@pytest.mark.parametrize("markdown", [False, True])
def test_the_tables_print_them(tmp_path, markdown):
    tasks = tuple(paper.paper_tasks("ViT-B/16", "full")["actmat"])
    append_scores(score_file(tmp_path, "vision"), scores(("base", "actmat", "task_arithmetic_1"), tasks))
    text = console_text(lambda console: show(TableRequest("vision", tmp_path, markdown=markdown, console=console)))
    assert ("paper's run records" in text) is not markdown
    assert "99.5" in text
    assert str(paper.paper_figures("ViT-B/16", "full")["task_arithmetic_1", "default"]) in text
    if not markdown:
        assert max(map(len, text.partition("note:")[0].splitlines())) <= 80
    assert PAPER_ROWS[:40] in text


def test_the_ablation_of_packed_attention_as_an_analysis(tmp_path):
    result = packed()
    assert set(result.arms) == {"paper, ViT-B/16", "paper, ViT-B/32", "paper, ViT-L/14"}
    assert all(2.5 < arms.gain < 4.6 for arms in result.arms.values())
    counts = {"average": 30, "regmean_packed": 40, "regmean": 45}
    lines = [Score("vision-small", "full", row, "default", "t", 0, n, 100) for row, n in counts.items()]
    append_scores(score_file(tmp_path, "vision-small"), lines)
    own = packed(tmp_path)
    assert own.arms["vision-small"].values == pytest.approx((30, 40, 45))
    assert own.arms["vision-small"].gain == pytest.approx(5)
    assert own.arms["vision-small"].halves[0] > 1
    assert own.tables()[0].row_count == 4
    assert len(own.figure().axes[0].patches) == 12
    assert own.to_json()["models"]["vision-small"]["gain"] == pytest.approx(5)


@pytest.mark.parametrize("markdown", [False, True])
def test_the_figures_of_a_suite_are_printed_without_a_run(tmp_path, markdown):
    request = partial(TableRequest, cache=tmp_path, markdown=markdown)
    text = console_text(lambda console: show_paper(request("language", console=console)))
    assert all(f"The paper: {model}, {kind}" in text for model in MODELS[:2] for kind in ("full fine-tuning", "LoRA"))
    assert "scale chosen on validation data: average 71.4" in text
    with pytest.raises(RecipeError, match="no figures for 'text-minilm'"):
        show_paper(request("text-minilm"))
