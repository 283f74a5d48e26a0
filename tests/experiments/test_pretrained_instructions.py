"""`llm-tasks` rehearsed with a tiny Llama: questions from files, scores by options, experts, rows, scales."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from benchmarks.evidence.__main__ import collect
from benchmarks.evidence.group import groups
from tests.helpers.pretrained import write_llama
from tests.tolerances import F32_ELEMENTWISE, F64_ORACLE

from actmat.errors import CheckpointError, RecipeError
from actmat_experiments.harness.cache import Cache
from actmat_experiments.harness.lines import json_lines
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.results import read_scores
from actmat_experiments.harness.rows import candidates
from actmat_experiments.harness.suite import score_file
from actmat_experiments.harness.training import Schedule
from actmat_experiments.pretrained import llm
from actmat_experiments.pretrained.decoder import Coder, load_decoder
from actmat_experiments.pretrained.generated import Question
from actmat_experiments.pretrained.instructions import suite
from actmat_experiments.pretrained.instructions.options import rows_of, scores_of
from actmat_experiments.pretrained.instructions.texts import TASKS, load_options
from actmat_experiments.suites import RunRequest, get_suite

SIZES = {"train": 8, "validation": 4, "test": 6}
TINY = {n: str(v) for n, v in SIZES.items()} | {"batch_size": "4", "ranks": "2", "samples": "4", "scales": "0.5,1"}
METHODS = ("average", "regmean")
SINGLE = {"agnews": "agnews", "subj": "subj", "trec": "trec", "mr": "mr", "cr": "custrev", "mpqa": "mpqa"}


def row(name: str, i: int) -> dict[str, object]:
    """The i-th row of a task's files."""
    if name in SINGLE:
        label = ("World", "Sports")[i % 2] if name == "agnews" else i % 2
        return {"text": f"Title: Text {i}", "label": label}
    label, facts = i % 2, {"fact1": f"F {i // 2}.", "fact2": "G."}
    both = {"option1": f"Ann{i // 2}", "option2": f"Bob{i // 2}"}
    made: dict[str, dict[str, object]] = {
        "rte": {"premise": f"P {i // 2}", "hypothesis": f"h {i}", "label": ("entailment", "not_entailment")[label]},
        "wikiqa": {"qid": str(i // 3), "question": f"q {i // 3}", "sentence": f"s {i}", "label": label},
        "copa": {
            "text": f'Which sentence is the {("cause", "effect")[label]} of "It {i}."? '
            f"Choose one between A and B.\nA: One {i}.\nB: Two.",
            "label": "AB"[label],
        },
        "qasc": facts | {"question": f"q {i}", "choices": {"A": "x y", "B": "z"}, "label": "AB"[label]},
        "winogrande": both | {"sentence": f"{i} saw _.", "label": ("option1", "option2")[label]},
        "wsc": {"text": f"T {i // 2}.", "target": {"span1_text": f"A{i}", "span2_text": "it"}, "label": bool(label)},
    }
    return made[name]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, source in TASKS.items():
        for n, file in enumerate((*source.learnt, *source.tested)):
            rows = [row(name, 60 * n + i) for i in range(60)]
            (folder / file).write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama") / "base")


@pytest.fixture(scope="module")
def finished(base, data, tmp_path_factory):
    cache = tmp_path_factory.mktemp("tasks") / "cache"
    fields = {"tasks": ("mr", "copa"), "methods": METHODS, "settings": TINY | {"base": str(base)}, "threads": 1}
    asked = RunRequest("llm-tasks", cache, regimes=("lora", "full"), data=data, **fields)
    get_suite("llm-tasks").run(asked)
    return asked


def asked_of(name, i):
    """Prompt without the turn's marks, and options without their end, of the i-th row."""
    question = next(TASKS[name].read([row(name, i)])).question
    prompt = question.prompt.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    return prompt, [o.removesuffix("<|im_end|>") for o in question.options], question.options.index(question.answer)


@pytest.mark.parametrize(
    ("name", "i", "expected"),
    [
        ("mr", 1, ("Is this film review negative or positive?\nText 1", ["negative", "positive"], 1)),
        ("rte", 1, ("P 0\nDoes it follow that h 1", ["no", "yes"], 0)),
        ("wikiqa", 1, ("Does the sentence answer?\nQuestion: q 0\nSentence: s 1", ["no", "yes"], 1)),
        ("copa", 0, ("It 0. Why?", ["One 0.", "Two."], 0)),
        ("copa", 1, ("It 1. What happened then?", ["One 1.", "Two."], 1)),
        ("qasc", 3, ("F 1. G.\nq 3", ["x y", "z"], 1)),
        ("winogrande", 1, ("What should stand in place of _?\n1 saw _.", ["Ann0", "Bob0"], 1)),
        ("wsc", 1, ("T 0.\nDoes “it” mean “A1”?", ["no", "yes"], 1)),
    ],
)
def test_rows_are_asked_as_written(name, i, expected):
    assert asked_of(name, i) == expected


def test_wikiqa_has_one_right_and_one_wrong_sentence_of_a_question():
    rows = [{"qid": "1", "question": "q", "sentence": f"s{i}", "label": label} for i, label in enumerate((0, 0, 1, 1))]
    found = [q.question for q in TASKS["wikiqa"].read(rows)]
    assert [("s0" in q.prompt, "s2" in q.prompt) for q in found] == [(True, False), (False, True)]


def test_no_group_is_in_two_parts_and_all_draws_stay(data):
    tasks = load_options(data, list(TASKS), **SIZES)
    assert tasks == load_options(data, list(TASKS), **SIZES)
    for task in tasks:
        assert [len(getattr(task, part)) for part in SIZES] == list(SIZES.values())
        source = TASKS[task.name]
        every = [a for f in (*source.learnt, *source.tested) for a in source.read(json_lines((data / f).read_text()))]
        group = {a.question: a.group for a in every}
        parts = [{group[q] for q in getattr(task, part)} for part in SIZES]
        assert len(set.union(*parts)) == sum(map(len, parts)), task.name
        assert all(q.answer in q.options for part in SIZES for q in getattr(task, part))
        assert len({len(q.options) for part in SIZES for q in getattr(task, part)}) == 1


def test_all_problems_with_the_data_are_named_at_once(data, tmp_path):
    (tmp_path / "mr.train.jsonl").write_text('{"text": "x", "label": 7}\n')
    with pytest.raises(CheckpointError) as error:
        load_options(tmp_path, ["mr", "copa"], **SIZES)
    text = str(error.value)
    assert "mr.train.jsonl has unexpected content: ValueError" in text
    assert "mr.test.jsonl is missing" in text
    assert "copa: copa.train.jsonl is missing" in text
    with pytest.raises(RecipeError, match=r"'mrr' is no task.* 'mr'"):
        get_suite("llm-tasks").run(RunRequest("llm-tasks", tmp_path, tasks=("mrr",), data=data))
    with pytest.raises(RecipeError, match="--data"):
        get_suite("llm-tasks").run(RunRequest("llm-tasks", tmp_path, tasks=("mr",)))


def test_scores_are_those_of_each_option_behind_its_prompt(base):
    model, coder = load_decoder(base).double(), Coder(base)
    questions = [
        Question("ab", "cd<|im_end|>", ("cd<|im_end|>", "e<|im_end|>", "<|im_end|>")),
        Question("a much longer prompt", "f<|im_end|>", ("f<|im_end|>", "g long one<|im_end|>", "cd<|im_end|>")),
    ]
    found = scores_of(model, rows_of(coder, questions))
    for n, question in enumerate(questions):
        for c, option in enumerate(question.options):
            ((prompt, answer),) = coder([Question(question.prompt, option)])
            with torch.no_grad():
                logs = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
            alone = sum(float(logs[len(prompt) - 1 + i, token]) for i, token in enumerate(answer))
            assert float(found[n, c]) == pytest.approx(alone, rel=F32_ELEMENTWISE)


def test_every_row_has_all_tasks_and_a_second_run_trains_nothing(finished, monkeypatch, tmp_path):
    scores = read_scores(score_file(finished.cache, finished.suite))
    found = {(s.regime, s.method, s.scale, s.task) for s in scores}
    kinds = [(m, k) for m in METHODS for k in ("default", "tuned")]
    kinds += [(m, "default") for m in ("majority", "base", "experts")]
    assert found == {(r, m, k, t) for r in ("lora", "full") for m, k in kinds for t in ("mr", "copa")}
    assert all(s.detail["validation"]["divergence"] >= 0 for s in scores if s.method in METHODS)

    def forbidden(*args, **more):
        raise AssertionError("this was done already")

    monkeypatch.setattr(llm, "supervise", forbidden)
    get_suite(finished.suite).run(finished)
    assert read_scores(score_file(finished.cache, finished.suite)) == scores
    collect(finished.cache, tmp_path)
    found = groups(tmp_path, ("llm-tasks",))
    assert [(g.regime, sorted(g.rows())) for g in found] == [("lora", sorted(METHODS)), ("full", sorted(METHODS))]
    assert not found[0].candidates(0), "not all scales saw test data, so there is nothing to choose among"


def test_only_the_default_and_the_chosen_scale_see_test_questions(finished, tmp_path):
    made = replace(next(iter(suite.experiments(finished, Watch()))), scales=(0.5, 1.0, 2.0))
    parts = []
    test = suite.OptionLlm.test

    def watched(self, model, task, part):
        parts.append(part)
        return test(self, model, task, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite.OptionLlm, "test", watched)
        rows, _ = candidates(("task_arithmetic",), "lora", 2)
        (result,) = made.merges(rows).values()
    assert parts.count("validation") == 3 * 2
    seen = {str(result["default"]), str(result["tuned"])}
    assert parts.count("test") == 2 * len(seen)
    assert set(result["test"]) == seen
    every = replace(made, every_scale=True).merges(rows)["task_arithmetic"]
    assert set(every["test"]) == {"0.5", "1.0", "2.0"}
    assert {k: every[k] for k in ("default", "tuned")} == {k: result[k] for k in ("default", "tuned")}


def test_an_expert_is_nearest_to_itself(finished):
    made = next(iter(suite.experiments(finished, Watch())))
    expert = made.load(made.experts()["copa"].path)
    assert made.test(expert, "copa", "validation")["divergence"] == pytest.approx(0, abs=F64_ORACLE)
    assert made.test(load_decoder(made.base.path), "copa", "validation")["divergence"] > 0
    assert "divergence" not in made.test(expert, "copa", "test")


def test_training_in_bfloat16_moves_the_weights_as_float32_does(finished, tmp_path):
    made = next(iter(suite.experiments(replace(finished, regimes=("full",)), Watch())))
    start = load_decoder(made.base.path).state_dict()

    def moved(precision):
        run = replace(made, precision=precision, cache=Cache(tmp_path / precision), schedule=Schedule(8, 4, 1e-2))
        weights = run.load(run.experts()["copa"].path).state_dict()
        return torch.cat([(weights[n] - start[n]).flatten() for n in start])

    whole, half = moved("float32"), moved("bfloat16")
    assert float(torch.cosine_similarity(whole, half, dim=0)) > 0.9
    assert float(half.norm() / whole.norm()) == pytest.approx(1, abs=0.1)
