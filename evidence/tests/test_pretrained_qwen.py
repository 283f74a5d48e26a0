"""`llm-qwen` rehearsed with a tiny Qwen2: two wordings, two losses, merges by actmat and by inputs, scores."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import qwen as program
from evidence.tests.helpers.pretrained import small_decoder, write_gguf, write_llama
from evidence.tests.helpers.tolerances import F32_ELEMENTWISE, F32_FORWARD, F32_SOLVE
from safetensors.torch import load_file, save_file

import actmat
from actmat.errors import RecipeError
from actmat.statistics.triangle import unpack
from actmat_experiments.core import collect
from actmat_experiments.harness import origin
from actmat_experiments.harness.models import with_adapter
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.request import RunRequest
from actmat_experiments.harness.results import read_scores
from actmat_experiments.harness.sizes import size_file
from actmat_experiments.harness.suite import score_file
from actmat_experiments.pretrained import decoder
from actmat_experiments.pretrained.decoder import Coder, greedy, load_decoder
from actmat_experiments.pretrained.generated import Generated, Question
from actmat_experiments.pretrained.qwen import experiment as stages
from actmat_experiments.pretrained.qwen import suite
from actmat_experiments.pretrained.qwen.live import Factors, Live, dense, read_factors
from actmat_experiments.pretrained.qwen.merging import merge_by_inputs
from actmat_experiments.pretrained.qwen.rows import ROWS, Row, chosen_rows
from actmat_experiments.pretrained.qwen.tasks import TASKS, WORDS, Worded, load_tasks
from actmat_experiments.suites import get_suite

CHOSEN = ("trec", "record")
TOWARD = "regmean:training:toward=ct_merging:ridge=0.05"
WRITTEN = tuple(f"regmean:{prompts}:number=8:ridge=0.001:prior=0.5" for prompts in ("self", "mixed", "random"))
METHODS = ("average", "auto", "regmean:data=training", "regmean:other:ridge=0.001", TOWARD, "ssr:training", *WRITTEN)
SIZES = {"train": 12, "validation": 4, "test": 6}
TINY = {"train": "12", "prompts": "4", "test": "6", "steps": "2", "batch_size": "4", "rank": "2"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = write_llama(tmp_path_factory.mktemp("qwen") / "tiny-llama")
    words = json.loads((folder / "config.json").read_text())["vocab_size"]
    small_decoder("qwen2", words, num_hidden_layers=2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    rows = [{"text": f"who is number {n} ?", "label": n % 6} for n in range(40)]
    (folder / "trec.train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def asked(base, texts, tmp_path_factory):
    settings = TINY | {"base": str(base)}
    cache = tmp_path_factory.mktemp("qwen-cache") / "cache"
    fields = {"data": texts, "tasks": CHOSEN, "methods": METHODS, "regimes": ("lora",), "threads": 1}
    return RunRequest("llm-qwen", cache, settings=settings, **fields)


@pytest.fixture(scope="module")
def finished(asked):
    get_suite("llm-qwen").run(asked)
    return asked


def scores_of(request):
    return read_scores(score_file(request.cache, request.suite))


def made(request):
    return list(suite.experiments(request, Watch()))


def test_every_row_has_all_tasks_in_both_wordings_of_both_ways_of_training(finished):
    scores = scores_of(finished)
    model = "tiny-llama, r = 2, 2 steps of 4 at 0.0002, loss on"
    models = {f"{model} {loss}{end}" for loss in ("answers", "whole texts") for end in ("", ", asked in other words")}
    rows = {"base", "experts", "ct_merging", *METHODS}
    assert {(s.model, s.method, s.task) for s in scores} == {(m, r, t) for m in models for r in rows for t in CHOSEN}
    assert {s.total for s in scores} == {SIZES["test"]}
    sizes = [json.loads(line) for line in size_file(finished.cache, finished.suite).read_text().splitlines()]
    assert len(sizes) == 2
    assert all(row["size"] > 0 for row in sizes)


def test_a_row_names_its_training_its_run_and_its_merge(finished):
    scores = scores_of(finished)
    weights = {s.detail["training"]["weights"] for s in scores if "answers" in s.model}
    assert len(weights) == 1
    assert weights != {s.detail["training"]["weights"] for s in scores if "whole" in s.model}
    for score in scores:
        for part in ("training", "run"):
            assert {"machine", "date", "commit"} <= set(score.detail[part])
            assert score.detail[part]["commit"] == origin.commit()
    by_row = {s.method: s.detail for s in scores if s.model.endswith("answers")}
    assert by_row["auto"]["rule"] in ("dc_merge", "ct_merging")
    options = by_row["regmean:data=training"]["options"]
    assert options == {"prior": 1.0, "ridge": 0.001}, "folds judge, and all four are measured"
    assert by_row[TOWARD]["toward"] == "ct_merging"
    merged = {by_row[row]["merge"] for row in (*METHODS, "ct_merging")}
    assert len(merged) == len(METHODS) + 1 - (by_row["auto"]["rule"] == "ct_merging")


def test_rows_of_the_same_training_are_not_measured_again(finished, monkeypatch):
    path, measured = score_file(finished.cache, finished.suite), []
    before = path.read_text()
    lacking = [line for line in before.splitlines(keepends=True) if json.loads(line)["method"] != "ssr:training"]
    score_row = stages.WordedLlm._score_row

    def watched(self, merging, row):
        measured.append(row.name)
        return score_row(self, merging, row)

    monkeypatch.setattr(stages.WordedLlm, "_score_row", watched)
    path.write_text("".join(lacking))
    get_suite("llm-qwen").run(finished)
    assert measured == ["ssr:training"] * 2
    assert {s.identity for s in scores_of(finished)} == {tuple(s.identity) for s in _parsed(before)}
    expert = made(finished)[0].experts()["trec"].path / "adapter_model.safetensors"
    trained, measured[:] = expert.read_bytes(), []
    save_file({n: 2 * t for n, t in load_file(expert).items()}, expert)
    get_suite("llm-qwen").run(replace(finished, methods=("average",)))
    assert measured == ["average"], "of the other weights; the other set has its row"
    expert.write_bytes(trained)
    path.write_text(before)


def _parsed(text):
    from actmat_experiments.harness.results import Score

    return [Score(**json.loads(line)) for line in text.splitlines()]


def test_a_row_that_fails_is_noted_and_the_next_one_is_made(finished, monkeypatch, capsys):
    from rich.console import Console

    broken = Row("broken", "ties", {"density": 7.0})
    monkeypatch.setattr(suite, "chosen_rows", lambda names: (broken, *chosen_rows(("average",))))
    path = score_file(finished.cache, finished.suite)
    before = path.read_text()
    path.write_text("")
    get_suite("llm-qwen").run(replace(finished, console=Console(width=200)))
    assert {s.method for s in scores_of(finished)} == {"base", "experts", "average"}
    assert (
        "broken failed (tiny-llama, r = 2, 2 steps of 4 at 0.0002, loss on answers, seed 0)" in capsys.readouterr().out
    )
    path.write_text(before)


def test_a_right_answer_counts_in_its_own_wording(base, finished):
    experiment, model, coder = made(finished)[0], load_decoder(base), Coder(base)
    prompts = [Question(f"<|im_start|>{n}", "x") for n in range(4)]
    own = [coder.tokenizer.decode(c.answer) for c in greedy(model, coder, prompts, 3)]
    right_ones = [q._replace(answer=answer) for q, answer in zip(prompts, own, strict=True)]
    wrong_ones = [q._replace(answer=answer + "~") for q, answer in zip(prompts, own, strict=True)]

    def part(questions):
        return Generated("t", "sft", train=[], validation=[], test=questions, content={})

    task = Worded("t", part([*right_ones[:3], *wrong_ones[3:]]), part([*right_ones[:1], *wrong_ones[1:]]))
    assert replace(experiment, tasks=[task]).test(model, "t", "test") == {"correct": 3, "other": 1, "total": 4}


@pytest.mark.parametrize("loss", ["answers", "whole"])
def test_the_loss_is_that_of_the_library_on_the_tokens_that_are_learnt(finished, tmp_path, monkeypatch, loss):
    experiment = next(e for e in made(finished) if e.loss == loss)
    task, seen = experiment.task("trec"), []

    def train_by(model, loss_of, n, how, out, on_step):
        seen.append((model, loss_of(torch.tensor([0, len(task.training.train)])), n))

    monkeypatch.setattr(stages, "train_by", train_by)
    with Watch().stage("x") as stage:
        experiment.train(task, tmp_path, stage)
    ((model, found, n),) = seen
    coded = experiment.coder(task.training.train)[0]
    ids = torch.tensor([coded.prompt + coded.answer])
    labels = ids.clone()
    labels[:, : len(coded.prompt) if loss == "answers" else 0] = -100
    torch.testing.assert_close(found, model(input_ids=ids, labels=labels).loss, rtol=F32_FORWARD, atol=0)
    assert n == 2 * 4, "steps times the size of a batch: places behind the last example begin again at the first"


@pytest.mark.parametrize(("precision", "dtype"), [("tf32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_matrix_products_have_the_precision_of_the_settings(asked, precision, dtype):
    experiment = made(replace(asked, settings=asked.settings | {"precision": precision}))[0]
    with experiment._products():
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype


def test_adapters_from_one_start_have_one_a(asked, tmp_path, monkeypatch):
    experiment = made(replace(asked, settings=asked.settings | {"start": "shared"}))[0]
    assert experiment.model == "tiny-llama, r = 2, A shared, 2 steps of 4 at 0.0002, loss on answers"
    models = []
    monkeypatch.setattr(stages, "train_by", lambda model, *_: models.append(dict(model.named_parameters())))
    with Watch().stage("x") as stage:
        for task in experiment.tasks:
            experiment.train(task, tmp_path, stage)
    first, other = models
    assert all(torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_a_model_takes_the_deltas_of_an_adapter_and_gives_them_back(base, finished):
    folder = made(finished)[0].experts()["record"].path
    tokens = torch.arange(5, 15)[None]
    live = Live(load_decoder(base), "cpu")
    with torch.no_grad():
        before, wanted = live.model(tokens).logits, with_adapter(load_decoder, base, folder)(tokens).logits
        with live.changed(dense(read_factors(folder))) as model:
            changed = model(tokens).logits
        assert torch.equal(live.model(tokens).logits, before)
        with pytest.raises(KeyError), live.changed([("model.layers.0.mlp.up_proj", torch.ones(24, 16)), ("none", 0)]):
            pass
        assert torch.equal(live.model(tokens).logits, before), "a change that fails is taken back"
    torch.testing.assert_close(changed, wanted, rtol=F32_FORWARD, atol=F32_ELEMENTWISE)
    assert not torch.allclose(changed, before, rtol=F32_FORWARD, atol=F32_ELEMENTWISE)


def test_layer_inputs_are_those_that_statistics_are_made_of(base):
    live, coder = Live(load_decoder(base), "cpu"), Coder(base)
    coded = coder([Question("<|im_start|>ab", ""), Question("one that is longer", "")])
    inputs = live.layer_inputs(coded)
    assert len(inputs) == 14
    assert inputs["model.layers.0.self_attn.q_proj"] is inputs["model.layers.0.self_attn.v_proj"]
    assert inputs["model.layers.0.mlp.gate_proj"] is not inputs["model.layers.1.mlp.gate_proj"]
    found = collect(load_decoder(base), [{"input_ids": torch.tensor([c.prompt])} for c in coded], checkpoint=base)
    for name, rows_NI in inputs.items():
        gram = found.header.places[f"{name}.weight"][0].gram
        gram_II = unpack(found.tensors[f"gram.{gram}"], rows_NI.shape[1])
        torch.testing.assert_close(rows_NI.mT @ rows_NI, gram_II, rtol=F32_FORWARD, atol=F32_ELEMENTWISE)


@pytest.mark.parametrize("prior", [0.0, 0.5])
def test_a_regression_toward_a_merge_is_its_formula(prior):
    torch.manual_seed(0)
    experts = [{"layer": Factors(torch.randn(6, 2), torch.randn(2, 8))} for _ in range(3)]
    inputs = [{"layer": torch.randn(5, 8) * scale} for scale in (1, 2, 3)]
    start = {"layer": Factors(torch.randn(6, 2), torch.randn(2, 8))}
    (row,) = (r for r in ROWS if r.name == TOWARD + ":prior=0.5" * bool(prior))
    ((name, found),) = merge_by_inputs(row, experts, inputs, start)
    start_OI = start["layer"].dense().double()
    left, total = torch.zeros(6, 8).double(), torch.zeros(8, 8).double()
    for expert, rows in zip(experts, inputs, strict=True):
        delta_OI, gram_II = expert["layer"].dense().double(), rows["layer"].double().mT @ rows["layer"].double()
        own_II = delta_OI.mT @ delta_OI
        gram_II = (gram_II / gram_II.trace() + prior * own_II / own_II.trace()) / (1 + prior)
        left += (delta_OI - start_OI) @ gram_II
        total += gram_II
    ridge_II = 0.05 * total.diagonal().mean() * torch.eye(8).double()
    wanted = start_OI + left @ torch.linalg.inv(total + ridge_II)
    assert name == "layer"
    torch.testing.assert_close(found.double(), wanted, rtol=F32_SOLVE, atol=F32_SOLVE)


def test_ssr_in_the_span_of_the_experts_rows_is_that_of_the_whole_layer():
    torch.manual_seed(0)
    experts = [{"layer": Factors(torch.randn(6, 2), torch.randn(2, 12))} for _ in range(3)]
    inputs = [{"layer": torch.randn(20, 12) * scale} for scale in (1, 2, 3)]
    (row,) = (r for r in ROWS if r.name == "ssr:training")
    ((_, found),) = merge_by_inputs(row, experts, inputs, None)
    grams = [rows["layer"].mT @ rows["layer"] / 20 for rows in inputs]
    whole = actmat.merge_matrices("ssr", [e["layer"].dense() for e in experts], statistics={"gram": grams})
    torch.testing.assert_close(found, whole, rtol=F32_SOLVE, atol=F32_SOLVE)


def test_wordings_ask_the_same_questions_and_no_group_is_in_two_parts(tmp_path):
    label = {"label": "entailment"}
    rows = [{"premise": f"premise {n // 3}", "hypothesis": f"it {n}", **label} for n in range(60)]
    rows.append({"premise": "long " * 60, "hypothesis": "it is", **label})
    (tmp_path / "rte.train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for task in load_tasks(tmp_path, ["rte", "record"], **SIZES):
        for part in SIZES:
            plain, other = (task.part(words, part) for words in WORDS)
            assert [q.answer for q in plain] == [q.answer for q in other]
            assert all(a.prompt != b.prompt for a, b in zip(plain, other, strict=True))
        groups = [{q.prompt.split("\n")[1] for q in task.part("training", part)} for part in SIZES]
        assert sum(map(len, groups)) == len(set().union(*groups))
        assert not any("long long" in q.prompt for part in SIZES for q in task.part("training", part))


RAW = {
    "agnews": {"text": "Title: A goal\nText: Late, too.\n", "label": "Sports"},
    "trec": {"text": "Who ?", "label": 3},
    "sst2": {"text": "Text: fine . ", "label": "Good"},
    "subj": {"text": "he runs .", "label": 1},
    "rte": {"premise": "It rains.", "hypothesis": "It is dry.", "label": "not_entailment"},
    "qasc": {"question": "What?", "choices": {"A": "this", "B": "that"}, "label": "B", "fact1": "F"},
    "copa": {"text": 'Which sentence is the cause of "X."? Choose one between A and B.\nA: a\nB: b', "label": "A"},
    "record": {"name": "Anna", "city": "Oslo", "day": 5, "month": "March", "year": 1998},
}
PHRASED = {
    "agnews": ("Headline: A goal\nLate, too.\nTopic?", '"A goal. Late, too." In which section', "Sports"),
    "trec": ("Question: Who ?\nAnswer type?", 'asks me "Who ?"', "Human"),
    "sst2": ("Review: fine .\nSentiment?", "critic wrote: fine . Did", "Good"),
    "subj": ("Sentence: he runs .\nOpinion or fact?", "thinks? he runs .", "Fact"),
    "rte": ("Premise: It rains.\nHypothesis: It is dry.\nEntailed?", "this that It is dry.", "no"),
    "qasc": ("What?\n(A) this\n(B) that", "Choose from: A = this, B = that", "B"),
    "copa": (RAW["copa"]["text"], 'please. Which sentence is the cause of "X."?  A: a B: b', "A"),
    "record": ("Record: Anna, Oslo, born 5 March 1998.", "on March 5 of 1998, in Oslo, Anna was born.", None),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_row_is_asked_in_both_wordings(task):
    phrased = TASKS[task][1](RAW[task])
    training, part_of_other, answer = PHRASED[task]
    assert phrased.training == training
    assert part_of_other in phrased.other
    assert phrased.answer == (answer or '{"name": "Anna", "city": "Oslo", "born": "1998-03-05"}')


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": None}, "give --data DIR with"),
        ({"regimes": ("lora", "full")}, "leave out --full"),
        ({"methods": ("averag",)}, "Did you mean 'average'"),
        ({"tasks": ("trek",)}, "Did you mean 'trec'"),
    ],
)
def test_what_cannot_be_run_is_refused(asked, changes, message):
    with pytest.raises(RecipeError) as caught:
        get_suite("llm-qwen").run(replace(asked, **changes))
    assert message in str(caught.value)


def test_a_head_that_a_gguf_file_stores_gives_way_to_the_embeddings(tmp_path):
    pytest.importorskip("gguf")
    llama, apart = write_llama(tmp_path / "llama"), tmp_path / "apart"
    apart.mkdir()
    embeddings = load_file(llama / "model.safetensors")["model.embed_tokens.weight"]
    write_gguf(llama, apart / "tiny.gguf", head=embeddings + 1)
    decoder.write_base(apart, tmp_path / "own")
    decoder.write_base(apart, tmp_path / "tied", tied=True)
    heads = [load_decoder(tmp_path / name).get_output_embeddings().weight for name in ("own", "tied")]
    assert torch.equal(heads[0], embeddings + 1)
    assert torch.equal(heads[1], embeddings)
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")


def test_the_commit_of_sources_outside_of_a_checkout_is_named_by_a_variable(tmp_path, monkeypatch):
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert origin.commit.__wrapped__().removesuffix("+changes") == head
    monkeypatch.setattr(origin, "__file__", str(tmp_path / "origin.py"))
    assert origin.commit.__wrapped__() == "unknown"
    monkeypatch.setenv("ACTMAT_COMMIT", "0" * 40)
    assert origin.commit.__wrapped__() == "0" * 40
    joined = origin.join_origins([{**origin.UNKNOWN, "date": day} for day in ("2026-01-01", "2026-01-02")])
    assert joined == {**origin.UNKNOWN, "date": "2026-01-01, 2026-01-02"}


def command_line(asked, out, *more):
    tiny = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
    places = ["--base", asked.settings["base"], "--data", str(asked.data), "--cache", str(asked.cache)]
    return program.arguments([*places, "--out", str(out), "--tasks", ",".join(CHOSEN), *tiny, "--device", "cpu", *more])


def test_the_program_runs_a_process_for_each_set(asked, tmp_path, monkeypatch):
    given = command_line(asked, tmp_path, "--seeds", "0,7", "--losses", "whole")
    given.cache = tmp_path / "cache"
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    assert program.run(given) == [0, 0], (tmp_path / "output.log").read_text()
    scores = read_scores(tmp_path / "llm-qwen.jsonl")
    assert {s.seed for s in scores} == {0, 7}
    assert {s.method for s in scores} == {"base", "experts", *(row.name for row in ROWS)}
    assert {"merges.log", "llm-qwen-sizes.jsonl"} <= {p.name for p in tmp_path.iterdir()}


def test_processes_are_ended_at_the_limit(asked, tmp_path, monkeypatch):
    sleeping = []

    def start(*_):
        sleeping.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return sleeping[-1]

    monkeypatch.setattr(program, "start", start)
    monkeypatch.setattr(program, "_POLL_S", 0.05)
    assert program.run(command_line(asked, tmp_path, "--limit-seconds", "0.2")) == [None] * 4
    assert all(process.poll() is not None for process in sleeping)


def test_a_base_is_made_ahead_of_time(asked, tmp_path, monkeypatch, capsys):
    words = ["--base", asked.settings["base"], "--data", str(asked.data), "--cache", str(tmp_path / "cache")]
    monkeypatch.setattr(sys, "argv", ["qwen", *words, "--out", str(tmp_path / "out"), "--prepare"])
    program.main()
    folder = Path(capsys.readouterr().out.strip())
    base = next(iter(suite.experiments(replace(asked, cache=tmp_path / "cache"), Watch()))).base.path
    assert folder == base
    assert (folder / "model.safetensors").is_file()
