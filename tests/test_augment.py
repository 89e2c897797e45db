"""What is drawn for an image follows from seed, epoch and its number alone."""

import pytest
import torch

from project.augment import Augment, normalise
from project.errors import UserError
from project.seeds import seed_from

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
FULL = Augment(crop_padding=4, flip=True, cutout=8)


def batched(images: torch.Tensor, rows: torch.Tensor, augment: Augment) -> torch.Tensor:
    return augment.cut_out(normalise(augment.crop_and_flip(images, rows), MEAN, STD), rows)


def test_an_image_is_augmented_alike_in_any_batch(thousand_images):
    table = FULL.table(1000, 32, seed=0, epoch=0)
    index = torch.tensor([700, 3, 41])
    some = batched(thousand_images[index], table[index], FULL)
    assert torch.equal(some, batched(thousand_images, table, FULL)[index])


def test_the_table_is_a_function_of_seed_and_epoch():
    table = FULL.table(1000, 32, seed=1, epoch=2)
    assert torch.equal(table, FULL.table(1000, 32, seed=1, epoch=2))
    assert not torch.equal(table, FULL.table(1000, 32, seed=1, epoch=3))
    assert not torch.equal(table, FULL.table(1000, 32, seed=2, epoch=2))


def test_the_table_of_many_images_is_one_stream_of_draws():
    generator = torch.Generator().manual_seed(seed_from("augment", 3, 1))
    draws = torch.rand(2**16 + 7, 5, generator=generator, dtype=torch.float64)
    expected = (draws * torch.tensor([9, 9, 2, 32, 32])).to(torch.int16)
    assert torch.equal(Augment(4, flip=True).table(2**16 + 7, 32, seed=3, epoch=1), expected)


def test_switching_one_augmentation_leaves_the_draws_of_the_others():
    without = Augment(crop_padding=4).table(1000, 32, seed=0, epoch=0)
    assert torch.equal(without[:, :2], FULL.table(1000, 32, seed=0, epoch=0)[:, :2])


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="pixels"):
        Augment(crop_padding=-1)
    with pytest.raises(UserError, match="reflects no further"):
        Augment(crop_padding=32).table(10, 32, seed=0, epoch=0)


def test_draws_cover_their_ranges_evenly():
    table = FULL.table(90_000, 32, seed=0, epoch=0).long()
    for column, size in enumerate([9, 9, 2, 32, 32]):
        counts = torch.bincount(table[:, column], minlength=size)
        assert len(counts) == size
        assert (counts / 90_000 * size - 1).abs().max() < 0.1
