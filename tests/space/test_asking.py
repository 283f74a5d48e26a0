"""What a visitor may ask for: lists of adapters, limits, and what is refused before anything is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.hub import HubStandIn, hub_stand_in
from tests.space.conftest import HOSTILE, publish

from actmat.errors import CheckpointError, MergeError, RecipeError
from actmat_space.asking import Form, Named, look_up, methods, parse_adapters, recipe_fields
from actmat_space.html import error_html
from actmat_space.limits import Limits

LIMITS = Limits()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStandIn]:
    with hub_stand_in(monkeypatch, tmp_path / "cache") as stand_in:
        publish(stand_in, tmp_path / "repositories")
        yield stand_in


def named(*repos: str) -> list[Named]:
    return [Named(repo, None, 1.0) for repo in repos]


def test_a_list_of_adapters_is_read_line_by_line() -> None:
    text = "\n org/math 0.7 \nhttps://huggingface.co/org/code/tree/v2 -1e-2\nhf://a.b/c_d@refs/pr/1\n"
    assert parse_adapters(text, LIMITS) == [
        Named("org/math", None, 0.7),
        Named("org/code", "v2", -0.01),
        Named("a.b/c_d", "refs/pr/1", 1.0),
    ]


@pytest.mark.parametrize(
    "line",
    ["/etc/passwd", "../a", "a/../b", "org/a@../b", "math", "org/a/b", "s3://org/a", "https://elsewhere.org/org/a",
     "org/a nan", "org/a inf", "org/a 1 2", "org/a x", HOSTILE, "org/a\x00", "ôrg/a"],
)  # fmt: skip
def test_a_line_that_is_no_adapter_is_refused_and_shown_escaped(line: str) -> None:
    with pytest.raises(RecipeError, match="expected org/name or org/name@revision") as caught:
        parse_adapters(f"org/a\n{line}", LIMITS)
    shown = error_html(caught.value)
    assert "<img" not in shown
    assert "\x00" not in shown


def test_the_number_of_adapters_is_bounded() -> None:
    for text in ("", "org/a", "\n".join(["org/a"] * 9)):
        with pytest.raises(RecipeError, match="Expected 2 to 8 adapters"):
            parse_adapters(text, LIMITS)
    with pytest.raises(RecipeError, match="characters"):
        parse_adapters("org/a\n" * 10_000, LIMITS)


def test_limits_come_from_the_environment() -> None:
    given = {"ACTMAT_SPACE_MAX_BYTES": "3GiB", "ACTMAT_SPACE_SECONDS": "60", "ACTMAT_SPACE_MAX_MEMORY": "4GB", "X": "1"}
    assert Limits.from_environment(given) == Limits(max_bytes=3 << 30, seconds=60, max_memory="4GB")
    with pytest.raises(RecipeError) as caught:
        Limits.from_environment({"ACTMAT_SPACE_SECONDS": "0", "ACTMAT_SPACE_KEEP": "-1", "ACTMAT_SPACE_BYTES": "1",
                                 "ACTMAT_SPACE_MAX_MEMORY": "much"})  # fmt: skip
    assert len(caught.value.problems) == 4


def test_adapters_are_found_without_a_download(hub: HubStandIn, tmp_path: Path) -> None:
    found = look_up(named("org/math", "org/code"), LIMITS)
    read = ("adapter_model.safetensors", "adapter_config.json", "README.md")
    sizes = [sum((tmp_path / "repositories" / n / f).stat().st_size for f in read) for n in ("math", "code")]
    assert [(f.commit, f.nbytes, f.tensors) for f in found] == [
        (hub.branches["org/math", "main"], sizes[0], 2),
        (hub.branches["org/code", "main"], sizes[1], 2),
    ]
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    fields = recipe_fields(Form("", method="linear", rank=4, scale=0.5), found)
    assert fields["experts"][0]["path"] == f"hf://org/math@{found[0].commit}"
    assert (fields["method"], fields["rank"], fields["scale"]) == ("linear", 4, 0.5)


def test_what_is_no_adapter_or_is_a_pickle_is_refused_all_at_once(hub: HubStandIn) -> None:
    hub.gated.add("org/dora")
    with pytest.raises(CheckpointError) as caught:
        look_up(named("org/math", "org/full", "org/pickled", "org/nobody", "org/dora"), LIMITS)
    said = "\n".join(caught.value.problems)
    for words in (
        "org/full: expected an adapter",
        "org/pickled: expected safetensors, found adapter_model.bin, a pickle",
        "org/nobody: no local path, and no such repository",
        "org/dora: the hub repository is gated",
    ):
        assert words in said
    assert hub.bytes_of(".bin") == hub.bytes_of(".safetensors") == hub.bytes_of(".json") == 0


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(max_bytes=1000), "more than this space merges, 1 kB. Nothing was downloaded"),
        (Limits(max_tensors=3), "org/code: adapter_model.safetensors has more tensors"),
    ],
)
def test_adapters_that_are_too_large_are_refused_from_sizes_and_headers(
    hub: HubStandIn, tmp_path: Path, limits: Limits, words: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        look_up(named("org/math", "org/code"), limits)
    assert words in str(caught.value)
    assert not list((tmp_path / "cache").rglob("adapter_*"))


def test_a_header_with_more_bytes_than_its_tensors_need_is_not_read(hub: HubStandIn, tmp_path: Path) -> None:
    weights = tmp_path / "repositories" / "code" / "adapter_model.safetensors"
    weights.write_bytes((50_000_000).to_bytes(8, "little") + b" " * 50_000_000)
    with pytest.raises(CheckpointError, match="has more tensors"):
        look_up(named("org/math", "org/code"), Limits(max_tensors=10))
    assert hub.bytes_of("adapter_model.safetensors") < 1_000_000


def test_only_methods_on_factors_are_offered() -> None:
    assert {"auto", "average", "linear", "cart", "dc_merge", "actmat"} <= set(methods())
    assert not {"ties", "dare", "regmean", "fisher", "slerp"} & set(methods())
    with pytest.raises(RecipeError, match="Expected one of the methods auto"):
        recipe_fields(Form("", method=HOSTILE), [])
    assert "<img" not in error_html(MergeError(HOSTILE, [HOSTILE] * 60))
