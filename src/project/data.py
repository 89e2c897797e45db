"""Images as packed uint8 arrays: packed once, mapped by every rank, fetched by index."""

import contextlib
import hashlib
import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler, Sampler

from project.augment import seed_from
from project.errors import UserError

Source = Callable[[Path, str, int], Any]  # (root, split, image_size) -> sources.Listing


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
        with _made(packs), FileLock(packs / f"{folder.name}.lock"):
            if not folder.exists():
                _write_pack(source, root, split, image_size, folder)
    return PackedImages(folder)


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Makes a folder; if nothing comes to lie in it, a mistyped root leaves no trace."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except UserError:
        for lock in folder.glob("*.lock") if missing else ():
            lock.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: somebody else's
            for path in missing:
                path.rmdir()
        raise


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
    if fraction and not held_out.any():
        raise UserError(
            f"data.val_fraction={fraction} of these classes is no image to validate on."
        )
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


def steps_per_epoch(num_images: int, batch_size: int) -> int:
    """Optimizer steps of an epoch; the images that do not fill the last are dropped.

    Raises:
        UserError: there is not even one.
    """
    if num_images < batch_size:
        raise UserError(
            f"data.batch_size={batch_size} is more than the {num_images} training images."
        )
    return num_images // batch_size


class TrainBatches(Sampler[Tensor]):
    """A rank's batches of one epoch as index arrays, in the order of `DistributedSampler`.

    The union over ranks of an optimizer step's batches is the same slice of the same permutation
    on any number of ranks. What does not fill an optimizer step at the end of an epoch is dropped.

    Args:
        indices: (N,) rows of the packed images to train on.
        batch_size: images of one optimizer step, over all ranks and accumulated batches.
    """

    def __init__(
        self,
        indices: Tensor,
        batch_size: int,
        rank: int,
        world_size: int,
        accumulate: int,
        seed: int,
    ) -> None:
        self.indices = indices
        self.local = local_batch_size(batch_size, world_size, accumulate)
        self.num_batches = steps_per_epoch(len(indices), batch_size) * accumulate
        positions: Any = range(len(indices))  # only its length matters
        self.order = DistributedSampler(positions, world_size, rank, seed=seed, drop_last=True)

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
