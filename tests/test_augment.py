"""Batched augmentation equals torchvision's functions, applied to one image at a time."""

import pytest
import torch
import torchvision.transforms.functional as TF

from project.augment import Augment, normalise
from project.errors import UserError
from reference_ddp import augmented

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
FULL = Augment(crop_padding=4, flip=True, cutout=8)


def one_by_one(image: torch.Tensor, row: torch.Tensor, augment: Augment) -> torch.Tensor:
    """What torchvision makes of one uint8 image (3, 32, 32), given its row of the table."""
    array = TF.to_tensor(image.permute(1, 2, 0).numpy())
    return augmented(array, row.tolist(), augment.crop_padding, augment.cutout, MEAN, STD)


def batched(images: torch.Tensor, rows: torch.Tensor, augment: Augment) -> torch.Tensor:
    return augment.cut_out(normalise(augment.crop_and_flip(images, rows), MEAN, STD), rows)


@pytest.mark.parametrize(
    "augment",
    [FULL, Augment(crop_padding=31), Augment(flip=True), Augment(cutout=7), Augment()],
    ids=str,
)
def test_a_thousand_real_images_equal_torchvision(thousand_images, augment):
    table = augment.table(1000, 32, seed=0, epoch=3)
    expected = torch.stack(
        [one_by_one(i, r, augment) for i, r in zip(thousand_images, table, strict=True)]
    )
    assert torch.equal(batched(thousand_images, table, augment), expected)


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
