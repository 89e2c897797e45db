"""Images as uint8 arrays: packed once, mapped by every rank, fetched by index."""

import contextlib
import fcntl
import hashlib
import inspect
import json
import logging
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from project import heartbeat
from project.errors import UserError
from project.pack_files import Source, damage, write_pack

log = logging.getLogger(__package__)

SECONDS_BETWEEN = 0.1  # two tries for a lock


class PackedImages(Dataset):
    """One split of a dataset, mapped read-only from the files that `pack` wrote.

    Attributes:
        images: (N, 3, H, W) uint8, mapped, so that all ranks share one copy in the page cache.
        labels: (N,) int64, the same.
        classes: names, in the order of the labels.
    """

    def __init__(self, folder: Path) -> None:
        self.images = np.load(folder / "images.npy", mmap_mode="r")
        # "c": torch wants to be able to write. Not for images, since Linux puts such a mapping on
        # the account of each rank: 30 GB were refused.
        self.labels = torch.from_numpy(np.load(folder / "labels.npy", mmap_mode="c"))
        self._there: tuple[Tensor, Tensor] | None = None  # copies of both on a device
        self.classes: list[str] = json.loads((folder / "classes.json").read_text("utf-8"))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A batch by index array (B,): images (B, 3, H, W) uint8, labels (B,), and the index."""
        return torch.from_numpy(self.images[index.numpy()]), self.labels[index], index

    def on(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same by rows on a device, whose memory holds a copy from then on (none on a CPU)."""
        if rows.device.type == "cpu":
            return self[rows]
        if self._there is None or self._there[0].device != rows.device:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the mapped array must not be written
                images = torch.from_numpy(self.images).to(rows.device)
            self._there = images, self.labels.to(rows.device)
        images, labels = self._there
        return images.index_select(0, rows), labels[rows], rows


class Rows(Dataset[Tensor]):
    """Index arrays as they come, for `count` images that are where they are needed already."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Tensor) -> Tensor:
        return index


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
    beside = root / ".packed" / name  # perhaps where nothing can be written any more
    if beside.exists() and not damage(beside):
        return PackedImages(beside)
    folder = pack_folder(root) / name
    wrong = damage(folder) if os.path.lexists(folder) else None
    if wrong or not folder.exists():
        if wrong:
            log.warning("%s: packed anew", wrong)
        often = "anew" if wrong else "once"
        log.info("reading the %s images of %s, to be packed %s", split, root, often)
        lock = folder.with_name(f"{name}.lock")
        with _locked(lock), heartbeat.shown_at(lock):
            wrong = damage(folder) if os.path.lexists(folder) else None
            if wrong or not folder.exists():
                _write(source, root, split, image_size, folder, wrong)
    return PackedImages(folder)


def _write(
    source: Source, root: Path, split: str, image_size: int, folder: Path, wrong: str | None
) -> None:
    try:
        write_pack(source, root, split, image_size, folder)
    except UserError as error:
        raise UserError(f"{wrong}, and cannot be made anew: {error}" if wrong else error) from error


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
        _wait_for(path, file)
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


def _wait_for(path: Path, file: IO[str]) -> None:
    """Takes a lock; meanwhile this rank is as alive as the packer that holds it."""
    seen = 0.0
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            shown = os.fstat(file.fileno()).st_mtime
            if shown != seen:
                seen = shown
                heartbeat.beat()
        time.sleep(SECONDS_BETWEEN)  # a blocking wait would show no sign of life


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
