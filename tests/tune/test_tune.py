"""`actmat.tune` and `actmat tune` from end to end, on tiny Llamas."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers import family as searched
from tests.helpers.checkpoint_files import edit_json
from tests.helpers.family import TEXTS, Told, data_flags, data_of, experts_of, model_flags
from tests.helpers.merging import actmat as run
from transformers import AutoModelForCausalLM, AutoTokenizer

import actmat
from actmat.api.reading import read_recipe
from actmat.errors import MergeError, OutputError, RecipeError, StatisticsError
from actmat.extras.collect.data import DataOptions
from actmat.extras.models.loading import Loaded, load_model
from actmat.extras.tune.asking import dealt_inputs
from actmat.extras.tune.evaluate import compare_answers, default_predict, keep_answers, loss_of
from actmat.extras.tune.inputs import ExpertInputs, InputBatch, of_similar_lengths, prepare_inputs
from actmat.extras.tune.kept import Asking
from actmat.extras.tune.live import Loader
from actmat.extras.tune.report import TuneReport
from actmat.extras.tune.settings import TuneSettings
from actmat.extras.tune.sources import DataRows, InputSettings
from actmat.progress import Progress
from actmat.run.automatic import TABLE
from actmat.statistics import open_statistics

METHODS = ["regmean", "average", "ties", "actmat"]
BUDGET = 10


def tuned(family: Path, out: Path, **fields: Any) -> TuneReport:
    space = {"methods": METHODS, "scales": [0.3, 1.0]}
    return searched.tuned(
        family, out, **{"space": space, "new_tokens": 3, "budget": BUDGET, "dtype": "float32"} | fields
    )


def expert_of(family: Path, name: str) -> Loaded:
    return load_model(str(family / "experts" / name), model_class="LlamaForCausalLM")


def inputs_of(family: Path, name: str, expert: Loaded, **fields: Any) -> ExpertInputs:
    """The texts of an expert, dealt."""
    asking = Asking(Loader(""), InputSettings(new_tokens=fields.pop("new_tokens")), Progress())
    options = DataOptions(str(family / f"{name}.jsonl"))
    rows = DataRows(options, [{"text": t} for t in TEXTS[name]])
    return dealt_inputs(name, expert, rows, asking, TuneSettings(), **{"measuring": False} | fields)


@pytest.fixture(scope="module")
def report(family: Path, tmp_path_factory: pytest.TempPathFactory) -> TuneReport:
    return tuned(family, tmp_path_factory.mktemp("tuned") / "best")


def test_the_written_model_is_the_candidate_that_was_scored(report: TuneReport, family: Path) -> None:
    """The numbers of the search, made in place in memory, are those of the model on disk."""
    merged = load_model(str(report.out), model_class="LlamaForCausalLM")
    for name in TEXTS:
        expert = expert_of(family, name)
        inputs = inputs_of(family, name, expert, new_tokens=3, measuring=True)
        for half, wanted in ((inputs.search, report.chosen.losses), (inputs.final, report.finals[0].losses)):
            kept = keep_answers(expert.model, half, default_predict)
            found = compare_answers(merged.model, half, kept, default_predict)
            assert loss_of(found, "divergence") == pytest.approx(wanted[name], rel=1e-4)


def test_the_recipe_makes_the_model_again(report: TuneReport, tmp_path: Path) -> None:
    place = Path(f"{report.out}.tune")
    recipe = read_recipe(place / "recipe.yaml", {"out": str(tmp_path / "again")})
    actmat.run.run_recipes([recipe])
    first, second = (load_file(p / "model.safetensors") for p in (report.out, tmp_path / "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert actmat.verify(report.out).ok


def test_everything_that_was_tried_is_on_record(report: TuneReport) -> None:
    place, auto = Path(f"{report.out}.tune"), TABLE["full", "decoder"].method
    data = json.loads((place / "tune.json").read_text())
    assert data["actmat_tune"] == 1
    assert {t["method"] for t in data["trials"]} == set(METHODS)
    assert len(data["trials"]) <= BUDGET
    assert (data["trials"][0]["method"], data["trials"][0]["scale"]) == ("regmean", 1.0)
    assert [f["name"] for f in data["final"]][1:] == ["average", f"{auto} x 1 (the recipe's)", "base"]
    assert data["front"][0]["mean"] == min(t["mean"] for t in data["trials"])
    page = (place / "tune.html").read_text()
    assert str(report.chosen.candidate.merge) in page
    assert not (place / "merges").exists(), "merges that were tried are removed"


def test_the_same_search_goes_on_where_it_stopped(
    family: Path, tmp_path: Path, report: TuneReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the middle; the second run evaluates the rest and chooses what an uninterrupted one chooses."""
    module = importlib.import_module("actmat.extras.tune.evaluate")
    real, calls = module.compare_answers, [0]

    def interrupted(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 7:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(module, "compare_answers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuned(family, tmp_path / "best")
    assert not (tmp_path / "best").exists()
    assert len((tmp_path / "best.tune" / "trials.jsonl").read_text().splitlines()) == 3
    calls[0] = 100
    again = tuned(family, tmp_path / "best")
    assert calls[0] - 100 == 2 * (len(again.trials) - 3) + 2 * len(again.finals)
    assert again.chosen == report.chosen
    assert [t.mean for t in again.trials] == [t.mean for t in report.trials]


@pytest.mark.slow
def test_another_score_or_other_inputs_begin_anew(family: Path, tmp_path: Path) -> None:
    """The journal and the merges of an earlier search are used only for what they were made for."""
    space = {"methods": ["average"], "scales": [0.5, 1.0]}
    first = tuned(family, tmp_path / "best", space=space, budget=2, keep_work=True)
    again = tuned(
        family, tmp_path / "best", space=space, budget=2, keep_work=True, overwrite=True, score="disagreement"
    )
    assert again.chosen.losses == {n: pytest.approx(1 - a) for n, a in again.chosen.agreement.items()}
    other = {"math": family / "code.jsonl", "code": family / "math.jsonl"}
    third = tuned(family, tmp_path / "best", space=space, budget=2, keep_work=True, overwrite=True, data=other)
    assert third.chosen.losses != first.chosen.losses
    tuned(family, tmp_path / "best", space=space, budget=2, keep_work=True, overwrite=True, scope="all")
    assert len(list((tmp_path / "best.tune" / "merges").glob("average-*"))) == 2


def test_the_data_s_own_text_may_be_the_score(family: Path, tmp_path: Path) -> None:
    """Perplexity: nats per token of the inputs, without continuations."""
    found = tuned(family, tmp_path / "best", new_tokens=0, score="perplexity", budget=2,
                  space={"methods": ["average"], "scales": [0.5, 1.0]})  # fmt: skip
    model: Any = AutoModelForCausalLM.from_pretrained(found.out, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(found.out)
    for name, texts in TEXTS.items():
        total, count = 0.0, 0
        for text in texts[1::2]:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            with torch.no_grad():
                log_p = model(ids).logits[0].double().log_softmax(-1)
            total -= float(log_p[:-1].gather(1, ids[0, 1:, None]).sum())
            count += ids.shape[1] - 1
        assert found.finals[0].losses[name] == pytest.approx(total / count, rel=1e-3)


def test_continuations_are_those_of_each_input_alone(family: Path) -> None:
    place = family / "experts" / "math"
    expert = load_model(str(place), model_class="LlamaForCausalLM")
    inputs = inputs_of(family, "math", expert, new_tokens=4)
    tokenizer: Any = AutoTokenizer.from_pretrained(place)
    model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    for half, texts in ((inputs.search, TEXTS["math"][0::2]), (inputs.final, TEXTS["math"][1::2])):
        rows = []
        for batch in half:
            for n, mask in enumerate(batch.arguments["attention_mask"].bool()):
                whole = batch.arguments["input_ids"][n][mask].tolist()
                rows.append((whole, batch.labels[n][batch.counted[n]].tolist()))
        wanted = []
        for text in texts:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            whole = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4,
                                   do_sample=False, pad_token_id=0)[0]  # fmt: skip
            wanted.append((whole.tolist(), whole[ids.shape[1] :].tolist()))
        assert sorted(rows) == sorted(wanted)


def test_statistics_are_measured_on_inputs_that_neither_choose_nor_compare(family: Path, tmp_path: Path) -> None:
    """Six texts: the first and the fifth measure, as they are, the third chooses, the others compare."""
    expert = expert_of(family, "math")
    parts = inputs_of(family, "math", expert, new_tokens=0, measuring=True)
    without = inputs_of(family, "math", expert, new_tokens=0)
    rows = [
        sorted(row[mask.bool()].tolist() for b in part for row, mask in zip(*b.arguments.values(), strict=True))
        for part in (parts.search, parts.final)
    ]
    tokenizer: Any = AutoTokenizer.from_pretrained(family / "experts" / "math")
    texts = [tokenizer(text)["input_ids"] for text in TEXTS["math"]]
    assert rows == [sorted(texts[2::4]), sorted(texts[1::2])]
    assert sum(b.samples for b in without.search) == 3

    report = tuned(family, tmp_path / "best", budget=2, space={"methods": ["regmean"], "scales": [1.0]})
    headers = [open_statistics(e.statistics).header for e in report.recipe.experts]
    assert [header.samples for header in headers] == [2, 2]
    assert headers[0].tokens == sum(map(len, texts[0::4]))


def test_batches_hold_inputs_of_similar_lengths() -> None:
    lengths = [3, 8, 7, 2, 8, 8]
    mask = torch.tensor([[1] * n + [0] * (9 - n) for n in lengths])
    ids = torch.arange(54).view(6, 9)
    whole = InputBatch({"input_ids": ids, "attention_mask": mask}, mask.bool(), ids.clone())
    found = of_similar_lengths([whole], torch.nn.Linear(1, 1))
    assert [b.lengths for b in found] == [[8, 8, 8, 7], [3], [2]]
    for batch in found:
        assert {t.shape for t in (*batch.arguments.values(), batch.counted, batch.labels)} == {
            (batch.samples, max(batch.lengths))
        }
    kept = sorted(int(row[0]) // 9 for b in found for row in b.arguments["input_ids"])
    assert kept == list(range(6))
    pixels = InputBatch({"pixel_values": torch.zeros(3, 2)}, None, None)
    assert [b.samples for b in of_similar_lengths([pixels], torch.nn.Linear(1, 1))] == [3]


def test_single_samples_are_dealt_to_all_parts(family: Path) -> None:
    """Batches of two: every second first sample measures."""
    expert = expert_of(family, "math")
    ready = [{"input_ids": torch.tensor([[n], [n + 10]])} for n in range(1, 6)]
    parts = prepare_inputs("math", expert, ready, new_tokens=0, measuring=True)
    rows = [[b.arguments["input_ids"].tolist() for b in some] for some in (parts.measured, parts.search, parts.final)]
    assert rows == [[[[1]], [[3]], [[5]]], [[[2]], [[4]]], [[[n + 10]] for n in range(1, 6)]]
    two = prepare_inputs("math", expert, ready[:1], new_tokens=0, measuring=True)
    rows = [[b.arguments["input_ids"].tolist() for b in some] for some in (two.measured, two.search, two.final)]
    assert rows == [[[[1]]], [[[1]]], [[[11]]]], "one input to measure on serves the search as well"
    with pytest.raises(StatisticsError, match="at least 2 inputs"):
        prepare_inputs("math", expert, [{"input_ids": torch.tensor([[1]])}], new_tokens=0)


def test_adapters_are_tuned_on_the_base_that_they_name(family: Path, tmp_path: Path) -> None:
    """The adapter that is written scores as the model in memory did."""
    experts = [family / "adapters" / n for n in TEXTS]
    found = actmat.tune(
        family / "base", experts, out=tmp_path / "best", to="peft", new_tokens=0, budget=8,
        data=data_of(family), space={"methods": ["average", "knots"], "scales": [0.5, 1.0]},
    )  # fmt: skip
    assert (tmp_path / "best" / "adapter_model.safetensors").is_file()
    merged = load_model(str(found.out), base=str(family / "base"), model_class="LlamaForCausalLM")
    for name, place in zip(TEXTS, experts, strict=True):
        expert = load_model(str(place), base=str(family / "base"), model_class="LlamaForCausalLM")
        inputs = inputs_of(family, name, expert, new_tokens=0)
        kept = keep_answers(expert.model, inputs.search, default_predict)
        loss = loss_of(compare_answers(merged.model, inputs.search, kept, default_predict), "divergence")
        assert loss == pytest.approx(found.chosen.losses[name], rel=5e-3, abs=1e-6)


def test_a_score_of_ones_own_is_maximized(family: Path, tmp_path: Path) -> None:
    def size(model: torch.nn.Module, expert: str, batches: Any) -> float:
        assert batches
        return -sum(float(p.detach().abs().sum()) for p in model.parameters())

    found = tuned(family, tmp_path / "best", score=size, budget=6, space={"methods": ["average"], "scales": [0.3, 1.0]})
    assert found.score == "size"
    assert found.chosen.mean == min(t.mean for t in found.trials)


def test_methods_that_cannot_merge_these_experts_are_left_out_with_a_reason(family: Path, tmp_path: Path) -> None:
    found = tuned(family, tmp_path / "best", budget=6, space={"methods": ["average", "nearswap"], "scales": [1.0]})
    assert len(found.refused) == 1
    assert "nearswap" in next(iter(found.refused))
    with pytest.raises(RecipeError, match="None of the methods"):
        tuned(family, tmp_path / "none", space={"methods": ["nearswap"], "scales": [1.0]})
    assert not (tmp_path / "none").exists()


def test_wrong_requests_are_refused_before_a_model_is_loaded(family: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").write_text("")
    with pytest.raises(OutputError, match="exists"):
        tuned(family, tmp_path / "taken")
    with pytest.raises(RecipeError, match="'code'"):
        tuned(family, tmp_path / "best", data={"math": family / "math.jsonl"})
    with pytest.raises(StatisticsError, match="no such file"):
        tuned(family, tmp_path / "best", data=family / "none.jsonl")
    (tmp_path / "one.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(StatisticsError, match="at least 2 inputs"):
        tuned(family, tmp_path / "best", data=tmp_path / "one.jsonl")
    flags = [x for n in ("math", "code") for x in ("-e", f"{n}={family / 'experts' / n}", "--data", f"{n}=one prompt")]
    refused = run(["tune", "-b", family / "base", *flags, "--out", tmp_path / "best"])
    assert "the prompt given: expected at least 2 inputs" in refused.words
    file = shutil.copytree(family / "experts" / "math", tmp_path / "math") / "config.json"
    edit_json(file, rms_norm_eps=0.5)
    with pytest.raises(MergeError, match="rms_norm_eps"):
        actmat.tune(family / "base", [file.parent], data=family / "math.jsonl", out=tmp_path / "best", load=pytest.fail)


def test_the_command_prints_the_choice_and_the_comparison(family: Path, tmp_path: Path) -> None:
    command, data = ["tune", *model_flags(family), "--out", str(tmp_path / "best")], data_flags(family)
    done = run(
        [*command, *data, "--methods", "average,tsv", "--scales", "0.3,1", "--set", "new_tokens=2", "--budget", "8"],
        code=0,
    )
    assert "(chosen)" in done.out
    assert "tune.html" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    for flags, says in (
        (["--score", "beauty"], "divergence"),
        (["--minutes", "soon"], "minutes"),
        (["--methods", "tis"], "ties"),
    ):
        failed = run([*command, *data, "--overwrite", *flags])
        assert failed.code in (1, 2)
        assert says in failed.err
    assert "unlabeled inputs" in run(command).err


def test_experts_whose_tokenizer_has_no_pad_token_are_tuned(family: Path, tmp_path: Path) -> None:
    for name in TEXTS:
        place = shutil.copytree(family / "experts" / name, tmp_path / name)
        (place / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    told = Told()
    found, known = (
        actmat.tune(family / "base", places, out=tmp_path / f"best-{i}", data=data_of(family), budget=2, new_tokens=2,
                    space={"methods": ["average"], "scales": [0.5, 1.0]}, progress=told)
        for i, places in enumerate(([tmp_path / n for n in TEXTS], experts_of(family)))
    )  # fmt: skip
    assert any("no pad token" in text for text in told.texts)
    assert found.chosen.losses == pytest.approx(known.chosen.losses)
