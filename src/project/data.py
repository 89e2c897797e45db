"""Images as packed uint8 arrays: packed once, mapped by every rank, fetched by index.

What happens to an image is a function of (seed, epoch, index of the image) alone, so it does not
depend on the number of ranks, of loader workers, or on where a run was interrupted.
"""

import hashlib
import inspect
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler, Sampler

from project.errors import UserError

Source = Callable[[Path, str, int], Any]  # (root, split, image_size) -> sources.Listing


def seed_from(*parts: str | int) -> int:
    """Hashes what identifies a random draw, e.g. ("augment", seed, epoch), to 63 bits."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class PackedImages(Dataset):
    """One split of a dataset, mapped read-only from the files that `pack` wrote.

    Attributes:
        images: (N, 3, H, W) uint8, mapped, so that all ranks share one copy in the page cache.
        labels: (N,) int64.
        classes: names, in the order of the labels.
    """

    def __init__(self, folder: Path) -> None:
        self.images = np.load(folder / "images.npy", mmap_mode="r")
        self.labels = torch.from_numpy(np.load(folder / "labels.npy"))
        self.classes: list[str] = json.loads((folder / "classes.json").read_text("utf-8"))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A batch by index array (B,): images (B, 3, H, W) uint8, labels (B,), and the index."""
        return torch.from_numpy(self.images[index.numpy()]), self.labels[index], index


def pack(source: Source, root: Path, split: str, image_size: int) -> PackedImages:
    """Maps a split of `source`, decoding it first if no pack of just this data exists.

    Whoever comes first, rank, run or node, packs under a file lock while the others wait; files
    appear complete or not at all. A changed source function, changed arguments, or an image that
    was added to or removed from a class folder give another pack.
    """
    packs = pack_folder(root)
    folder = packs / f"{_identity(source, root, split, image_size)}-{split}"
    if not folder.exists():
        packs.mkdir(parents=True, exist_ok=True)
        with FileLock(packs / f"{folder.name}.lock"):
            if not folder.exists():
                _write_pack(source, root, split, image_size, folder)
    return PackedImages(folder)


def pack_folder(root: Path) -> Path:
    """`root/.packed`, or a folder of the user's cache where `root` cannot be written."""
    parent = next(p for p in [root, *root.absolute().parents] if p.exists())
    if os.access(parent, os.W_OK):
        return root / ".packed"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "project" / hashlib.blake2b(bytes(root.resolve()), digest_size=8).hexdigest()


def _identity(source: Source, root: Path, split: str, image_size: int) -> str:
    function, arguments = getattr(source, "func", source), getattr(source, "keywords", {})
    folders = sorted((root / split).glob("*/"))
    parts = [
        function.__module__,
        inspect.getsource(inspect.getmodule(function) or function),
        sorted(arguments.items()),
        image_size,
        [(folder.name, folder.stat().st_mtime_ns) for folder in folders],
    ]
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()
    return f"{function.__name__}-{image_size}-{digest}"


def _write_pack(source: Source, root: Path, split: str, image_size: int, folder: Path) -> None:
    listing = source(root, split, image_size)
    shape = (len(listing.labels), 3, image_size, image_size)
    part = Path(tempfile.mkdtemp(prefix="part-", dir=folder.parent))
    try:
        packed = np.lib.format.open_memmap(part / "images.npy", "w+", np.uint8, shape)
        for row, image in zip(packed, listing.images, strict=True):
            row[:] = np.asarray(image).transpose(2, 0, 1)
        packed.flush()
        np.save(part / "labels.npy", np.asarray(listing.labels, np.int64))
        (part / "classes.json").write_text(json.dumps(listing.classes), "utf-8")
        part.chmod(0o755)  # mkdtemp's 0700 would lock out other users of a shared data folder
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def stratified_split(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Splits indices into training and validation, each class by `fraction`, both ascending.

    Args:
        labels: (N,) int64.
        fraction: of each class that goes to validation, rounded to whole images; 0 to below 1.
        seed: of the split alone, so that runs of different seeds validate on the same images.
    """
    if not 0 <= fraction < 1:
        raise UserError(f"data.val_fraction={fraction} must lie in [0, 1).")
    generator = torch.Generator().manual_seed(seed_from("split", seed))
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        order = torch.randperm(len(members), generator=generator)
        held_out[members[order[: round(fraction * len(members))]]] = True
    return (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]


def local_batch_size(batch_size: int, world_size: int, accumulate: int) -> int:
    """Images a rank takes at a time, so that one optimizer step sees `batch_size` of them.

    Raises:
        UserError: the global batch does not divide; the nearest sizes that do are named.
    """
    parts = world_size * accumulate
    if batch_size > 0 and batch_size % parts == 0:
        return batch_size // parts
    below = batch_size // parts * parts
    sizes = " or ".join(str(size) for size in (below, below + parts) if size > 0)
    raise UserError(
        f"data.batch_size={batch_size} is the global batch and does not divide by "
        f"{world_size} ranks × {accumulate} accumulated batches. Nearest that do: {sizes}."
    )


class TrainBatches(Sampler[Tensor]):
    """A rank's batches of one epoch as index arrays, in the order of `DistributedSampler`.

    The union over ranks of an optimizer step's batches is the same slice of the same permutation
    on any number of ranks. What does not fill an optimizer step at the end of an epoch is dropped.

    Args:
        indices: (N,) rows of the packed images to train on.
        batch_size: images of one optimizer step, over all ranks and accumulated batches.
    """

    def __init__(
        self, indices: Tensor, batch_size: int, rank: int, world_size: int, accumulate: int, seed: int
    ) -> None:
        self.indices = indices
        self.local = local_batch_size(batch_size, world_size, accumulate)
        self.num_batches = len(indices) // batch_size * accumulate
        if self.num_batches == 0:
            raise UserError(
                f"data.batch_size={batch_size} is more than the {len(indices)} training images."
            )
        self.order = DistributedSampler(
            range(len(indices)), world_size, rank, seed=seed, drop_last=True  # type: ignore
        )

    def set_epoch(self, epoch: int) -> None:
        """Chooses the permutation of `epoch`; Lightning calls this before each epoch."""
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Tensor]:
        batches = self.indices[list(self.order)].split(self.local)
        yield from batches[: self.num_batches]


class EvalBatches(Sampler[Tensor]):
    """A rank's evaluation batches: whole batches dealt to the ranks in turn, nothing padded.

    Every image is scored exactly once. A rank that is dealt none gets one batch of no images,
    since all ranks must take part in the first forward (DDP broadcasts buffers there).

    Args:
        indices: (N,) rows of the packed images.
        batch_size: images a batch; the last may hold fewer.
    """

    def __init__(self, indices: Tensor, batch_size: int, rank: int, world_size: int) -> None:
        if batch_size < 1:
            raise UserError(f"data.eval_batch_size={batch_size} must be at least 1.")
        self.batches: Sequence[Tensor] = indices.split(batch_size)[rank::world_size]
        self.batches = self.batches or (indices[:0],)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.batches


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Scales (B, 3, H, W) uint8 to float32 in [0, 1], subtracts `mean`, divides by `std`.

    The same operations in the same order as torchvision's to_tensor and normalize, hence the same
    bits.
    """
    mean_, std_ = (images.new_tensor(v, dtype=torch.float32).view(3, 1, 1) for v in (mean, std))
    return images.to(torch.float32).div_(255).sub_(mean_).div_(std_)


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

    def table(self, num_images: int, image_size: int, seed: int, epoch: int) -> Tensor:
        """Draws an epoch's augmentation of a whole dataset.

        Returns:
            (num_images, 5) int16: top and left of the crop in the padded image, whether to flip,
            row and column of the cutout's centre.
        """
        generator = torch.Generator().manual_seed(seed_from("augment", seed, epoch))
        num_crops = 2 * self.crop_padding + 1
        limits = [num_crops, num_crops, 2 if self.flip else 1, image_size, image_size]
        draws = torch.rand(num_images, 5, generator=generator, dtype=torch.float64)
        return (draws * torch.tensor(limits)).to(torch.int16)

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
