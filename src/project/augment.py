"""Whole batches of images normalised and augmented.

What happens to an image is a function of (seed, epoch, index of the image) alone, so it does not
depend on the number of ranks, of loader workers, or on where a run was interrupted.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from project.errors import UserError
from project.seeds import seed_from


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Scales (B, 3, H, W) uint8 to float32 in [0, 1], subtracts `mean`, divides by `std`.

    The same operations in the same order as torchvision's to_tensor and normalize, hence the same
    bits.
    """
    mean_, std_ = (_per_channel(tuple(values), images.device) for values in (mean, std))
    return images.to(torch.float32).div_(255).sub_(mean_).div_(std_)


@functools.cache
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """(3, 1, 1) float32, made once a device: the host waits for such a copy to a GPU."""
    return torch.tensor(values, dtype=torch.float32, device=device).view(3, 1, 1)


@dataclass
class Augment:
    """Random crop after reflect padding, horizontal flip, cutout; whole batches at a time.

    Args:
        crop_padding: pixels added on each side before the crop; 0 for no crop.
        flip: mirror half of the images.
        cutout: side in pixels of a square set to 0 after normalisation, centred anywhere in the
            image and clipped at its border (https://arxiv.org/abs/1708.04552); 0 for none.
    """

    crop_padding: int = 0
    flip: bool = False
    cutout: int = 0

    def __post_init__(self) -> None:
        if self.crop_padding < 0 or self.cutout < 0:
            raise UserError("data.augment.crop_padding and cutout are pixels, 0 for none.")

    def table(self, num_images: int, image_size: int, seed: int, epoch: int) -> Tensor:
        """Draws an epoch's augmentation of a whole dataset.

        Returns:
            (num_images, 5) int16: top and left of the crop in the padded image, whether to flip,
            row and column of the cutout's centre.
        """
        if self.crop_padding >= image_size:
            raise UserError(f"data.augment.crop_padding={self.crop_padding}: reflects no further.")
        generator = torch.Generator().manual_seed(seed_from("augment", seed, epoch))
        num_crops = 2 * self.crop_padding + 1
        limits = [num_crops, num_crops, 2 if self.flip else 1, image_size, image_size]
        table, scale = torch.empty(num_images, 5, dtype=torch.int16), torch.tensor(limits)
        for part in table.split(2**16):  # the same stream of draws, without 40 bytes an image
            draws = torch.rand(part.shape, generator=generator, dtype=torch.float64)
            part.copy_(draws.mul_(scale))
        return table

    def crop_and_flip(self, images: Tensor, rows: Tensor) -> Tensor:
        """Crops and flips (B, 3, H, W) uint8 as their `rows` (B, 5) of the table say."""
        if not (self.crop_padding or self.flip):
            return images
        height, width = images.shape[-2:]
        top, left, flip = rows[:, :3].long().unbind(1)
        y = torch.arange(height, device=images.device) + top[:, None] - self.crop_padding
        x = torch.arange(width, device=images.device).expand(len(images), -1)
        x = torch.where(flip[:, None] == 1, width - 1 - x, x) + left[:, None] - self.crop_padding
        pixel = _reflect(y, height)[:, :, None] * width + _reflect(x, width)[:, None, :]
        pixel = pixel.view(len(images), 1, -1).expand(-1, images.shape[1], -1)
        return images.flatten(2).gather(2, pixel).view_as(images)

    def cut_out(self, images: Tensor, rows: Tensor) -> Tensor:
        """Sets each image's square of (B, 3, H, W) float to 0, in place."""
        if not self.cutout:
            return images
        top, left = (rows[:, 3:].long() - self.cutout // 2).unbind(1)
        y, x = (torch.arange(size, device=images.device) for size in images.shape[-2:])
        in_rows = (y >= top[:, None]) & (y < top[:, None] + self.cutout)
        in_columns = (x >= left[:, None]) & (x < left[:, None] + self.cutout)
        return images.masked_fill_((in_rows[:, :, None] & in_columns[:, None, :])[:, None], 0)


def _reflect(position: Tensor, size: int) -> Tensor:
    """Mirrors positions outside [0, size) at the first and last pixel, as reflect padding does."""
    return (size - 1) - ((size - 1) - position.abs()).abs()
