"""The result of a search: the chosen merge, how sure the choice is, and everything that was tried."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from actmat.checkpoints.writing.staging import disk_errors
from actmat.diagnostics.model import write_whole
from actmat.extras.tune.evaluate import AnswerComparison, ScoreName, Trial, counts_of, loss_of
from actmat.extras.tune.memory import MemoryPlan
from actmat.foreign import terminal
from actmat.methods import get_method
from actmat.recipe import ExpertRef, Recipe
from actmat.run import MergeReport
from actmat.version import __version__

RESAMPLES = 2000
FOUND, PAGE, RECIPE = "tune.json", "tune.html", "recipe.yaml"
"""Files of the work folder: the report, which is written last, its page, and the recipe of the chosen merge."""


@dataclass(frozen=True)
class Rival:
    """A merge in the final comparison, on inputs that the search did not see.

    Args:
        name: the candidate in words.
        losses, agreement: per expert.
        mean: mean loss over the experts.
        low, high: 95 % interval (bootstrap over inputs, within each expert) of its mean loss minus the chosen one's;
            None for the chosen one itself.
    """

    name: str
    losses: Mapping[str, float]
    agreement: Mapping[str, float]
    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def verdict(self) -> str:
        """`worse`, `better` or `not told apart` from the chosen merge."""
        if self.low is None or self.high is None:
            return "chosen"
        return "worse" if self.low > 0 else "better" if self.high < 0 else "not told apart"


@dataclass(frozen=True)
class TuneReport:
    """Result of `tune`.

    Args:
        out: directory of the merged model.
        recipe: makes it again, without data.
        chosen: its trial on the inputs of the search.
        trials: everything that was tried, in order.
        front: trials that no other beats in both the mean and the worst loss.
        finals: the final comparison, the chosen merge first.
        score: name of the minimized score.
        refused: merge -> the reason why it could not be made.
        notes: facts for the user, in words.
        seconds: wall time.
        memory: the plan of the search's memory.
        merged: report of the final merge.
    """

    out: Path
    recipe: Recipe
    chosen: Trial
    trials: Sequence[Trial]
    front: Sequence[Trial]
    finals: Sequence[Rival]
    score: str
    refused: Mapping[str, str]
    notes: Sequence[str]
    seconds: float
    memory: MemoryPlan
    merged: MergeReport

    def __repr__(self) -> str:
        chosen, tried = self.finals[0].name, len(self.trials)
        return terminal(f"<TuneReport {self.out}: {chosen}, of {tried} tried; {self.seconds:.0f} s>")

    @property
    def compared(self) -> ScoreName:
        """The loss of the final comparison: the score, or the divergence if the score is not of the inputs."""
        return named_score(self.score)

    def to_json(self) -> dict[str, Any]:
        """Plain data: the contents of `tune.json`."""
        return {
            "actmat_tune": 1,
            "version": __version__,
            "out": str(self.out),
            "recipe": self.recipe.model_dump(mode="json", exclude_defaults=True),
            "score": self.score,
            "compared": self.compared,
            "chosen": self.chosen.to_json(),
            "final": [asdict(f) | {"verdict": f.verdict} for f in self.finals],
            "front": [t.to_json() for t in self.front],
            "trials": [t.to_json() for t in self.trials],
            "refused": dict(self.refused),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 1),
            "memory": self.memory.to_json(),
        }

    def save(self, folder: Path) -> None:
        """Write `tune.json` into a folder, which says that the search is complete."""
        write_whole(folder / FOUND, [(json.dumps(self.to_json(), indent=1) + "\n").encode()])


def named_score(score: Any) -> ScoreName:
    """The score that merges are compared by in the end: a named one, else the divergence."""
    return score if score in get_args(ScoreName) else "divergence"


def compare_finally(comparisons: Mapping[str, Mapping[str, AnswerComparison]], score: Any) -> list[Rival]:
    """The final comparison; the first merge is the chosen one.

    Args:
        comparisons: name -> expert -> comparison on inputs that the search did not see.
        score: a named score; merges chosen by any other are compared by their divergence.
    """
    chosen, named = next(iter(comparisons.values())), named_score(score)
    rivals = []
    for name, merge in comparisons.items():
        losses = {label: loss_of(c, named) for label, c in merge.items()}
        agreement = {label: 1.0 - loss_of(c, "disagreement") for label, c in merge.items()}
        low, high = (None, None) if merge is chosen else _interval(merge, chosen, named)
        rivals.append(Rival(name, losses, agreement, sum(losses.values()) / len(losses), low, high))
    return rivals


def _interval(
    other: Mapping[str, AnswerComparison], chosen: Mapping[str, AnswerComparison], score: Any
) -> tuple[float, float]:
    """95 % interval of the difference of mean losses; inputs are drawn again within each expert, the same for both."""
    rng = random.Random(0)
    usable = {label: [n for n, count in enumerate(counts_of(c, score)) if count] for label, c in chosen.items()}
    differences = []
    for _ in range(RESAMPLES):
        total = 0.0
        for label, mine in chosen.items():
            sample = rng.choices(usable[label], k=len(usable[label]))
            total += loss_of(other[label], score, sample) - loss_of(mine, score, sample)
        differences.append(total / len(chosen))
    differences.sort()
    return differences[int(0.025 * RESAMPLES)], differences[int(0.975 * RESAMPLES) - 1]


def final_recipe(made: Recipe, recipe: Recipe) -> Recipe:
    """The recipe that makes the chosen merge; needs data only if its method needs statistics.

    Args:
        made: the recipe of the chosen merge at its scale, without an output.
        recipe: the user's.
    """
    fields: dict[str, Any] = {"out": recipe.out, "output": recipe.output or made.output, "base": recipe.base}
    if not get_method(made.method).needs_statistics:
        plain = ({**e.model_dump(), "statistics": ""} for e in made.experts)
        fields["experts"] = tuple(map(ExpertRef.model_validate, plain))
    return Recipe.model_validate({**made.model_dump(), **fields})


def start_ending(final: Recipe, work: Path) -> None:
    """Write `recipe.yaml`, the recipe of the chosen merge, and remove the results of an earlier search.

    Until `tune.json` is there, a run that is given again takes an output that this recipe made as its own.
    """
    import yaml

    recipe = final.model_dump(mode="json", exclude_defaults=True)
    with disk_errors(work):
        for name in (FOUND, PAGE):
            (work / name).unlink(missing_ok=True)
        write_whole(work / RECIPE, [yaml.safe_dump(recipe, sort_keys=False).encode()])


def notes_on_choice(finals: Sequence[Rival], *, allowed: bool, least_agreement: float) -> Iterator[str]:
    """Rivals that are as good or better, and a constraint that nothing keeps."""
    for rival in finals[1:]:
        if rival.name == "base" or rival.verdict == "worse":
            continue
        if rival.verdict == "not told apart":
            yield f"On unseen inputs, the chosen merge is not distinguishable from {rival.name}."
        else:
            yield (
                f"On unseen inputs, {rival.name} is better than the chosen merge: there are too few inputs to choose "
                "from so many candidates."
            )
    if not allowed:
        yield (
            f"No candidate keeps {least_agreement:.0%} of every expert's predictions; the one whose worst expert keeps "
            "the most was chosen."
        )
