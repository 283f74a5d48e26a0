"""What `inspect`, `plan` and `merge` print about adapters, at 80 columns."""

import json
from pathlib import Path

import pytest
from tests.helpers.adapters import LLAMA, save_adapter
from tests.helpers.merging import actmat


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    for n in (1, 2):
        save_adapter(tmp_path / f"a{n}", "llama", n, **LLAMA)
    return ["-e", str(tmp_path / "a1"), "-e", str(tmp_path / "a2")]


def words(text: str) -> str:
    assert max(len(line) for line in text.splitlines()) <= 80
    return " ".join(text.split())


def test_inspect_says_what_an_adapter_is(pair: list[str]) -> None:
    text = words(actmat(["inspect", pair[1]]).out)
    assert "LoRA adapter of an unnamed base" in text
    data = json.loads(actmat(["inspect", pair[1], "--json", "--full"]).out)
    assert (data["adapter"], len(data["modules"]), data["problems"]) == ("lora", 6, [])


def test_plan_lists_what_is_merged_and_what_is_kept(pair: list[str]) -> None:
    text = words(actmat(["plan", *pair, "-m", "actmat", "--keep", "*.v_proj.weight"]).out)
    assert "kept by the recipe ('*.v_proj.weight'): no delta is written" in text
    assert "linear layer, name ends in q_proj: actmat, in factored form" in text
    assert text.count("2 merge linear layer") == 2


def test_inspect_of_an_adapter_that_needs_its_base_ends_with_0(tmp_path: Path) -> None:
    save_adapter(tmp_path / "dora", "vit", 1, r=2, target_modules=["q_proj"], use_dora=True)
    done = actmat(["inspect", tmp_path / "dora"], code=0)
    assert "merged with its base only" in words(done.out)
