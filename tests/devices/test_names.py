"""Names of devices: what they mean, and everything that is wrong with a text in one message."""

from __future__ import annotations

import pytest
import torch

from actmat.engine.devices.device import Device, SimulatedDevice, device_room, open_devices
from actmat.engine.devices.names import DeviceNames, check_device, parse_devices
from actmat.engine.executors import find_executor
from actmat.engine.executors.devices import DeviceExecutor
from actmat.engine.executors.threads import ThreadExecutor
from actmat.engine.resources import share_resources
from actmat.errors import Problems, RecipeError
from actmat.planning.model import MergePlan
from actmat.planning.placement import HOST, STAGING_BYTES
from actmat.recipe import make_recipe
from actmat.run.places import find_place
from actmat.settings import RunSettings


@pytest.mark.parametrize(
    ("text", "kind", "numbers"),
    [
        ("cpu", "cpu", None),
        ("cuda", "cuda", None),
        ("cuda:0", "cuda", (0,)),
        ("cuda:0,2", "cuda", (0, 2)),
        ("cuda:3, 1", "cuda", (3, 1)),
        ("mps", "mps", None),
        ("cpu:0,1", "cpu", (0, 1)),
    ],
)
def test_what_a_text_names(text: str, kind: str, numbers: tuple[int, ...] | None) -> None:
    assert parse_devices(text) == DeviceNames(kind, numbers)
    assert parse_devices(text).is_host == (text == "cpu")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu", ["there is no kind 'gpu'"]),
        ("cuda:", ["'' is no number"]),
        ("cuda:0,0,1,1,1", ["0 is given 2 times", "1 is given 3 times"]),
        ("cuda:a,0,-1,0", ["'a' is no number", "'-1' is no number", "0 is given 2 times"]),
        ("tpu:x", ["no kind 'tpu'", "'x' is no number"]),
        ("mps:0", ["one 'mps'"]),
        ("cuda:99999", ["'99999' is no number"]),
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
    with pytest.raises(RecipeError, match="sees no CUDA device"):
        check_device("cuda:0")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(RecipeError, match="Metal"):
        check_device("mps")


def test_simulated_devices_have_the_memory_that_they_are_given() -> None:
    assert open_devices("cpu") == []
    first, second = open_devices("cpu:3,5", 1 << 26)
    assert (first.name, second.name) == ("cpu:3", "cpu:5")
    assert first.total_bytes() == second.free_bytes() == 1 << 26
    assert isinstance(first, SimulatedDevice)
    kept = first.empty(1000, torch.float32)
    assert first.free_bytes() == (1 << 26) - 4 * kept.numel()
    assert second.free_bytes() == 1 << 26, "each has its own"


def test_the_executor_follows_the_device() -> None:
    assert find_executor("auto") is ThreadExecutor
    assert find_executor("auto", "cuda:0") is find_executor("devices", "mps") is DeviceExecutor
    with pytest.raises(RecipeError, match="several threads would share a device"):
        find_executor("threads", "cuda")
    with pytest.raises(RecipeError, match="needs devices"):
        find_executor("devices")


def test_room_for_an_item() -> None:
    assert device_room("cpu") == HOST
    (device,) = open_devices("cpu:0", 1 << 26)
    assert device_room("cpu:0", 1 << 26).memory == (1 << 26) - device.staging_bytes
    with pytest.raises(RecipeError, match="there are none"):
        device_room("cpu", "1GB")
    with pytest.raises(RecipeError, match="--device-memory 1MB is too little memory: bytes on their way"):
        device_room("cpu:0", "1MB")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_plan_may_be_made_for_devices_that_are_elsewhere() -> None:
    assert device_room("cuda:0,1").memory is None, "not known: everything fits"
    there = device_room("cuda", "80GB").memory
    assert there is not None
    assert 79e9 < there < 80e9 - Device.block_bytes


def test_a_limit_of_the_user_and_what_libraries_need() -> None:
    device = SimulatedDevice("cpu:0", 1 << 30)
    assert device.planned_bytes() == device.usable_bytes(1 << 30) == (1 << 30) - device.staging_bytes
    device.headroom = 0.1
    assert device.planned_bytes() == int(0.9 * (1 << 30)) - device.staging_bytes
    device.limit = 1 << 28
    assert device.planned_bytes() == device.usable_bytes(1 << 30) == (1 << 28) - device.staging_bytes
    device.limit = 1
    assert device.planned_bytes() == device.usable_bytes(1 << 30) == 0


def test_buffers_of_the_way_to_a_device_count_on_the_host() -> None:
    empty = MergePlan(make_recipe({"base": "b", "experts": ["e"]}), "model", None, (), (), (), 1)
    with_two, alone = (
        share_resources([empty], device, "2GB", 1, device_memory=1 << 26) for device in ("cpu:0,1", "cpu")
    )
    (device,) = open_devices("cpu:0")
    assert alone.memory - with_two.memory == 2 * device.staging_bytes
    assert (with_two.device, with_two.device_memory) == ("cpu:0,1", 1 << 26)


def test_plans_for_devices_that_are_not_all_here_know_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert device_room("cuda:0,7").memory is None
    assert device_room("mps").memory is None
    assert device_room("mps", "1GB").memory == 10**9 - STAGING_BYTES


def test_the_executor_of_a_run() -> None:
    recipe = make_recipe({"base": "b", "experts": ["a"], "executor": "ray"})
    plain = recipe.model_copy(update={"executor": None})
    for given, wanted, found in ((None, plain, "auto"), (None, recipe, "ray"), ("devices", recipe, "devices")):
        assert find_place([wanted], RunSettings(executor=given), "nothing", Problems()).executor == found


def test_problems_with_executor_and_device_are_told_together() -> None:
    problems, recipe = Problems(), make_recipe({"base": "b", "experts": ["a"]})
    settings = RunSettings(device="cpu:0", device_memory="1", executor="thread")
    assert find_place([recipe], settings, "nothing", problems).room.device == "cpu"
    with pytest.raises(RecipeError) as caught:
        problems.check()
    assert "no executor 'thread'" in str(caught.value)
    assert "--device-memory 1 is too little memory" in str(caught.value)
    elsewhere = RunSettings(device="cuda", executor="ray=node:1")
    room = find_place([recipe], elsewhere, "nothing", Problems()).room
    assert room.device == "cuda", "the devices are on other machines"
