"""Images of files, folders and data sets with the hub's schema; splits; pixels on disk."""

from __future__ import annotations

import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evidence.tests.helpers.vision import arrays, write_tasks
from PIL import Image

from actmat.errors import CheckpointError, OutputError, RecipeError
from actmat_experiments.harness.cache import Cache
from actmat_experiments.harness.progress import Watch
from actmat_experiments.vision.backbones import CLIP_SCALE
from actmat_experiments.vision.clip import class_words, clip_tasks
from actmat_experiments.vision.images import (
    HubSet,
    Limits,
    local_task,
    open_folder,
    open_hub,
    open_npz,
    prepare_task,
    split_indices,
)


@pytest.fixture
def data(tmp_path):
    return write_tasks(tmp_path / "data", ("first", "second"))


def hub_stand_in(folder, names=("cat", "dog"), splits=("train", "test"), columns=("image", "label"), first=None):
    """A data set on disk with the schema of the hub's image sets.

    Args:
        first: labels are bare numbers from it on.
    """
    import datasets

    label = datasets.ClassLabel(names=list(names)) if first is None else datasets.Value("int64")
    features = datasets.Features({columns[0]: datasets.Image(), columns[1]: label})
    (folder / "data").mkdir(parents=True)
    for split in splits:
        images = [Image.new("RGB", (40, 30), (10 * i, 0, 255)) for i in range(20)]
        rows = {columns[0]: images, columns[1]: [(first or 0) + i % len(names) for i in range(20)]}
        made = datasets.Dataset.from_dict(rows, features=features)
        made.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.fixture(autouse=True)
def _own_hub_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets-cache"))


def test_an_npz_is_a_task(data):
    task = local_task(data, "second")
    expected = arrays(1, 3, 60, gray=True)
    assert task.class_names == ("kind 0", "kind 1", "kind 2")
    assert list(task.train.labels) == expected["y_train"].tolist()
    assert np.array_equal(np.asarray(task.test.image(4)), expected["x_test"][4])


def test_what_is_wrong_with_an_npz_is_told_at_once(tmp_path):
    good = arrays(0, 2, 8, gray=False)
    np.savez(tmp_path / "few.npz", x_train=good["x_train"])
    with pytest.raises(CheckpointError, match="y_train, x_test, y_test, class_names"):
        open_npz(tmp_path / "few.npz")
    np.savez(tmp_path / "bad.npz", **good | {"x_train": good["x_train"] / 255, "y_test": good["y_test"] + 5})
    with pytest.raises(CheckpointError) as caught:
        open_npz(tmp_path / "bad.npz")
    assert "x_train must be uint8" in caught.value.problems[0]
    assert "labels 5 to 6, but there are 2 classes" in caught.value.problems[1]
    np.savez(tmp_path / "evil.npz", **good | {"class_names": np.array([{"a": 1}], dtype=object)})
    with pytest.raises(ValueError, match="allow_pickle"):
        open_npz(tmp_path / "evil.npz")


def test_a_folder_of_images_is_a_task(tmp_path):
    for part in ("train", "test"):
        for kind in ("b_kind", "a_kind"):
            (tmp_path / "pets" / part / kind).mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / "pets" / part / kind / f"{i}.png")
            (tmp_path / "pets" / part / kind / "notes.txt").touch()
    task = local_task(tmp_path, "pets")
    assert (task.class_names, task.train.labels) == (("a_kind", "b_kind"), [0, 0, 0, 1, 1, 1])
    assert task.train.image(2).getpixel((0, 0)) == (2, 0, 0)
    before = task.identity
    Image.new("RGB", (8, 8), (9, 9, 9)).save(tmp_path / "pets" / "test" / "a_kind" / "0.png")
    assert open_folder(tmp_path / "pets").identity != before


def test_a_task_that_is_not_there_is_told_with_what_is(data):
    with pytest.raises(CheckpointError, match="first, second"):
        local_task(data, "third")


def test_a_data_set_of_the_hub(tmp_path):
    folder = hub_stand_in(tmp_path / "set")
    task = open_hub("pets", HubSet(str(folder)))
    assert (task.name, task.class_names, len(task.train.labels)) == ("pets", ("cat", "dog"), 20)
    assert task.train.image(3).size == (40, 30)
    assert open_hub("pets", HubSet(str(folder))).identity == task.identity
    words = open_hub("pets", HubSet(str(folder)), ("a cat", "a dog"))
    assert words.class_names == ("a cat", "a dog")


def test_a_data_set_of_another_shape_is_refused_with_all_problems(tmp_path):
    with pytest.raises(CheckpointError, match="no split 'test'; it has train"):
        open_hub("pets", HubSet(str(hub_stand_in(tmp_path / "part", splits=("train",)))))
    folder = hub_stand_in(tmp_path / "set", columns=("img", "fine_label"))
    with pytest.raises(CheckpointError) as caught:
        open_hub("pets", HubSet(str(folder)))
    text = "\n".join(caught.value.problems)
    assert "no column 'image'" in text
    assert "no column 'label'" in text
    right = hub_stand_in(tmp_path / "other", names=("cat", "dog", "bird"))
    with pytest.raises(CheckpointError, match="another version"):
        open_hub("pets", HubSet(str(right)), ("a cat", "a dog"))


def test_copies_without_names_of_classes_get_the_published_ones(tmp_path):
    published = ("a cat", "a dog")
    for folder in (
        hub_stand_in(tmp_path / "bare", first=0),
        hub_stand_in(tmp_path / "numbered", names=("0", "1")),
    ):
        assert open_hub("pets", HubSet(str(folder)), None, published).class_names == published
    own = hub_stand_in(tmp_path / "own", names=("dog", "cat"))
    assert open_hub("pets", HubSet(str(own)), None, published).class_names == ("dog", "cat"), "in the order of the copy"
    with pytest.raises(CheckpointError, match="labels -1 to 0"):
        open_hub("pets", HubSet(str(hub_stand_in(tmp_path / "unlabeled", first=-1))), None, published)
    with pytest.raises(CheckpointError, match="0 names of classes, but 0 names are known"):
        open_hub("pets", HubSet(str(hub_stand_in(tmp_path / "nameless", first=0))))


def test_splits_are_disjoint_and_do_not_depend_on_anything_else():
    fit, held = split_indices(1000, "mnist")
    assert (len(fit), len(held)) == (900, 100)
    assert sorted(fit + held) == list(range(1000))
    assert split_indices(1000, "mnist") == (fit, held)
    assert split_indices(1000, "svhn")[1] != held
    assert len(split_indices(100_000, "x")[1]) == 5000


def test_pixels_are_kept_on_disk_and_come_back(data, tmp_path):
    cache, raw = Cache(tmp_path / "cache"), local_task(data, "first")
    task = prepare_task(cache, raw, 32, Watch(), Limits(train=10, validation=3, test=5))
    assert [len(p) for p in (task.train, task.validation, task.test)] == [10, 3, 5]
    fit, held = split_indices(60, "first")
    expected = arrays(0, 2, 60, gray=False)
    assert np.array_equal(task.train.pixels_NSSC, expected["x_train"][fit[:10]]), "32 pixels stay as they are"
    assert task.validation.labels_N.tolist() == expected["y_train"][held[:3]].tolist()
    again = prepare_task(cache, raw, 32, Watch(), Limits(train=10, validation=3, test=5))
    assert again.content == task.content
    assert prepare_task(cache, raw, 32, Watch(), Limits(train=9)).content != task.content


def test_gray_images_become_color_at_the_right_size(data, tmp_path):
    task = prepare_task(Cache(tmp_path / "cache"), local_task(data, "second"), 48, Watch())
    pixels = task.test.pixels_NSSC
    assert pixels.shape == (30, 48, 48, 3)
    assert np.array_equal(pixels[..., 0], pixels[..., 2])
    right, n = task.majority
    assert (n, right) == (30, 10)


def test_pixels_are_scaled_as_clip_was_trained():
    pixels = torch.zeros((2, 4, 4, 3), dtype=torch.uint8)
    pixels[..., 1] = 255
    images = CLIP_SCALE(pixels)
    assert images.shape == (2, 3, 4, 4)
    assert images[0, 0, 0, 0].item() == pytest.approx(-0.48145466 / 0.26862954)
    assert images[0, 1, 2, 2].item() == pytest.approx((1 - 0.4578275) / 0.26130258)
    assert images.dtype == torch.float32


def test_the_papers_tasks_have_their_prompts():
    tasks = {t.name: t for t in clip_tasks()}
    assert all(template.count("{}") == 1 for task in tasks.values() for template in task.templates)
    assert {n: (len(t.templates), t.epochs) for n, t in tasks.items()} == {
        "cars": (8, 35),
        "dtd": (8, 76),
        "eurosat": (3, 12),
        "gtsrb": (3, 11),
        "mnist": (1, 5),
        "resisc45": (18, 15),
        "sun397": (2, 14),
        "svhn": (1, 4),
    }
    assert len(tasks["gtsrb"].classes) == 43
    published = {n: t.names for n, t in tasks.items() if t.classes is None}
    assert {n: len(some) for n, some in published.items()} == {"cars": 196, "dtd": 47, "resisc45": 45, "sun397": 397}
    assert all(len(set(some)) == len(some) for some in published.values())
    assert all(class_words(name) == name for some in published.values() for name in some)
    assert published["cars"][173] == "Ram C/V Cargo Van Minivan 2012"
    assert published["sun397"][19] == class_words("/a/athletic_field/outdoor")
    assert tasks["svhn"].hub.config == "cropped_digits"
    assert [t.name for t in clip_tasks(["svhn", "dtd"])] == ["svhn", "dtd"]
    with pytest.raises(RecipeError, match="Did you mean 'sun397'"):
        clip_tasks(["sun"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/a/abbey", "abbey"),
        ("baseball_diamond", "baseball diamond"),
        ("/a/arena/hockey", "arena hockey"),
        ("/t/theater/indoor_procenium", "theater indoor procenium"),
        ("athletic_field/outdoor", "athletic field outdoor"),
        ("BMW X5", "BMW X5"),
        ("Ram C/V Cargo Van Minivan 2012", "Ram C/V Cargo Van Minivan 2012"),
        ("Bentley Continental Supersports Conv. Convertible 2012",) * 2,
        ("polka-dotted", "polka-dotted"),
    ],
)
def test_names_become_words(name, words):
    assert class_words(name) == words


def test_images_that_do_not_fit_the_disk_are_refused_before_one_is_written(data, tmp_path, monkeypatch):
    raw, cache = local_task(data, "first"), Cache(tmp_path / "cache")
    needed = 3 * 32**2 * (len(raw.train.labels) + len(raw.test.labels))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(OutputError, match=r"'first' at 32 pixels take .* fewer images"):
        prepare_task(cache, raw, 32, Watch())
    assert not list((tmp_path / "cache").rglob("*.npy"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    assert len(prepare_task(cache, raw, 32, Watch()).test) == len(raw.test.labels)


def test_images_that_cannot_be_read_are_left_out_one_in_a_hundred_at_most(tmp_path):
    raw = open_npz(write_tasks(tmp_path / "data", ("only",), n=240) / "only.npz")
    whole, broken = raw.train.image, set()

    def image(i):
        if i in broken:
            raise OSError("broken data stream")
        return whole(i)

    raw = replace(raw, train=replace(raw.train, image=image))
    fit, _ = split_indices(240, "only")
    broken.add(fit[7])
    task = prepare_task(Cache(tmp_path / "cache"), raw, 32, Watch())
    assert len(task.train) == len(fit) - 1
    assert task.train.labels_N.tolist() == [raw.train.labels[i] for i in fit if i not in broken]
    assert task.train.pixels_NSSC.shape[0] == len(task.train)
    assert np.array_equal(task.train.pixels_NSSC[7], np.asarray(whole(fit[8])))
    (line,) = task.malformed
    assert line == f"train, image {fit[7]} cannot be read: broken data stream"
    broken.update(fit[:5])
    with pytest.raises(CheckpointError, match="only, train: 6 of 216 rows cannot be used"):
        prepare_task(Cache(tmp_path / "other"), raw, 32, Watch())
