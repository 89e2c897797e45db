"""Images as uint8 arrays: packed once, mapped by every rank, fetched by index."""

import contextlib
import fcntl
import hashlib
import inspect
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from project.errors import UserError

log = logging.getLogger(__package__)

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
    try:
        return _pack(source, root, split, image_size)
    except PermissionError as error:
        raise UserError(f"data.root={root}: {error.strerror}, {error.filename}") from error


def _pack(source: Source, root: Path, split: str, image_size: int) -> PackedImages:
    name = f"{_identity(source, root, split, image_size)}-{split}"
    if (root / ".packed" / name).exists():  # perhaps where nothing can be written any more
        return PackedImages(root / ".packed" / name)
    packs = pack_folder(root)
    folder = packs / name
    if not folder.exists():
        log.info("reading the %s images of %s, to be packed once", split, root)
        with _locked(packs / f"{folder.name}.lock"):
            if not folder.exists():
                _write_pack(source, root, split, image_size, folder)
    return PackedImages(folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock file `path`, in a folder made for it; a user's mistake clears both away.

    So a mistyped root leaves no trace. Only the holder clears, and whoever waited for a file that
    was cleared away holds a lock on nothing and tries again: two never hold it at a time.
    """
    attempts = 0
    while True:
        missing = [folder for folder in path.parents if not folder.exists()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
        except (FileNotFoundError, FileExistsError):  # the folder was cleared away meanwhile
            attempts += 1
            if attempts == 100:
                raise
            continue
        fcntl.flock(file, fcntl.LOCK_EX)
        if _lies_at(path, file):
            break
        file.close()
    with file:
        try:
            yield
        except UserError:
            path.unlink()
            with contextlib.suppress(OSError):  # not empty: somebody else's
                for folder in dict.fromkeys([path.parent, *missing]):
                    folder.rmdir()
            raise


def _lies_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def pack_folder(root: Path) -> Path:
    """`root/.packed`, or a folder of the user's cache where that cannot be written."""
    parents = [root / ".packed", root, *root.absolute().parents]
    parent = next(path for path in parents if os.path.lexists(path))
    if not parent.is_dir():
        raise UserError(f"data.root={root}: {parent} is not a folder.")
    if os.access(parent, os.W_OK):
        return root / ".packed"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.blake2b(bytes(root.resolve()), digest_size=8).hexdigest()
    return cache / str(__package__) / name


def _identity(source: Source, root: Path, split: str, image_size: int) -> str:
    function, arguments = getattr(source, "func", source), getattr(source, "keywords", {})
    folders = sorted((root / split).glob("*/"))
    parts = [
        function.__module__,
        inspect.getsource(inspect.getmodule(function) or function),
        sorted(arguments.items()),
        [(folder.name, folder.stat().st_mtime_ns) for folder in folders],
    ]
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()
    return f"{function.__name__}-{image_size}-{digest}"


def _pixels(image: Any, image_size: int, number: int) -> np.ndarray:
    array = np.asarray(image)
    if array.dtype != np.uint8 or array.shape != (image_size, image_size, 3):
        raise UserError(
            f"image {number} of the source is {array.dtype} {array.shape}, "
            f"not uint8 {(image_size, image_size, 3)}."
        )
    return array


def _write_pack(source: Source, root: Path, split: str, image_size: int, folder: Path) -> None:
    labels, classes, images = source(root, split, image_size)
    labels = np.asarray(labels, np.int64)
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
        raise UserError(f"{root}: labels {labels.min()} to {labels.max()}, {len(classes)} classes.")
    shape = (len(labels), 3, image_size, image_size)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a packer that was killed; we hold its lock
    part.mkdir()
    try:
        packed = np.lib.format.open_memmap(part / "images.npy", "w+", np.uint8, shape)
        for number, (row, image) in enumerate(itertools.zip_longest(packed, images)):
            if row is None or image is None:
                raise UserError(f"{root}: {len(labels)} labels are not as many as the images.")
            row[:] = _pixels(image, image_size, number).transpose(2, 0, 1)
        packed.flush()
        np.save(part / "labels.npy", labels)
        (part / "classes.json").write_text(json.dumps(list(classes)), "utf-8")
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
