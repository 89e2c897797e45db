"""Where images come from: each function lists one split of a dataset, ready to be packed.

A source is any function `source(root, split, image_size)` that returns `Listing`: your own needs
one function and one line of YAML (`source._target_`).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms import functional as TF

from project.errors import UserError
from project.heartbeat import while_growing


class Listing(NamedTuple):
    """One split: labels, class names, and the images in the same order."""

    labels: list[int]
    classes: list[str]
    images: Iterable[Any]  # arrays or PIL images, (image_size, image_size, 3) uint8, made lazily


def cifar10(root: Path, split: str, image_size: int) -> Listing:
    """CIFAR-10, downloaded to `root` on first use (170 MB) and checked against its MD5 sums.

    Raises:
        UserError: no network and no files, or an image size other than 32.
    """
    if image_size != 32:
        raise UserError(f"data.image_size={image_size}: CIFAR-10 has images of 32 pixels.")
    try:
        with while_growing(root / CIFAR10.filename):
            dataset = CIFAR10(root, train=split == "train", download=True)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"CIFAR-10 is not in {root} and cannot be downloaded ({error}).\n"
            f"Unpack {CIFAR10.url} there by hand, or start with experiment=quickstart."
        ) from error
    return Listing(dataset.targets, dataset.classes, dataset.data)


def imagefolder(root: Path, split: str, image_size: int) -> Listing:
    """Image files `root/train/<class>/*` and `root/test/<class>/*`, classes in sorted order.

    Images of another size are resized along the shorter side (bilinear, antialiased) and cropped
    to the centre square.

    Raises:
        UserError: a folder is missing or empty, or an image cannot be decoded.
    """
    try:
        dataset = ImageFolder(root / split)
    except OSError as error:
        raise UserError(
            f"data.root={root} lacks images: expected {root / split}/<class>/*.jpg ({error})."
        ) from error
    paths = [path for path, _ in dataset.samples]
    return Listing(dataset.targets, dataset.classes, (decode(path, image_size) for path in paths))


def decode(path: str, image_size: int) -> Image.Image:
    """Reads one image file as RGB, `image_size` pixels square."""
    try:
        with Image.open(path) as file:
            # Pillow would cut the 16 bits of a coloured PNG to 8 without a word.
            if file.mode.startswith(("I", "F")) or any(";16" in str(t[3]) for t in file.tile):
                raise ValueError(f"more than 8 bits a channel, mode {file.mode}")
            image = file.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{path} cannot be decoded as an image ({error}). Replace or remove it."
        ) from error
    if image.size == (image_size, image_size):
        return image
    return TF.center_crop(TF.resize(image, image_size), [image_size, image_size])  # type: ignore


SHAPES = ["disc", "square", "triangle", "diamond", "cross"]
SHAPES += ["ring", "frame", "heart", "crescent", "star"]


def shapes(
    root: Path, split: str, image_size: int, *, num_train: int, num_test: int, seed: int
) -> Listing:
    """Ten classes of drawn shapes of random position, size, colour, background and noise.

    Needs no download: the offline stand-in for CIFAR-10. The images follow from `seed` and `split`
    alone; `root` is only where they are packed.
    """
    num_images = num_train if split == "train" else num_test
    rng = np.random.default_rng([seed, split == "train"])
    labels = np.arange(num_images) % len(SHAPES)
    size = rng.uniform(0.2, 0.4, num_images) * image_size
    centre = rng.uniform(0.3, 0.7, (2, num_images)) * image_size
    pixels = np.arange(image_size) + 0.5
    y, x = ((pixels - c[:, None]) / size[:, None] for c in centre)
    inside = np.empty((num_images, image_size, image_size, 1), bool)
    for label, shape in enumerate(SHAPES):
        rows = labels == label
        inside[rows, ..., 0] = _inside(shape, x[rows, None, :], y[rows, :, None])
    background = rng.integers(0, 256, (num_images, 1, 1, 3), dtype=np.int16)
    contrast = rng.integers(64, 192, background.shape, dtype=np.int16)  # no shape is invisible
    images = np.where(inside, (background + contrast) % 256, background)
    images += rng.integers(-40, 41, images.shape, dtype=np.int16)
    return Listing(labels.tolist(), SHAPES, images.clip(0, 255).astype(np.uint8))


def _inside(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Whether points lie in a shape; (n, 1, W), (n, H, 1) -> (n, H, W), the shape about ±1 wide."""
    x, y = x.astype(np.float32), y.astype(np.float32)
    radius, largest = np.hypot(x, y), np.maximum(np.abs(x), np.abs(y))
    return {
        "disc": lambda: radius < 0.95,
        "square": lambda: largest < 0.85,
        "triangle": lambda: (y < 0.8) & (np.abs(x) < (y + 1) * 0.6),
        "diamond": lambda: np.abs(x) + np.abs(y) < 1.1,
        "cross": lambda: (largest < 1) & (np.minimum(np.abs(x), np.abs(y)) < 0.3),
        "ring": lambda: (radius < 1) & (radius > 0.55),
        "frame": lambda: (largest < 0.9) & (largest > 0.5),
        "heart": lambda: x**2 + (-y * 1.1 - np.abs(x) * 0.8 + 0.1) ** 2 < 0.7,
        "crescent": lambda: (radius < 1) & (np.hypot(x - 0.5, y) > 0.8),
        "star": lambda: radius < 0.7 + 0.35 * np.cos(5 * np.arctan2(x, -y)),
    }[shape]()
