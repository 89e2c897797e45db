"""Small networks, each with a trait of its own."""

import random
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchvision.datasets import ImageFolder

from project.sources import Listing, decode


class Plain(nn.Module):
    """Without batch statistics and kinks: other ranks or threads change only the rounding."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 5, stride=2)
        self.head = nn.Linear(width * 14 * 14, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.conv(images).tanh()
        return self.head(hidden.view(hidden.size(0), -1))  # as tutorials do; 0 images fail here


class Reading(Plain):
    """Asks for a value at each step."""

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        return logits if logits.sum().item() else logits + 1


class Rich(nn.Module):
    """With what a network may remember: batch statistics, and draws of three generators."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 5, stride=2)
        self.norm = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width * 14 * 14, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(self.conv(images)).relu()
        if self.training:
            hidden = hidden * (0.5 + random.random() * np.random.rand())
        return self.head(self.dropout(hidden.flatten(1)))


class Twice(nn.Module):
    """Uses a weight twice, which autocast may convert once or twice."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 32 * 32, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1)).tanh()
        return self.head(self.hidden(self.hidden(hidden).tanh()).tanh())


class Loud(Plain):
    """Whose gradient is too large for half precision, until the loss is scaled down."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * 100


def some_of_folder(root: Path, split: str, image_size: int, *, num_test: int) -> Listing:
    """An image folder with fewer images to test, evenly spaced."""
    dataset = ImageFolder(root / split)
    samples = spaced(dataset.samples, num_test) if split == "test" else dataset.samples
    images = (decode(path, image_size) for path, _ in samples)
    return Listing([label for _, label in samples], dataset.classes, images)


def spaced(items: list, count: int) -> list:
    """So many of them, evenly spaced."""
    return [items[i * len(items) // count] for i in range(count)]


class Countdown(Callback):
    """Publishes a metric that falls at each validation."""

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.publish({"val/countdown": float(-trainer.global_step)})
