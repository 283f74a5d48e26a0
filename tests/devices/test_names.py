"""Names of devices: what they mean, and everything that is wrong with a text in one message."""

import pytest
import torch

from actmat.engine.devices import ON_HOST, check_device, device_room, open_devices, parse_devices
from actmat.engine.resources import share_resources
from actmat.errors import Problems, RecipeError
from actmat.planning.model import MergePlan
from actmat.planning.work import HOST, DeviceRoom
from actmat.recipe import make_recipe
from actmat.run.places import find_places
from actmat.settings import RunSettings


@pytest.mark.parametrize(
    ("text", "kind", "numbers"),
    [
        ("cpu", "cpu", None),
        ("cuda", "cuda", None),
        ("cuda:0", "cuda", (0,)),
        ("cuda:0,2", "cuda", (0, 2)),
        ("cuda:3, 1", "cuda", (3, 1)),
        ("cpu:0,1", "cpu", (0, 1)),
    ],
)
def test_what_a_text_names(text: str, kind: str, numbers: tuple[int, ...] | None) -> None:
    assert parse_devices(text) == (kind, numbers)
    assert (parse_devices(text) == ON_HOST) == (text == "cpu")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu", ["there is no kind 'gpu'"]),
        ("cuda:", ["'' is not the number"]),
        ("cuda:0,0,1,1,1", ["0 is given 2 times", "1 is given 3 times"]),
        ("cuda:a,0,-1,0", ["'a' is not the number", "'-1' is not the number", "0 is given 2 times"]),
        ("tpu:x", ["no kind 'tpu'", "'x' is not the number"]),
        ("cuda:99999", ["'99999' is not the number"]),
    ],
)
def test_everything_wrong_is_said_at_once(text: str, said: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_devices(text)
    assert f"got '{text}'" in str(caught.value)
    for words in said:
        assert words in str(caught.value)


def test_devices_that_are_not_here_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda")
    check_device("cuda:1,0")
    with pytest.raises(RecipeError, match=r"no 'cuda:2', 'cuda:7': torch sees 2 CUDA device\(s\), 0 to 1"):
        check_device("cuda:1,2,7")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RecipeError, match=r"sees no CUDA device.*--device cpu"):
        check_device("cuda:0")


def test_devices_of_a_text() -> None:
    assert open_devices("cpu") == []
    first, second = open_devices("cpu:3,5")
    assert (first.name, second.name) == ("cpu:3", "cpu:5")
    assert first.torch_device == torch.device("cpu")
    assert first.total_bytes() is None
    assert first.free_bytes() > 0
    (second,) = open_devices("cuda:1")
    assert second.torch_device == torch.device("cuda", 1)


def test_memory_for_an_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tenths of the smallest device, within the limit; unknown where the devices are on another machine."""
    assert device_room("cpu") == HOST
    with pytest.raises(RecipeError, match="none is given: add --device"):
        device_room("cpu", "1GB")
    assert device_room("cpu:0").memory is None
    assert device_room("cpu:0", "1GB").memory == 10**9
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, (80 - 40 * device.index) * 10**9))
    assert device_room("cuda:0").memory == 72 * 10**9
    assert device_room("cuda").memory == device_room("cuda:0,1").memory == 36 * 10**9
    assert device_room("cuda", "8GB").memory == 8 * 10**9
    assert device_room("cuda:0,7").memory is None
    assert device_room("cuda:0,7", "8GB").memory == 8 * 10**9


def test_the_threads_that_feed_devices_read_ahead() -> None:
    """As many as workers of the host, and at least one for each device."""
    empty = MergePlan(make_recipe({"base": "b", "experts": ["e"]}), "model", None, (), (), (), 1, {"": "model"})
    for threads, feeders in ((1, 2), (3, 3)):
        rooms = (DeviceRoom("cpu:0,1", 10**9), HOST)
        with_two, alone = (share_resources([empty], room, "2GB", threads, buffer_bytes=10**6) for room in rooms)
        assert alone.memory - with_two.memory == feeders * 10**6
        assert (with_two.device, with_two.device_memory) == ("cpu:0,1", 10**9)


def test_the_executor_of_a_run() -> None:
    recipe = make_recipe({"base": "b", "experts": ["a"], "executor": "ray"})
    plain = recipe.model_copy(update={"executor": None})
    for given, wanted, found in ((None, plain, "threads"), (None, recipe, "ray"), ("threads", recipe, "threads")):
        assert (
            find_places([wanted], RunSettings(executor=given), "nothing", Problems(), inputs={}, here=True).executor
            == found
        )


def test_problems_with_executor_and_device_are_told_together() -> None:
    problems, recipe = Problems(), make_recipe({"base": "b", "experts": ["a"]})
    settings = RunSettings(device_memory="1GB", executor="thread")
    assert find_places([recipe], settings, "nothing", problems, inputs={}, here=True).room.device == "cpu"
    with pytest.raises(RecipeError) as caught:
        problems.check()
    assert "no executor 'thread'" in str(caught.value)
    assert "device_memory=1GB limits devices" in str(caught.value)
    elsewhere = RunSettings(device="cuda", executor="ray=node:1")
    room = find_places([recipe], elsewhere, "nothing", Problems(), inputs={}, here=True).room
    assert room.device == "cuda", "the devices are on other machines"
