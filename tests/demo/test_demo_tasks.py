"""Tasks: every label follows from the digit, every look can be undone, nothing leaks between parts."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.demo import some_photographs

from actmat.extras.demo.tasks import LOOKS, QUESTIONS, TASKS, Photographs, pose, pose_split, split_photographs

ONE_OF_EACH = some_photographs(10)


def labels(question):
    return pose(ONE_OF_EACH, "plain", question, torch.Generator().manual_seed(0)).labels_N.tolist()


def test_labels_of_the_ten_digits():
    assert labels("digit") == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert labels("parity") == [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]
    assert labels("large") == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert labels("mod3") == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


def test_turned_images_are_turned_by_their_label():
    corner = torch.zeros(8, 8)
    corner[0, 0] = 1.0
    photographs = Photographs(corner.expand(64, 8, 8), torch.zeros(64, dtype=torch.long))
    examples = pose(photographs, "plain", "turned", torch.Generator().manual_seed(0))
    # a quarter turn to the left carries the top left corner to the bottom left
    corner_after = {0: (0, 0), 1: (7, 0), 2: (7, 7), 3: (0, 7)}
    for image, turns in zip(examples.images_NHW, examples.labels_N.tolist(), strict=True):
        assert image[corner_after[turns]] == 1
        assert image.sum() == 1
    assert set(examples.labels_N.tolist()) == {0, 1, 2, 3}


def test_looks_on_a_black_image():
    black = torch.zeros(1, 8, 8)
    assert torch.equal(LOOKS["plain"](black), black)
    assert torch.equal(LOOKS["negative"](black), black + 1)
    assert LOOKS["rows"](black)[0, :2].tolist() == [[0] * 8, [1] * 8]
    assert LOOKS["columns"](black)[0, :2].tolist() == [[0, 1] * 4, [0, 1] * 4]
    assert LOOKS["chequered"](black)[0, :2].tolist() == [[0, 1] * 4, [1, 0] * 4]


@pytest.mark.parametrize("look", sorted(set(LOOKS) - {"jumbled"}))
def test_inverting_looks_undo_themselves_and_stay_between_black_and_white(look):
    images = ONE_OF_EACH.images_NHW
    seen = LOOKS[look](images)
    assert seen.min() >= 0
    assert seen.max() <= 1
    torch.testing.assert_close(LOOKS[look](seen), images)


def test_jumbling_is_one_fixed_order_of_the_pixels():
    numbered = torch.arange(64.0).view(1, 8, 8)
    jumbled = LOOKS["jumbled"](numbered)
    assert not torch.equal(jumbled, numbered)
    assert torch.equal(jumbled.flatten().sort().values, numbered.flatten())
    order = jumbled.flatten().long()
    images = ONE_OF_EACH.images_NHW
    assert torch.equal(LOOKS["jumbled"](images).flatten(1), images.flatten(1)[:, order])


def test_tasks_differ_in_look_and_use_every_question():
    assert len({t.name for t in TASKS}) == len({t.look for t in TASKS}) == len(TASKS) == 6
    assert {t.question for t in TASKS} == set(QUESTIONS)
    for task in TASKS:
        posed = pose(some_photographs(400), task.look, task.question, torch.Generator().manual_seed(0))
        assert posed.labels_N.unique().tolist() == list(range(task.n_classes))


def test_parts_of_a_task_come_from_the_same_parts_of_the_photographs():
    split = split_photographs(
        some_photographs(60), n_validation=10, n_test=20, generator=torch.Generator().manual_seed(0)
    )
    for task in TASKS:
        data = pose_split(task, split, n_views=2, seed=5)
        assert [len(p) for p in (data.train, data.validation, data.test)] == [60, 10, 20]
        again, other = (pose_split(task, split, n_views=2, seed=seed) for seed in (5, 6))
        assert torch.equal(data.train.images_NHW, again.train.images_NHW)
        assert not torch.equal(data.train.images_NHW, other.train.images_NHW)
        if task.question != "turned":  # test photographs as they are, whatever the seed
            assert torch.equal(data.test.images_NHW, LOOKS[task.look](split.test.images_NHW))
