"""The files of a pack: written whole, with sizes and checksums beside them."""

import itertools
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from project.errors import UserError
from project.heartbeat import beat

Source = Callable[[Path, str, int], Any]  # (root, split, image_size) -> sources.Listing

SUMS = "checksums.json"
LARGE = 2**30  # bytes; below, a checksum takes less than a second


def damage(folder: Path) -> str | None:
    """What is wrong with the files of a pack: a size or a CRC-32; None if nothing is.

    A large file that is as old and as long as when it was written is trusted.
    """
    try:
        sums = json.loads((folder / SUMS).read_text("utf-8"))
        if {*sums} != {"images.npy", "labels.npy", "classes.json"}:
            return f"{folder / SUMS} is not of a pack"
        for name, (size, checksum, time) in sums.items():
            path, stat = folder / name, (folder / name).stat()
            if stat.st_size != size:
                return f"{path} has {stat.st_size} bytes, not {size}"
            is_known = size > LARGE and stat.st_mtime_ns == time
            if not is_known and _checksum(path) != checksum:
                return f"the checksum of {path} is another"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{folder} cannot be read ({error})"
    return None


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while part := file.read(2**24):
            value = zlib.crc32(part, value)
            beat()
    return value


def _pixels(image: Any, image_size: int, number: int) -> np.ndarray:
    array = np.asarray(image)
    if array.dtype != np.uint8 or array.shape != (image_size, image_size, 3):
        raise UserError(
            f"image {number} of the source is {array.dtype} {array.shape}, "
            f"not uint8 {(image_size, image_size, 3)}."
        )
    return array


def write_pack(source: Source, root: Path, split: str, image_size: int, folder: Path) -> None:
    """Decodes a split into a folder, which appears complete or not at all; any other goes.

    Raises:
        UserError: the source is not there, or not what it should be.
    """
    labels, classes, images = source(root, split, image_size)
    labels = np.asarray(labels, np.int64)
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
        raise UserError(f"{root}: labels {labels.min()} to {labels.max()}, {len(classes)} classes.")
    shape = (len(labels), 3, image_size, image_size)
    part = folder.with_name(f"{folder.name}.part")
    _remove(part)  # of a packer that was killed; we hold its lock
    part.mkdir()
    try:
        packed = np.lib.format.open_memmap(part / "images.npy", "w+", np.uint8, shape)
        for number, (row, image) in enumerate(itertools.zip_longest(packed, images)):
            if row is None or image is None:
                raise UserError(f"{root}: {len(labels)} labels are not as many as the images.")
            row[:] = _pixels(image, image_size, number).transpose(2, 0, 1)
            beat()
        packed.flush()
        np.save(part / "labels.npy", labels)
        (part / "classes.json").write_text(json.dumps(list(classes)), "utf-8")
        sums = {path.name: _sums(path) for path in sorted(part.iterdir())}
        (part / SUMS).write_text(json.dumps(sums), "utf-8")
        _remove(folder)  # damaged; who has mapped it, keeps it
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _remove(path: Path) -> None:
    """Whatever lies there."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _sums(path: Path) -> tuple[int, int, int]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    stat = path.stat()
    return stat.st_size, _checksum(path), stat.st_mtime_ns
