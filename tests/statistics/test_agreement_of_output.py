"""`actmat diagnose MERGED --data`: merged models on disk, asked what their experts are asked."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.family import TEXTS, data_flags
from tests.helpers.merging import actmat as run
from transformers import AutoModelForCausalLM, AutoTokenizer

import actmat
from actmat.diagnostics.model import read_diagnosis
from actmat.errors import CheckpointError, RecipeError, StatisticsError
from actmat.extras.collect.data import DataOptions
from actmat.extras.tune import live
from actmat.progress import Progress

FEW = ["--set", "new_tokens=4"]


def naive(merged: Path, expert: Path, texts: list[str]) -> tuple[float, float, int]:
    """One text at a time, no padding, probabilities written out in float64."""
    tokenizer: Any = AutoTokenizer.from_pretrained(expert)
    mine, theirs = (AutoModelForCausalLM.from_pretrained(m, dtype=torch.float32).eval() for m in (merged, expert))
    differing, nats, count = 0, 0.0, 0
    for text in texts:
        given = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            ids = theirs.generate(given, max_new_tokens=4, do_sample=False, pad_token_id=0)
            logits = [m(input_ids=ids).logits[0, given.shape[1] - 1 : -1].double() for m in (mine, theirs)]
        for q_C, p_C in zip(*logits, strict=True):
            q, p = (x.exp() / x.exp().sum() for x in (q_C, p_C))
            nats += float((p * (p / q).log()).sum())
            differing += int(q.argmax() != p.argmax())
            count += 1
    return differing / count, nats / count, count


def test_numbers_of_the_command_are_those_of_a_naive_computation(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = run(
        ["diagnose", place / "merged", *data_flags(place), "--out", out, "--set", "batch_size=2", *FEW],
        code=0,
    )
    rows = read_diagnosis(out).agreement
    assert [(r.expert, r.data) for r in rows] == [(n, str(place / f"{n}.jsonl")) for n in TEXTS]
    for row in rows:
        differing, nats, count = naive(place / "merged", place / "experts" / row.expert, TEXTS[row.expert])
        assert row.predictions == count
        assert row.disagreement == pytest.approx(differing, rel=1e-5)
        assert 0 < row.divergence < nats * (1 + 1e-4), "of the 64 most probable classes, and the rest as one"
        assert nats > 1e-3, "the models must differ for this to mean anything"
    assert any(r.disagreement > 0 for r in rows)
    assert read_diagnosis(place / "merged").agreement is None, "a report is not changed unless --out says so"
    assert "answers kept" in done.out
    assert all(row.low is None and row.without is not None and row.average is None for row in rows), "it is the average"
    verified = run(["verify", place / "merged", *data_flags(place, "--check"), "--json"])
    assert [r["expert"] for r in json.loads(verified.out)["answers"]] == list(TEXTS)
    own = [line for line in done.out.splitlines() if str(place) not in line and str(tmp_path) not in line]
    assert max(len(line.rstrip()) for line in own) <= 80


def test_one_data_set_serves_all_experts_up_to_a_number_of_samples(place: Path) -> None:
    seen: list[tuple[str, int]] = []

    class Counting(Progress):
        what = ""

        def doing(self, what: str, total: int = 0) -> None:
            self.what = what

        def done(self, parts: int) -> None:
            seen.append((self.what, parts))

    options = DataOptions(str(place / "math.jsonl"), max_samples=2, batch_size=1)
    rows = actmat.agreement(place / "merged", options, progress=Counting(), new_tokens=2)
    asked = [(w, n) for w, n in seen if w.startswith("asking")]
    assert asked == [("asking math", 2), ("asking code", 2)]
    whole = actmat.agreement(place / "merged", place / "math.jsonl", new_tokens=2)
    assert [r.inputs for r in (*rows, *whole)] == [2, 2, 6, 6]
    (prompt,) = actmat.agreement(place / "merged", {"code": "one two"}, new_tokens=2)
    assert prompt.data == "the prompt given"


def test_a_merge_of_one_expert_answers_as_it_does(place: Path) -> None:
    (row,) = actmat.agreement(place / "alone", {"math": place / "math.jsonl"})
    assert (row.expert, row.disagreement, row.kept, row.inputs) == ("math", 0.0, 6, 6)
    assert row.divergence == pytest.approx(0.0, abs=1e-6)
    (other,) = actmat.agreement(place / "merged", {"code": place / "code.jsonl"})
    assert other.expert == "code", "an expert that is not named is left out"


def test_adapters_are_loaded_on_their_base(place: Path, tmp_path: Path) -> None:
    adapters = [str(place / "adapters" / n) for n in TEXTS]
    actmat.merge(None, adapters, method="average", out=tmp_path / "adapter")
    actmat.merge(place / "base", adapters, method="average", out=tmp_path / "model", dtype="float32")
    data = str(place / "math.jsonl")
    rows = actmat.agreement(tmp_path / "adapter", data, base=place / "base")
    dense = actmat.agreement(tmp_path / "model", data)
    assert [r.expert for r in rows] == list(TEXTS)
    for low, full in zip(rows, dense, strict=True):
        assert low.divergence == pytest.approx(full.divergence, rel=1e-2)
        assert low.divergence > 0
    with pytest.raises(StatisticsError, match="goes with adapters"):
        actmat.agreement(place / "merged", data, base=place / "base")


def test_never_more_than_one_model_in_memory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is loaded, no other is there; nobody waits for the garbage collector."""
    alive: list[Any] = []
    there: list[int] = []
    original = live.load_model

    def counting(*args: Any, **kwargs: Any) -> Any:
        there.append(sum(ref() is not None for ref in alive))
        loaded = original(*args, **kwargs)
        alive.append(weakref.ref(loaded.model))
        return loaded

    monkeypatch.setattr(live, "load_model", counting)
    gc.disable()
    try:
        actmat.agreement(place / "merged", place / "math.jsonl")
    finally:
        gc.enable()
    assert there == [0, 0, 0, 0, 0], "two experts, the merge, that of auto, the average"


def test_all_wrong_names_and_all_wrong_data_are_told_at_once(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    good = place / "math.jsonl"
    with pytest.raises(RecipeError) as caught:
        actmat.agreement(place / "merged", {"maths": good, "poetry": good})
    assert len(caught.value.problems) == 2
    assert "Did you mean 'math'?" in caught.value.problems[0]
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text("{broken\n")
    data = {"math": tmp_path / "empty.jsonl", "code": tmp_path / "broken.jsonl"}
    with pytest.raises(StatisticsError) as wrong:
        actmat.agreement(place / "merged", data)
    assert "empty.jsonl is empty" in wrong.value.problems[0]
    assert "broken.jsonl: the data cannot be read" in wrong.value.problems[1]
    with pytest.raises(StatisticsError, match=r"nowhere\.jsonl: no such file"):
        actmat.agreement(place / "merged", tmp_path / "nowhere.jsonl")
    with pytest.raises(StatisticsError, match="No data"):
        actmat.agreement(place / "merged", {})
    with pytest.raises(CheckpointError, match="no actmat_manifest"):
        actmat.agreement(place / "base", good)


def test_data_without_a_usable_column_names_its_columns_and_the_expert(place: Path, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"a": "x", "b": "y"}\n')
    done = run(["diagnose", place / "merged", "--data", tmp_path / "d.jsonl", "-q"], code=1)
    assert "Expert 'math' cannot be compared" in done.err
    assert "no column of texts; it has a, b. Fix: --set text_column=NAME" in done.err
    run(["diagnose", place / "merged", "--data", tmp_path / "d.jsonl", "--set", "text_column=a"], code=0)


def test_a_model_without_a_tokenizer_says_where_one_is_missing(place: Path, tmp_path: Path) -> None:
    from actmat.extras.collect.data import make_batches
    from actmat.extras.models.loading import Loaded

    (tmp_path / "bare").mkdir()
    model = AutoModelForCausalLM.from_pretrained(place / "base")
    with pytest.raises(StatisticsError, match="bare: tokenizer cannot be loaded"):
        next(make_batches(Loaded(model, "x", None, str(tmp_path / "bare")), DataOptions(str(place / "math.jsonl"))))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["MERGED", "--data", "math=DATA", "--data", "DATA"], "once for all experts"),
        (["MERGED", "--data", "math=DATA", "--data", "math=DATA"], "twice for expert 'math'"),
        (["MERGED", "--data", "DATA", "--expert", "x"], "names its own base"),
        (["MERGED", "--base", "BASE"], "names its own base"),
        (["-b", "BASE", "-e", "EXPERT", "--data", "DATA"], "a merged model that exists"),
    ],
)
def test_wrong_command_lines(place: Path, flags: list[str], says: str) -> None:
    places = {"MERGED": "merged", "DATA": "math.jsonl", "BASE": "base", "EXPERT": "experts/math"}
    given = []
    for flag in flags:
        for word, where in places.items():
            flag = flag.replace(word, str(place / where))
        given.append(flag)
    done = run(["diagnose", *given], code=2)
    assert says in done.words


def test_rules_that_need_statistics_are_diagnosed_with_them(place: Path, tmp_path: Path) -> None:
    flags = []
    for name in TEXTS:
        expert, out = str(place / "experts" / name), str(tmp_path / name)
        run(["statistics", "collect", expert, "--data", f"{place / name}.jsonl", "--out", out, "-q"], code=0)
        flags += ["-e", expert, "--statistics", f"{name}={out}"]
    done = run(["diagnose", "-b", place / "base", "-m", "regmean", *flags, "-q", "--json", "--full"], code=0)
    assert set(json.loads(done.out)["actions"]) == {"merge", "average"}
    merged = ["merge", "-b", str(place / "base"), "-m", "regmean", *flags, "-q", "--out", str(tmp_path / "out")]
    run(merged, code=0)
    before, after = (load_file(p / "model.safetensors") for p in (place / "base", tmp_path / "out"))
    measures = json.loads(done.out)["measures"]
    assert measures
    for row in measures:
        norm = float((after[row["name"]].double() - before[row["name"]].double()).norm())
        assert row["merged_norm"] == pytest.approx(norm, rel=1e-3), "of the merge by these statistics"
