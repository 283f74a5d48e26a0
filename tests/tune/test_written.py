"""`--data self`: prompts that experts write themselves, which experts are refused, and what is recorded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.family import TEXTS, experts_of, model_flags
from tests.helpers.merging import actmat
from tests.tolerances import F32_FORWARD

import actmat as api
from actmat.errors import RecipeError, StatisticsError
from actmat.extras.collect.data import DataOptions, read_rows
from actmat.extras.models.loading import Loaded, load_model
from actmat.extras.tune import written as module
from actmat.extras.tune.sources import InputSettings
from actmat.extras.tune.with_inputs import merge_with_inputs
from actmat.extras.tune.written import LONGEST, WrittenPrompts, check_written, write_prompts
from actmat.progress import Progress
from actmat.recipe import make_recipe
from actmat.report.manifest import read_manifest
from actmat.settings import RunSettings

TEMPLATE = "w5 {} w7"


@pytest.fixture(autouse=True)
def _far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny experts' prompts are more probable under them by 0.7 nats per token, under adapters by 0.01."""
    monkeypatch.setattr(module, "MORE_PROBABLE", 0.3)


def merged(family: Path, experts: list[Path], out: Path, data: Any, **fields: Any) -> Any:
    recipe = make_recipe({"base": str(family / "base"), "experts": list(map(str, experts)), "out": str(out)})
    settings = InputSettings(**{"template": TEMPLATE, "new_tokens": 2} | fields)
    return merge_with_inputs([recipe], data, {}, settings, RunSettings(), Progress())[0]


def test_experts_write_their_inputs_and_the_record_holds_no_text(family: Path, tmp_path: Path) -> None:
    report = merged(family, experts_of(family), tmp_path / "m", "self", keep_statistics=True)
    assert [r.inputs for r in report.answers] == [32, 32]
    assert all(r.data.startswith("self (32 prompts, seed 0, SHA-256 ") for r in report.answers)
    expert = load_model(str(experts_of(family)[0]))
    texts = write_prompts(expert, DataOptions("self", template=TEMPLATE), 32, seed=0).texts
    assert len(set(texts)) == 32
    assert texts == write_prompts(expert, DataOptions("self", template=TEMPLATE), 32, seed=0).texts
    assert texts != write_prompts(expert, DataOptions("self", template=TEMPLATE), 32, seed=1).texts
    longest = max(texts, key=len)
    files = [p.read_bytes() for folder in ("m", "m.statistics") for p in (tmp_path / folder).rglob("*") if p.is_file()]
    assert not any(longest.encode() in content for content in files)
    again = merged(family, experts_of(family), tmp_path / "again", "self")
    assert [r.data for r in again.answers] == [r.data for r in report.answers]
    header = read_manifest(tmp_path / "m")["recipe"]["notes"]
    assert any("wrote themselves: 'math' 32, 'code' 32" in str(note) for note in header)


def test_an_expert_that_writes_what_the_base_writes_is_refused(family: Path, tmp_path: Path) -> None:
    with pytest.raises(StatisticsError) as caught:
        merged(family, [family / "adapters" / n for n in TEXTS], tmp_path / "m", {"math": "self", "code": "self"})
    assert len(caught.value.problems) == 2
    assert "'math' writes what the base writes" in caught.value.problems[0]
    assert "Fix: --data math=PROMPT" in caught.value.problems[0]
    assert not list(tmp_path.iterdir())


def test_an_expert_that_repeats_itself_is_refused() -> None:
    written = WrittenPrompts(("Human", "Entity"), [1], [[2], [3]], -0.1, different=0.2)
    with pytest.raises(StatisticsError, match="'kind' repeats itself: only 20% of the prompts") as error:
        check_written({"kind": written, "other": replace(written, different=0.5)}, {"kind": 14.0, "other": 2.0})
    assert len(error.value.problems) == 1
    nothing = WrittenPrompts((), [1], [], 0.0, different=0.0)
    assert nothing.gain(torch.nn.Linear(1, 1)) == 0.0, "an expert that ends every prompt at once is refused, too"


def test_one_expert_may_write_and_another_be_given_prompts(family: Path, tmp_path: Path) -> None:
    data = {"math": "self", "code": str(family / "code.jsonl")}
    report = merged(family, experts_of(family), tmp_path / "m", data)
    assert [r.data.split()[0] for r in report.answers] == ["self", str(family / "code.jsonl")]


def test_gain_is_the_mean_difference_of_log_probabilities(family: Path) -> None:
    expert, base = (load_model(str(p)) for p in (experts_of(family)[0], family / "base"))
    written = write_prompts(expert, DataOptions("self", template=TEMPLATE), 4, seed=0)
    ids = [[*written.start, *tokens] for tokens in written.tokens]
    total = 0.0
    assert max(map(len, written.tokens)) <= LONGEST
    for row in ids:
        for at in range(len(written.start), len(row)):
            for loaded, sign in ((expert, 1), (base, -1)):
                model: Any = loaded.model
                with torch.no_grad():
                    logits = model(torch.tensor([row[:at]])).logits[0, -1].double()
                total += sign * float(logits.log_softmax(-1)[row[at]])
    wanted = total / sum(map(len, written.tokens))
    assert written.gain(base.model) == pytest.approx(wanted, rel=F32_FORWARD)


def test_a_chat_template_gives_the_start_and_the_end_of_a_prompt(family: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(family / "base")
    loaded = load_model(str(experts_of(family)[0]))
    with pytest.raises(StatisticsError, match="no chat template"):
        write_prompts(loaded, DataOptions("self"), 4, seed=0)
    tokenizer.chat_template = "w5 {% for m in messages %}{{ m['content'] }}{% endfor %} w7"
    tokenizer.save_pretrained(tmp_path)
    chatty = Loaded(loaded.model, loaded.checkpoint, None, str(tmp_path))
    by_chat = write_prompts(chatty, DataOptions("self"), 4, seed=0)
    by_template = write_prompts(loaded, DataOptions("self", template=TEMPLATE), 4, seed=0)
    assert tokenizer.decode(by_chat.start).split()[-1] == "w5"
    assert by_chat.texts == by_template.texts
    assert not any("w7" in text for text in by_chat.texts), "a prompt ends where the template goes on"


def test_templates_go_around_texts_and_self_is_no_data_set(family: Path, tmp_path: Path) -> None:
    with pytest.raises(StatisticsError, match="experts write prompts for --data"):
        read_rows(DataOptions("self"))
    rows = [{"text": f"w5 {t} w7"} for t in TEXTS["math"]]
    (tmp_path / "whole.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    templates: list[Any] = [{"math": TEMPLATE}, None]
    answers = [
        merged(family, experts_of(family), tmp_path / str(n), {"math": str(p), "code": "one two"}, template=t).answers
        for n, (t, p) in enumerate(zip(templates, (family / "math.jsonl", tmp_path / "whole.jsonl"), strict=True))
    ]
    assert [(r.kept, r.divergence) for r in answers[0]] == [(r.kept, r.divergence) for r in answers[1]]
    for template, text in {"no place": r"needs \{\} in the place", "x": "unknown"}.items():
        wrong = {"mth": "{}"} if template == "x" else template
        with pytest.raises(RecipeError, match=text):
            merged(family, experts_of(family), tmp_path / "wrong", {"math": "a b", "code": "a b"}, template=wrong)


def test_prompts_are_shown_and_the_flags_reach_the_merge(family: Path, tmp_path: Path) -> None:
    around = ["--template", TEMPLATE]
    shown = actmat(["try", *model_flags(family), "--self", "--set", f"template={TEMPLATE}", "--json"], code=0)
    rows = json.loads(shown.out)["models"]
    texts = write_prompts(load_model(str(experts_of(family)[0])), DataOptions("self", template=TEMPLATE), 32, seed=0)
    assert rows[0]["written"] == list(texts.texts)
    assert rows[0]["gain"] > module.MORE_PROBABLE
    plain = actmat(["try", *model_flags(family), "--self", "--set", f"template={TEMPLATE}", "-q"])
    assert plain.out.splitlines()[1] == f"  {texts.texts[0]}"
    flags = [*model_flags(family), "--data", "self", *around, "--set", "samples=8", "--set", "new_tokens=2"]
    outcome = actmat(["merge", *flags, "--out", tmp_path / "m", "--json"], code=0)
    assert [r["inputs"] for r in json.loads(outcome.out)["outputs"][0]["answers"]] == [8, 8]
    checked = actmat(
        ["verify", tmp_path / "m", "--check", "math=self", *around, "--set", "new_tokens=2", "--json"],
        code=0,
    )
    (row,) = json.loads(checked.out)["answers"]
    assert (row["expert"], row["inputs"]) == ("math", 32)
    report = api.merge(family / "base", experts_of(family), data="self", template=TEMPLATE, out=tmp_path / "p")
    assert [r.inputs for r in report.answers] == [32, 32]
