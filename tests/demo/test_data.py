"""Photographs and tasks: read, split, moved and asked about as promised."""

from __future__ import annotations

import sys

import pytest
import torch
from tests.helpers.demo import some_photographs

from actmat.errors import MergeError
from actmat.extras.demo.tasks import (
    LOOKS,
    TASKS,
    Examples,
    Split,
    generator_for,
    load_photographs,
    moved_views,
    pose,
    pose_split,
    shift,
    split_photographs,
)

ONE_OF_EACH = some_photographs(10)


def test_photographs_are_real_and_scaled_to_one():
    photographs = load_photographs()
    assert photographs.images_NHW.shape == (1797, 8, 8)
    assert photographs.images_NHW.dtype == torch.float32
    assert (photographs.images_NHW.min(), photographs.images_NHW.max()) == (0, 1)
    assert photographs.labels_N[:10].tolist() == list(range(10))


def test_a_missing_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MergeError, match=r"actmat\[demo\]"):
        load_photographs()


def test_parts_are_disjoint_and_complete_and_follow_the_seed(monkeypatch):
    photographs = some_photographs(40)
    monkeypatch.setattr("actmat.extras.demo.tasks.load_photographs", lambda: photographs)
    split, again, other = (split_photographs(6, 9, torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    parts = (split.train, split.validation, split.test)
    assert [len(part) for part in parts] == [25, 6, 9]
    assert len(torch.cat([part.images_NHW.flatten(1) for part in parts]).unique(dim=0)) == 40
    for part in parts:  # images and digits travel together
        for image, digit in zip(part.images_NHW, part.labels_N, strict=True):
            where = (photographs.images_NHW == image).flatten(1).all(1)
            assert photographs.labels_N[where].tolist() == [int(digit)]
    assert torch.equal(split.test.images_NHW, again.test.images_NHW)
    assert not torch.equal(split.test.images_NHW, other.test.images_NHW)


def test_shift_moves_down_and_right_and_fills_with_black():
    image = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert torch.equal(shift(image, 1, 0), torch.tensor([[0.0, 0, 0], [1, 2, 3], [4, 5, 6]]))
    assert torch.equal(shift(image, -1, 1), torch.tensor([[0.0, 4, 5], [0, 7, 8], [0, 0, 0]]))
    assert torch.equal(shift(image, 0, -1), torch.tensor([[2.0, 3, 0], [5, 6, 0], [8, 9, 0]]))


def test_views_keep_the_originals_first_and_move_by_at_most_one_pixel():
    photographs = some_photographs(30)
    views = moved_views(photographs, 3, torch.Generator().manual_seed(0))
    assert torch.equal(views.images_NHW[:30], photographs.images_NHW)
    assert torch.equal(views.labels_N, photographs.labels_N.repeat(3))
    steps = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    found = set()
    for view, image in zip(views.images_NHW[30:], photographs.images_NHW.repeat(2, 1, 1), strict=True):
        (step,) = [step for step in steps if torch.equal(view, shift(image, *step))]
        found.add(step)
    assert len(found) == 9


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("digit", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("parity", [0, 1] * 5),
        ("large", [0] * 5 + [1] * 5),
        ("mod3", [0, 1, 2] * 3 + [0]),
    ],
)
def test_labels_of_the_ten_digits(question, expected):
    assert pose(ONE_OF_EACH, "plain", question, torch.Generator()).labels_N.tolist() == expected


def test_turned_images_are_turned_by_their_label():
    corner = torch.zeros(8, 8)
    corner[0, 0] = 1.0
    examples = pose(Examples(corner.expand(64, 8, 8), torch.zeros(64)), "plain", "turned", generator_for(0, "x"))
    # a quarter turn to the left carries the top left corner to the bottom left
    corner_after = {0: (0, 0), 1: (7, 0), 2: (7, 7), 3: (0, 7)}
    for image, turns in zip(examples.images_NHW, examples.labels_N.tolist(), strict=True):
        assert image[corner_after[turns]] == 1
    assert set(examples.labels_N.tolist()) == {0, 1, 2, 3}


def test_looks_keep_all_information():
    black, images = torch.zeros(1, 8, 8), ONE_OF_EACH.images_NHW
    assert LOOKS["rows"](black)[0, :2].tolist() == [[0] * 8, [1] * 8]
    assert LOOKS["columns"](black)[0, :2].tolist() == [[0, 1] * 4, [0, 1] * 4]
    assert LOOKS["chequered"](black)[0, :2].tolist() == [[0, 1] * 4, [1, 0] * 4]
    for look in set(LOOKS) - {"jumbled"}:  # these undo themselves
        torch.testing.assert_close(LOOKS[look](LOOKS[look](images)), images)
    order = LOOKS["jumbled"](torch.arange(64.0).view(1, 8, 8)).flatten().long()
    assert sorted(order.tolist()) == list(range(64)) != order.tolist()
    assert torch.equal(LOOKS["jumbled"](images).flatten(1), images.flatten(1)[:, order])


def test_parts_of_a_task_come_from_the_same_parts_of_the_photographs():
    photographs = some_photographs(60)
    cut = torch.arange(60).split([30, 10, 20])
    split = Split(*map(photographs.take, cut))
    assert len({task.look for task in TASKS}) == len(TASKS) == 6
    for task in TASKS:
        data, again, other = (pose_split(task, split, n_views=2, seed=seed) for seed in (5, 5, 6))
        assert [len(part) for part in (data.train, data.validation, data.test)] == [60, 10, 20]
        assert set(data.train.labels_N.tolist()) == set(range(task.n_classes))
        assert torch.equal(data.train.images_NHW, again.train.images_NHW)
        assert not torch.equal(data.train.images_NHW, other.train.images_NHW)
        if task.question != "turned":  # test photographs as they are, whatever the seed
            assert torch.equal(data.test.images_NHW, LOOKS[task.look](split.test.images_NHW))
