"""`actmat merge --data` and `--check`: merges by a few inputs of each expert, and the answers that they keep."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoint_files import edit_json
from tests.helpers.family import TEXTS, Told, data_flags, model_flags
from tests.helpers.merging import actmat
from tests.tolerances import F32_FORWARD, relative_error

import actmat as api
from actmat.diagnostics.answers import GUESSES
from actmat.diagnostics.model import read_diagnosis
from actmat.errors import RecipeError, StatisticsError
from actmat.extras.collect.data import DataOptions, read_rows
from actmat.extras.models.loading import load_model
from actmat.extras.tune import with_inputs
from actmat.extras.tune.evaluate import AnswerComparison, default_predict
from actmat.extras.tune.kept import Asking, Compared
from actmat.extras.tune.live import Loader
from actmat.extras.tune.sources import DataRows, InputSettings, is_prompt
from actmat.extras.tune.with_inputs import choose, merge_with_inputs
from actmat.progress import Progress
from actmat.recipe import ExpertRef, Recipe, make_recipe
from actmat.report.manifest import read_manifest
from actmat.settings import RunSettings
from actmat.statistics import open_statistics

QUICK = ["--set", "new_tokens=4"]


def adapter_flags(family: Path) -> list[str]:
    places = [x for name in TEXTS for x in ("-e", f"{name}={family / 'adapters' / name}")]
    return ["-b", str(family / "base"), "--to", "peft", *places]


def merged(family: Path, out: Path, *flags: str) -> Any:
    outcome = actmat(["merge", *flags, "--out", out, *QUICK, "--json"], code=0)
    return json.loads(outcome.out)["outputs"][0]


@pytest.fixture(scope="module")
def adapters(family: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A merge of adapters by the texts, and its JSON."""
    out = tmp_path_factory.mktemp("inputs") / "merged"
    return out, merged(family, out, *adapter_flags(family), *data_flags(family))


def test_a_call_names_the_kind_of_its_output_and_hears_of_the_stages(family: Path, tmp_path: Path) -> None:
    experts, stages = {name: family / "adapters" / name for name in TEXTS}, Told()
    data, out = {name: texts[0] for name, texts in TEXTS.items()}, tmp_path / "m"
    report = api.merge(family / "base", experts, data=data, to="model", new_tokens=2, out=out, progress=stages)
    assert (report.plan.output, (out / "config.json").is_file()) == ("model", True)
    assert "merging" in stages.texts


def test_adapters_become_an_adapter_by_regmean_of_their_inputs(
    family: Path, adapters: tuple[Path, Any], tmp_path: Path
) -> None:
    out, found = adapters
    assert (found["method"], found["kind"]) == ("regmean", "adapter")
    notes = [n["text"] for n in found["notes"]]
    assert "inputs of 'math': 6 measured; answers compared on 6 (each by a merge without it, of 2)" in notes
    (compared,) = [n for n in notes if n.startswith("auto: of 12 answers, a merge by inputs keeps ")]
    assert "average without inputs" in compared, compared
    assert "auto: inputs of the experts: regmean with a ridge of 0.001 and a prior that counts as 4 inputs" in notes
    assert [p.name for p in out.parent.iterdir()] == ["merged"], "no statistics and no average are left"
    for name in TEXTS:
        place = ["--base", str(family / "base"), "--data", str(family / f"{name}.jsonl")]
        stats = ["statistics", "collect", str(family / "adapters" / name), *place, "--out", str(tmp_path / name)]
        actmat([*stats, "--quiet"], code=0)
    statistics = [x for name in TEXTS for x in ("--statistics", f"{name}={tmp_path / name}")]
    by_hand = tmp_path / "by-hand"
    how = [*adapter_flags(family)[4:], "-m", "regmean", "-o", "prior=0.6667", "-o", "ridge=0.001", *statistics]
    actmat(["merge", *how, "--out", by_hand, "--quiet"], code=0)
    mine, theirs = (load_file(p / "adapter_model.safetensors") for p in (out, by_hand))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():  # of other batches: the ridge lets their rounding through
        assert relative_error(tensor, theirs[name]) < F32_FORWARD
    five_times = 5 * sum(found["size"]["experts"]) / 2 / found["size"]["merged"]
    large = actmat(["merge", *how, "--scale", five_times, "--out", tmp_path / "large", "--json"])
    assert json.loads(large.out)["outputs"][0]["warnings"] == [], "the size of a merge by inputs says nothing"


def test_kept_are_answers_that_a_merge_which_has_not_seen_the_input_would_write(
    family: Path, adapters: tuple[Path, Any], tmp_path: Path
) -> None:
    _, found = adapters
    merges = []
    for fold in range(2):
        for name in TEXTS:
            texts = [t for n, t in enumerate(TEXTS[name]) if n % 2 != fold]
            (tmp_path / f"{fold}-{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        data = [x for name in TEXTS for x in ("--data", f"{name}={tmp_path / f'{fold}-{name}.jsonl'}")]
        merged(family, tmp_path / str(fold), *adapter_flags(family), *data)
        merges.append(tmp_path / str(fold))
    for row, name in zip(found["answers"], TEXTS, strict=True):
        base = str(family / "base")
        places = (family / "adapters" / name, *merges)
        expert, *models = (load_model(str(p), adapters_base=base) for p in places)
        from transformers import AutoTokenizer

        tokenizer, kept, same, tokens = AutoTokenizer.from_pretrained(base), 0, 0, 0
        for n, text in enumerate(TEXTS[name]):
            seen = tokenizer(text, return_tensors="pt")
            with torch.no_grad():
                asked = {"input_ids": seen.input_ids, "attention_mask": seen.attention_mask}
                whole, mine = (
                    m.generate(**asked, max_new_tokens=4, do_sample=False, pad_token_id=0)
                    for m in (expert.model, models[n % 2].model)
                )
                ranked = default_predict(models[n % 2].model, {"input_ids": whole}).argmax(-1)[:, :-1]
            kept += torch.equal(whole, mine)
            right = (ranked == whole[:, 1:])[:, seen.input_ids.shape[1] - 1 :]
            same, tokens = same + int(right.sum()), tokens + right.numel()
        assert row["kept"] == kept
        assert 1 - row["disagreement"] == pytest.approx(same / tokens)
        assert (row["expert"], row["inputs"], row["measured"], row["low"]) == (name, 6, False, None)
        assert row["without"] is not None
        assert row["average"] is not None


def test_inputs_change_no_kind_of_output_and_a_full_model_is_judged_by_the_adapter_of_its_deltas(
    family: Path, adapters: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(family)
    model = [f for f in adapter_flags(family) if f not in ("--to", "peft")]
    found = merged(family, tmp_path / "model", *model, *data_flags(family))
    assert found["kind"] == merged(family, tmp_path / "without", *model, "-m", "average")["kind"] == "model"
    assert found["answers"] == adapters[1]["answers"]
    one_prompt = [x for name in TEXTS for x in ("--data", f"{name}=one two")]
    alone = merged(family, tmp_path / "alone", *model[2:], *one_prompt)
    assert alone["kind"] == merged(family, tmp_path / "plain", *model[2:], "-m", "average")["kind"] == "adapter"


@pytest.mark.parametrize("text", ["one two three", "What is 2.5 plus 3?"])
def test_one_prompt_in_the_flag_is_measured_and_asked(family: Path, tmp_path: Path, text: str) -> None:
    flags = [x for name in TEXTS for x in ("--data", f"{name}={text}")]
    outcome = actmat(["merge", *adapter_flags(family), *flags, "--out", tmp_path / "m", *QUICK], code=0)
    lines = outcome.out.splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("expert"))
    start = next(n for n, line in enumerate(lines) if line.startswith("too few inputs to say: give 8 a task (kept "))
    assert start <= 2, "first, below the name of the output"
    said = " ".join(line.strip() for line in lines[start:head])
    assert "answers kept" in lines[head]
    assert "1*" in lines[head + 1]
    assert "*: measured on these very inputs" in outcome.out
    assert said == read_manifest(tmp_path / "m")["verdict"]
    assert actmat(["inspect", tmp_path / "m"]).words.startswith(said)
    card = (tmp_path / "m" / "README.md").read_text().splitlines()
    assert card[card.index(next(x for x in card if x.startswith("# "))) + 2].startswith("**too few inputs to say")
    assert api.verify(tmp_path / "m").ok
    assert "1 measured; answers compared on 1 (the same)" in outcome.words
    assert max(map(len, lines)) <= 80


def test_models_are_checked_on_inputs_of_their_own_and_the_report_says_it(family: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    check = [x for name in TEXTS for x in ("--check", f"{name}={family / name}.jsonl")]
    found = merged(family, out, *model_flags(family), *data_flags(family), *check, "--diagnose")
    assert found["method"] == "regmean"
    assert [r["inputs"] for r in found["answers"]] == [6, 6]
    assert read_manifest(out)["recipe"]["mute"] == [*GUESSES]
    agreement = read_diagnosis(out).agreement
    assert [r.disagreement for r in agreement] == [r["disagreement"] for r in found["answers"]]
    page = (out / "report.html").read_text()
    assert read_manifest(out)["verdict"] in page
    assert api.verify(out).ok
    again = merged(family, out, *model_flags(family), *data_flags(family), *check, "--diagnose")
    assert again["was_finished"]
    few = merged(family, tmp_path / "few", *model_flags(family), *data_flags(family), *check, "--set", "samples=2")
    assert [r["inputs"] for r in few["answers"]] == [6, 6], "samples limits what is measured"


def test_check_alone_compares_any_method_and_labels_give_accuracy(family: Path, tmp_path: Path) -> None:
    rows = [{"text": "one two", "answer": " three"}, {"text": "four", "answer": " five six"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    check = ["--check", f"math={tmp_path / 'a.jsonl'}"]
    outcome = actmat(["merge", *model_flags(family), "-m", "ties", *check, "--out", tmp_path / "m", *QUICK], code=0)
    lines = outcome.out.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("expert"))
    head, first, below = lines[at : at + 3]
    assert head.split() == ["expert", "answers", "kept", "95", "%", "without", "average", "inputs", "expert's"]
    assert first.split()[0] == "math"
    assert "(0.0%)" in first, "a random model does not know the answers"
    assert "code" not in below


@pytest.mark.parametrize(
    ("weights", "scale", "says"),
    [((1, 0), 1, "better than"), ((0, 1), 1, "NOT BETTER than"), ((1, 0), 40, "NOT BETTER than")],
)
def test_the_verdict_on_merges_of_known_quality(
    family: Path, tmp_path: Path, weights: tuple[int, int], scale: int, says: str
) -> None:
    """One expert's weights, asked its own questions, the other's, and far out; no check contradicts the answers."""
    words = ["one", "two", "three", "def", "x", "for", "while", "import", "seven", "eight", "return", "ten"]
    (tmp_path / "t.jsonl").write_text(
        "".join(json.dumps({"text": f"{w} {v}"}) + "\n" for w, v in itertools.pairwise(words))
    )
    flags = [*model_flags(family), *(x for w in weights for x in ("--weight", str(w)))]
    flags += ["-m", "linear", "--scale", str(scale)]
    out = merged(family, tmp_path / "m", *flags, "--check", f"math={tmp_path / 't.jsonl'}", "--diagnose")
    manifest = read_manifest(tmp_path / "m")
    assert manifest["verdict"].startswith(says)
    assert not {n["code"] for n in manifest["notes"]} & {*GUESSES}
    assert out["warnings"] == []
    assert not {f.code for f in read_diagnosis(tmp_path / "m").findings if not f.muted} & {*GUESSES}


@pytest.mark.parametrize(("others", "method"), [(2, "auto"), (3, "auto"), (4, "ties")])
def test_auto_takes_inputs_unless_its_own_choice_keeps_more_answers(others: int, method: str) -> None:
    def kept(number: int) -> dict[str, Compared]:
        return {"a": Compared(AnswerComparison(differing=(0,) * number + (1,) * (5 - number)))}

    recipe = Recipe(experts=(ExpertRef(path="x"),), method="auto")
    rivals = {"without": (("ties", {"density": 0.5}, "full"), kept(others))}
    chosen, compared = choose(recipe, kept(3), rivals)
    assert (chosen.method, compared) == (method, kept(max(3, others)))
    assert chosen.notes == (f"auto: of 5 answers, a merge by inputs keeps 3, ties without inputs {others}",)
    assert choose(recipe.model_copy(update={"method": "average"}), kept(3), rivals)[0].method == "average"


def test_statistics_are_kept_on_request_and_repeat_the_merge(family: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    keep = ["--set", "keep_statistics=true"]
    merged(family, out, *adapter_flags(family), *data_flags(family), *keep)
    assert {p.name for p in (tmp_path / "merged.statistics").iterdir()} == {*TEXTS}
    recipe = read_manifest(out)["recipe"]
    assert recipe["experts"][0]["statistics"] == str(tmp_path / "merged.statistics" / "math")
    factors = {n for n in load_file(out / "adapter_model.safetensors") if ".lora_A." in n}
    changed = {n.removeprefix("base_model.model.").replace(".lora_A.", ".") for n in factors}
    with open_statistics(tmp_path / "merged.statistics" / "math") as statistics:
        assert {*statistics.header.places} == changed, "the weights that adapters change"


def test_without_inputs_the_summary_says_how_to_measure_and_gives_no_norm(family: Path, tmp_path: Path) -> None:
    outcome = actmat(["merge", *model_flags(family), "--out", tmp_path / "m"])
    assert "  is it good? Not measured: add --data NAME=INPUTS" in outcome.out
    assert "norm of" not in outcome.out


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--data", "more.jsonl"], "every expert needs inputs of its own task"),
        (["--data", "math=one two"], "no data is given for 'code'"),
        (["--check", "mth=one two"], "no expert is named 'mth'"),
        (["--data", "math=none.jsonl", "--data", "code=none.jsonl"], "no such file"),
        (["--set", "tune_scale=true"], "chooses the scale by --data"),
    ],
)
def test_wrong_inputs(family: Path, tmp_path: Path, flags: list[str], text: str) -> None:
    outcome = actmat(["merge", *model_flags(family), *flags, "--out", tmp_path / "m"])
    assert outcome.code in (1, 2), outcome
    assert text in outcome.words
    assert not list(tmp_path.iterdir())


def test_the_plan_says_what_is_measured_and_runs_nothing(family: Path, tmp_path: Path) -> None:
    flags = [*adapter_flags(family), *data_flags(family), "--out", str(tmp_path / "m")]
    for command in (["plan", *flags], ["plan", *flags[:-2]]):
        outcome = actmat(command, code=0)
        assert outcome.out.startswith(
            "regmean, with inputs of 2 experts\n  math: 6 inputs measured, answers compared on 6"
        )
        assert "on the disk per expert" in outcome.out
        assert "nothing was run" in outcome.out
        assert max(map(len, outcome.out.splitlines())) <= 80
    assert not list(tmp_path.iterdir())


def test_of_many_inputs_all_are_measured_and_some_are_asked(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(with_inputs, "ASKED", 4)
    data = {name: family / f"{name}.jsonl" for name in TEXTS}
    flags = [*adapter_flags(family), *data_flags(family)]
    assert "math: 6 inputs measured, answers compared on 4" in actmat(["plan", *flags]).out
    places = [family / "adapters" / n for n in TEXTS]
    report = api.merge(str(family / "base"), places, data=data, out=tmp_path / "m", new_tokens=4)
    assert [(r.inputs, r.measured) for r in report.answers] == [(4, False)] * 2
    notes = [n.text for n in report.plan.notes]
    assert "inputs of 'math': 6 measured; answers compared on 4 (each by a merge without it, of 2)" in notes


def test_chats_go_through_the_template_and_their_last_answer_is_the_right_one(family: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}def{% endif %}"
    shutil.copytree(family / "adapters", tmp_path / "adapters")
    shutil.copytree(family / "base", tmp_path / "base")
    edit_json(tmp_path / "base" / "tokenizer_config.json", chat_template=template)
    rows = [
        {"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": " two"}]} for t in TEXTS["math"]
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"{t} def", "answer": " two"}) + "\n" for t in TEXTS["math"])
    )
    found = []
    for data in ("chat", "text"):
        flags = [x for name in TEXTS for x in ("-e", f"{name}={tmp_path / 'adapters' / name}")]
        flags += [x for name in TEXTS for x in ("--data", f"{name}={tmp_path / data}.jsonl")]
        out = merged(tmp_path, tmp_path / data / "out", "-b", str(tmp_path / "base"), *flags)
        found.append([{k: v for k, v in row.items() if k != "data"} for row in out["answers"]])
    assert found[0] == found[1]
    assert found[0][0]["accuracy"] is not None


def test_python_merges_by_inputs_and_says_what_was_kept(
    family: Path, adapters: tuple[Path, Any], tmp_path: Path
) -> None:
    base, places = str(family / "base"), [family / "adapters" / n for n in TEXTS]
    data = {n: family / f"{n}.jsonl" for n in TEXTS}
    report = api.merge(base, places, data=data, to="peft", out=tmp_path / "m", new_tokens=4)
    assert [dataclasses.asdict(r) | {"data": ""} for r in report.answers] == [
        r | {"data": ""} for r in adapters[1]["answers"]
    ]
    assert "too few inputs to say" in repr(report)
    checked = api.merge(base, places, check={"math": "one two"}, to="peft", out=tmp_path / "c").answers
    assert [r.inputs for r in checked] == [1]
    for text, fields in {"out=FOLDER": {}, "found str": {"data": "one two"}}.items():
        with pytest.raises(RecipeError, match=text):
            api.merge(**{"base": base, "experts": places, "data": data} | fields)


def test_models_in_memory_give_the_bytes_and_answers_of_their_folders(family: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base, places = str(family / "base"), {n: str(family / "experts" / n) for n in TEXTS}
    data: dict[str, Any] = {n: family / f"{n}.jsonl" for n in TEXTS}
    stored = api.merge(base, places, data=data, out=tmp_path / "stored", new_tokens=4)
    models = {n: AutoModelForCausalLM.from_pretrained(p, dtype="float32").train() for n, p in places.items()}
    first, second = places
    held = api.merge(models[first], {**models, second: places[second]}, data=data, out=tmp_path / "base", new_tokens=4)
    assert held.answers != stored.answers, "another base"
    held = api.merge(AutoModelForCausalLM.from_pretrained(base), models, data=data, out=tmp_path / "held", new_tokens=4)
    assert (held.answers, held.plan.recipe.labels) == (stored.answers, tuple(TEXTS))
    mine, theirs = (load_file(tmp_path / p / "model.safetensors") for p in ("held", "stored"))
    assert all(torch.equal(mine[n], t) for n, t in theirs.items())
    assert all(m.training for m in models.values()), "as they were"
    nameless = AutoModelForCausalLM.from_config(models[first].config)
    nameless.name_or_path = ""
    for expert in (nameless, models[first].state_dict()):
        with pytest.raises(RecipeError, match=f"in memory: {first}; only a transformers model"):
            api.merge(base, {first: expert, second: models[second]}, data=data, out=tmp_path / "x")


def test_an_output_whose_statistics_are_gone_is_verified_not_diagnosed(adapters: tuple[Path, Any]) -> None:
    for more in ([], ["--data", "math=one two"]):
        outcome = actmat(["diagnose", adapters[0], *more], code=1)
        assert "--check NAME=INPUTS' compares answers" in outcome.words
        assert "asking" not in outcome.err, "before any model is run"


def test_prompts_and_places(tmp_path: Path) -> None:
    assert is_prompt("Question: a / b?\nAnswer:")
    assert is_prompt("text:word")
    assert not any(map(is_prompt, ["word", "org/name", "my data.jsonl", "./a b", "data.arrow", " "]))
    settings = InputSettings()
    said = settings.source("text:hello", measured=True)
    assert (said.location, said.rows) == ("the prompt given", ({"text": "hello"},))
    with pytest.raises(StatisticsError, match=r"promts: no such file or folder; a prompt\? Write text:promts"):
        read_rows(settings.source("promts", measured=True))
    (tmp_path / "a.jsonl").write_text('{"text": "x", "question": "y"}\n')
    by_name = settings.source(f"{tmp_path}/a.jsonl:question", measured=True)
    assert (by_name.location, by_name.text_column) == (f"{tmp_path}/a.jsonl", "question")
    chat = [{"role": "user", "content": "x"}]
    rows = settings.source(["x", chat, {"question": "y"}], measured=True).rows
    assert rows == ({"text": "x"}, {"messages": chat}, {"question": "y"})
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    assert read_rows(settings.source(tmp_path / "chats.jsonl", measured=True)) == [{"messages": chat}]
    with pytest.raises(RecipeError, match="An input is a int"):
        settings.source([1], measured=True)


def test_an_unknown_expert_is_an_error_in_python(family: Path, tmp_path: Path) -> None:
    recipe: Recipe = make_recipe(
        {"base": str(family / "base"), "experts": [str(family / "experts" / n) for n in TEXTS], "out": str(tmp_path)}
    )
    with pytest.raises(RecipeError, match="unknown experts"):
        merge_with_inputs([recipe], {"x": "a b"}, {}, InputSettings(), RunSettings(), Progress())


def test_an_adapter_behind_one_that_brings_a_base_of_its_own_is_measured_as_alone(family: Path, tmp_path: Path) -> None:
    other = shutil.copytree(family / "adapters" / "code", tmp_path / "other")
    config = other / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "modules_to_save": ["model.norm"]}))
    norm = {"base_model.model.model.norm.weight": load_file(family / "base" / "model.safetensors")["model.norm.weight"]}
    save_file(load_file(other / "adapter_model.safetensors") | norm, other / "adapter_model.safetensors")
    asking = Asking(Loader(str(family / "base")), InputSettings(), Progress())
    rows, grams = DataRows(DataOptions("texts"), [{"text": t} for t in TEXTS["math"]]), []
    for place in (family / "adapters" / "math", other, family / "adapters" / "math"):
        asking.measure("math", asking.loader.load(str(place)), rows, {"gram"}, tmp_path / "statistics")
        with open_statistics(tmp_path / "statistics") as statistics:
            grams.append(statistics.header.grams)
    assert grams[2] == grams[0] != grams[1]
