"""Photographs: read, split and moved as promised."""

from __future__ import annotations

import sys

import pytest
import torch
from tests.helpers.demo import some_photographs

from actmat.errors import MergeError
from actmat.extras.demo.tasks import load_photographs, moved_views, shift, split_photographs


def test_photographs_are_real_and_scaled_to_one():
    photographs = load_photographs()
    assert len(photographs) == 1797
    assert photographs.images_NHW.shape == (1797, 8, 8)
    assert photographs.images_NHW.dtype == torch.float32
    assert photographs.images_NHW.min() == 0
    assert photographs.images_NHW.max() == 1
    assert photographs.digits_N[:10].tolist() == list(range(10))


def test_a_missing_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MergeError, match=r"actmat\[demo\]"):
        load_photographs()


def split_of(photographs, seed):
    generator = torch.Generator().manual_seed(seed)
    return split_photographs(photographs, n_validation=6, n_test=9, generator=generator)


def test_parts_are_disjoint_and_complete():
    photographs = some_photographs(40)
    split = split_of(photographs, 0)
    assert [len(p) for p in (split.train, split.validation, split.test)] == [25, 6, 9]
    pixels = torch.cat([p.images_NHW.flatten(1) for p in (split.train, split.validation, split.test)])
    assert len(pixels.unique(dim=0)) == 40
    # images and digits travel together
    for part in (split.train, split.validation, split.test):
        for image, digit in zip(part.images_NHW, part.digits_N, strict=True):
            where = (photographs.images_NHW == image).flatten(1).all(1)
            assert photographs.digits_N[where].tolist() == [int(digit)]


def test_the_split_follows_its_seed():
    photographs = some_photographs(40)
    first, again, other = (split_of(photographs, seed).test.images_NHW for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("n_validation", "n_test"), [(20, 20), (30, 30), (0, 0)])
def test_a_split_without_a_part_to_fit_or_to_test_is_refused(n_validation, n_test):
    with pytest.raises(ValueError, match="hold out"):
        split_photographs(some_photographs(40), n_validation=n_validation, n_test=n_test, generator=torch.Generator())


def test_shift_moves_down_and_right_and_fills_with_black():
    image = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert torch.equal(shift(image, 1, 0), torch.tensor([[0.0, 0, 0], [1, 2, 3], [4, 5, 6]]))
    assert torch.equal(shift(image, -1, 1), torch.tensor([[0.0, 4, 5], [0, 7, 8], [0, 0, 0]]))
    assert torch.equal(shift(image, 0, -1), torch.tensor([[2.0, 3, 0], [5, 6, 0], [8, 9, 0]]))
    assert torch.equal(shift(image, 0, 0), image)


def test_views_keep_the_originals_first_and_move_by_at_most_one_pixel():
    photographs = some_photographs(30)
    views = moved_views(photographs, 3, torch.Generator().manual_seed(0))
    assert len(views) == 90
    assert torch.equal(views.images_NHW[:30], photographs.images_NHW)
    assert torch.equal(views.digits_N, photographs.digits_N.repeat(3))
    steps = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    found = set()
    for view, image in zip(views.images_NHW[30:], photographs.images_NHW.repeat(2, 1, 1), strict=True):
        fits = [step for step in steps if torch.equal(view, shift(image, *step))]
        assert len(fits) == 1
        found.add(fits[0])
    assert len(found) == 9
