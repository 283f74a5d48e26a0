"""The suite `reasoning`: base, experts and every merge through the benchmarks, with the paper's table."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from actmat.errors import CheckpointError, RecipeError
from actmat_experiments.harness.cache import Cache, digest, library_versions
from actmat_experiments.harness.hub import load_splits, model_folder
from actmat_experiments.harness.lines import json_lines
from actmat_experiments.harness.merging import Candidate, merge_candidates, merging_code, needs_statistics
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.report import stored_scores
from actmat_experiments.harness.request import RunRequest, TableRequest
from actmat_experiments.harness.results import REFERENCES, Score, append_scores
from actmat_experiments.harness.rows import candidates
from actmat_experiments.harness.settings import changed
from actmat_experiments.harness.suite import refuse_flags, score_file
from actmat_experiments.harness.table import Line, average_table, markdown_table, summarize
from actmat_experiments.paper import REASONING, paper_figures
from actmat_experiments.reasoning.benchmarks import BENCHMARKS, get_benchmarks
from actmat_experiments.reasoning.evaluate import Counts, Exam, ReasoningSettings, unsolvable
from actmat_experiments.reasoning.generate import in_template, measure
from actmat_experiments.reasoning.passk import Columns, at, at_k_markdown, at_k_table, scores_at_k

NAME = "reasoning"
AVERAGED = ("humaneval", "humaneval_plus", "aime24", "aime25", "ifeval")
"""The paper's average is over these at one answer; IFEval counts whole prompts, loosely."""

NOTES = (
    "The paper gives one run and no intervals: two of its averages closer than the interval here may be equal.",
    "Prompts and sampling are those of the paper's published configurations.",
)

PROMPTS = {
    "math": "allenai/Dolci-RL-Zero-Math-7B",
    "code": "allenai/Dolci-RL-Zero-Code-7B",
    "instructions": "allenai/Dolci-RL-Zero-IF-7B",
}
"""Skill -> data set of the hub that its expert was trained on; column `prompt`, split `train`."""


def run(request: RunRequest) -> list[Score]:
    """Evaluate base and experts, then merge and evaluate row by row; cached results are not made again.

    Returns:
        The scores, which are also added to `scores/reasoning.jsonl` in the cache.

    Raises:
        RecipeError: a setting, benchmark or method is unknown, or requests something that the suite lacks.
        MergeError: data, a back end or a fence for code is missing; found before anything is generated.
    """
    settings = _settings(request)
    settings.engine.check()
    prompts = _prompts(settings, request.data)
    rows, left_out = candidates(request.methods, "full", len(settings.experts), ("gram",) if prompts else ())
    asked = []
    for benchmark in get_benchmarks(request.tasks):
        problems = benchmark.load(request.data)[: settings.problems]
        benchmark.ready(problems)
        asked.append((benchmark, problems))
    scores: list[Score] = []
    with Watch(request.console, request.cache / "logs") as watch:
        watch.note(f"left out: {name} ({why})" for name, why in left_out.items())
        cache, places = Cache(request.cache), _places(settings, watch)
        tokenizer = _tokenizer(settings, {name: folder for name, (folder, _) in places.items()})
        code = [(b, problems) for b, problems in asked if b.skill == "code"]
        failing = {b.name: unsolvable(b, problems, cache, watch, request.threads) for b, problems in code}
        watch.note(_doubts(failing))
        for seed in request.seeds:
            exam = Exam(cache, watch, settings, asked, seed, request.device, tokenizer, failing)
            for found in _seed(exam, places, rows, prompts, request):
                append_scores(score_file(request.cache, NAME), found)
                scores += found
    return scores


Places = Mapping[str, tuple[Path, str]]
"""Base and experts: folder and identity."""


def _places(settings: ReasoningSettings, watch: Watch) -> dict[str, tuple[Path, str]]:
    """All models on this machine; those of the hub are downloaded now, and known by their commits."""
    wanted = {"base": settings.base, **settings.experts}
    with watch.stage("models", len(wanted)) as stage:
        found = {}
        for name, location in wanted.items():
            found[name] = model_folder(location)
            stage.log(f"{name}: {found[name][1]}")
            stage.advance()
    return found


def _tokenizer(settings: ReasoningSettings, folders: Mapping[str, Path]) -> Path | None:
    """Folder of the tokenizer and chat template of base and merged models; None: their own folders.

    Raises:
        RecipeError: it has no chat template, into which prompts go.
    """
    folder = folders.get(settings.template or "base", folders["base"])
    from transformers import AutoTokenizer

    if AutoTokenizer.from_pretrained(folder).chat_template is None:
        there = [name for name, other in folders.items() if AutoTokenizer.from_pretrained(other).chat_template]
        raise RecipeError(
            f"Prompts go into a chat template, and the tokenizer in {folder} has none. Models that have one: "
            f"{', '.join(there) or 'none of them'}. Set template to one of the experts."
        )
    return None if folder == folders["base"] else folder


def _settings(request: RunRequest) -> ReasoningSettings:
    settings = changed(ReasoningSettings(), request.settings)
    refuse_flags(request, regime="full")
    problems = []
    if request.models is not None and len(request.models) != 1:
        problems.append(f"--models names one base, not {len(request.models)}")
    if len(settings.experts) < 2:
        problems.append("a merge needs two experts or more, of --set math=, code= and instructions=")
    if problems:
        raise RecipeError(f"The suite {NAME} cannot be run so.", problems)
    return replace(settings, base=request.models[0]) if request.models else settings


def _prompts(settings: ReasoningSettings, data: Path | None) -> dict[str, list[str]]:
    """Skill -> training prompts; empty without a source of them.

    Raises:
        CheckpointError: a source is missing or has other rows; names all such sources.
    """
    if settings.prompts is None or (settings.prompts == "hub" and data is not None):
        return {}
    found, problems = {}, []
    for skill in settings.experts:
        path = Path(settings.prompts) / f"{skill}.jsonl"
        where = PROMPTS[skill] if settings.prompts == "hub" else str(path)
        try:
            if settings.prompts == "hub":
                rows: Any = load_splits(where, None, ("train",))[0]["train"].select_columns("prompt")
            else:
                rows = json_lines(path.read_text(encoding="utf-8"))
            found[skill] = [str(row["prompt"]) for row in itertools.islice(rows, settings.measured)]
        except OSError as error:
            problems.append(f"{where}: {error.strerror}")
        except CheckpointError as error:
            problems.append(error.headline)
        except (ValueError, KeyError, TypeError):
            problems.append(f'{where}: expected lines such as {{"prompt": "..."}}')
    if problems:
        raise CheckpointError("The prompts for statistics cannot be read.", problems)
    return found


def _doubts(failing: Mapping[str, Sequence[str]]) -> list[str]:
    """One line per benchmark that has problems which no answer can solve."""
    return [
        f"{name}: the published solution of {', '.join(ids)} fails its own test; wrong for every model"
        for name, ids in failing.items()
        if ids
    ]


def _seed(
    exam: Exam, places: Places, rows: Sequence[Candidate], prompts: Mapping[str, Sequence[str]], request: RunRequest
) -> Iterator[list[Score]]:
    """Scores of one model after the other."""
    identities = {name: identity for name, (_, identity) in places.items()}
    experts = {skill: identities[skill] for skill in exam.settings.experts}
    lines = _lines(exam, digest({"settings": exam.settings, "models": identities}))
    folder, identity = places["base"]
    yield list(lines("base", exam.take(folder, {"checkpoint": identity}, "base")))
    own: dict[str, Counts] = {}
    for skill, expert in experts.items():
        found = exam.take(places[skill][0], {"checkpoint": expert}, f"expert {skill}", own_tokenizer=True)
        own |= {b.name: found[b.name] for b, _ in exam.benchmarks if b.skill == skill}
        yield list(lines(f"expert {skill}", found))
    yield list(lines("experts", own))
    for row in rows:
        key = {"models": identities, "row": asdict(row), "merging": merging_code()}
        key |= {"libraries": library_versions("torch")}
        if needs_statistics([row]):
            key["prompts"] = digest({skill: list(some) for skill, some in prompts.items()})
        with _merged(exam, places, row, key, prompts, request) as merged:
            found = exam.take(merged, key, row.name)
        yield list(lines(row.name, found, scale=float(row.scale)))


@contextmanager
def _merged(
    exam: Exam,
    places: Places,
    row: Candidate,
    key: Mapping[str, Any],
    prompts: Mapping[str, Sequence[str]],
    request: RunRequest,
) -> Iterator[Path]:
    """The merged model while it is needed: not at all when all its answers are there, afterwards only on request."""
    s = exam.settings
    full = {**key, "seed": exam.seed}
    place = exam.cache.path("reasoning-merges", full)
    output = {"output": {"kind": "model", "files_from": s.template}} if exam.tokenizer is not None else {}

    def make(folder: Path) -> None:
        statistics = _statistics(exam, places, prompts) if needs_statistics([row]) else None
        with exam.watch.stage(f"merge: {row.name}"):
            merge_candidates(
                places["base"][0],
                {skill: places[skill][0] for skill in s.experts},
                [replace(row, fields={**row.fields, **output})],
                {row.name: folder / row.name},
                seed=exam.seed,
                threads=request.threads,
                device=request.device,
                statistics=statistics,
            )

    if not exam.answered(key):
        exam.cache.get("reasoning-merges", full, make)
    yield place / row.name
    if not s.keep_merged and place.exists():
        shutil.rmtree(place)


def _statistics(exam: Exam, places: Places, prompts: Mapping[str, Sequence[str]]) -> dict[str, Path]:
    """Skill -> second moments of the inputs of its expert's layers on prompts, in the expert's chat template."""
    s, found = exam.settings, {}
    for skill in s.experts:
        folder, identity = places[skill]
        texts = in_template(folder, prompts[skill])
        key = {"version": 2, "expert": identity, "prompts": digest(texts), "dtype": s.engine.dtype}
        key |= {"tokens": s.measured_tokens}

        def make(out: Path, folder: Path = folder, skill: str = skill, texts: Sequence[str] = texts) -> None:
            how: dict[str, Any] = {"longest": s.measured_tokens, "device": exam.device, "dtype": s.engine.dtype}
            with exam.watch.stage(f"statistics: {skill}"):
                measure(folder, texts, out / "statistics", **how)

        found[skill] = exam.cache.get("reasoning-statistics", key, make) / "statistics"
    return found


def _lines(exam: Exam, settings: str) -> Callable[..., Iterable[Score]]:
    def lines(method: str, found: Mapping[str, Counts], **detail: Any) -> Iterable[Score]:
        for benchmark, _ in exam.benchmarks:
            sampling = exam.asked(benchmark).sampling
            how = {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_tokens}
            known = {"unsolvable": list(ids)} if (ids := exam.unsolvable.get(benchmark.name)) else {}
            for name, right_N in found.get(benchmark.name, {}).items():
                like = Score(
                    *(NAME, "full", method, "default", name, exam.seed, 0, 0),
                    model=exam.settings.base,
                    settings=settings,
                    detail={**how, **known, **detail},
                )
                yield from scores_at_k(right_N, sampling.n, exam.asked(benchmark).ks, like)

    return lines


def table(request: TableRequest) -> list[Line]:
    """The paper's table from the latest settings in the cache.

    Raises:
        RecipeError: nothing has been run with this cache.
    """
    scores = stored_scores(request)
    scores = [s for s in scores if s.settings == scores[-1].settings]
    console = request.console or Console(quiet=True)
    columns = _columns(scores)
    failing = {s.task.partition("@")[0]: s.detail.get("unsolvable", ()) for s in scores}
    said = [*_sampling(scores), *_doubts(failing)]
    there = {s.task for s in scores}
    averaged = [at(name, 1) for name in AVERAGED if at(name, 1) in there]
    whole = len(averaged) == len(AVERAGED)
    own = [s for s in scores if not s.method.startswith("expert ")]
    lines = summarize(own, averaged, paper_figures(REASONING, "full") if whole else None) if averaged else []
    experts = [m for m in dict.fromkeys(s.method for s in scores) if m.startswith("expert ")]
    merged = [line.method for line in lines if line.method not in REFERENCES]
    order = list(dict.fromkeys(["base", *experts, "experts", *(merged or (s.method for s in own))]))
    title = "Right answers in percent"
    average = f"Average over {len(averaged)} benchmarks @1" + ("" if whole else ", not the paper's five")
    if request.markdown:
        console.print(f"{title}\n\n{at_k_markdown(scores, columns, order)}\n{average}\n", markup=False, soft_wrap=True)
        console.print(markdown_table(lines, averaged), markup=False, soft_wrap=True)
    else:
        for start in range(0, len(columns), 6):
            console.print(at_k_table(title, scores, columns[start : start + 6], order))
        console.print(average_table(average, lines, "± half of the 95 % interval over problems and seeds"))
    for text in (f"base: {scores[-1].model}", *said, *NOTES):
        console.print(f"* {text}", highlight=False, markup=False)
    return lines


def _columns(scores: Sequence[Score]) -> Columns:
    """Columns in the order of the paper, those of strict counting behind the benchmark's own."""
    titles = {b.name: b.title for b in BENCHMARKS}
    tasks = list(dict.fromkeys(s.task for s in scores))
    place = {name: i for i, name in enumerate(titles)}

    def order(task: str) -> tuple[int, str, int]:
        name, _, k = task.partition("@")
        return place[name.removesuffix("-strict")], name, int(k)

    return [(t, _head(titles, t)) for t in sorted(tasks, key=order)]


def _head(titles: Mapping[str, str], task: str) -> str:
    name, _, k = task.partition("@")
    title = titles[name.removesuffix("-strict")]
    return f"{title}\nstrict" if name.endswith("-strict") else f"{title}\n@{k}"


def _sampling(scores: Sequence[Score]) -> list[str]:
    """One line per benchmark: how its answers were drawn."""
    said = {}
    for score in scores:
        d, name = score.detail, score.task.partition("@")[0]
        how = "greedy" if d["temperature"] == 0 else f"T={d['temperature']:g}, top-p {d['top_p']:g}"
        said[name] = (
            f"{name}: {score.total} problems, {d['n_samples']} answers each, {how}, up to {d['max_tokens']} tokens"
        )
    return list(said.values())
