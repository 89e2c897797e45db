"""Pictures of a run: learning curves, confusion matrix, the most confident mistakes."""

import math
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.utilities.plot import plot_confusion_matrix

from project.files import write_atomically

NUM_MISTAKES = 36


class Pictures(Callback):
    """Writes `plots/curves.png` after training; `confusion.png` and `mistakes.png` after a test.

    Args:
        folder: of the run; rank 0 writes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "plots"

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Draws the history so far."""
        record: Any = trainer.checkpoint_callback
        if trainer.is_global_zero and record.history:
            _save(curves(record.history), self.folder / "curves.png")

    def on_test_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Begins to collect mistakes: confidence, row, predicted and true label of each."""
        self._mistakes = torch.empty(0, 4, dtype=torch.float64)

    def on_test_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keeps the most confident mistakes of this rank; `outputs` are logits (B, C)."""
        _, labels, rows = batch
        confidence, predicted = outputs.double().softmax(1).max(1)
        found = torch.stack([confidence, rows, predicted, labels], 1)[predicted != labels]
        self._mistakes = _most_confident([self._mistakes, found.cpu()])

    def on_test_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Brings the ranks' mistakes together and draws; all ranks take part."""
        found: list[Any] = [None] * trainer.world_size
        if dist.is_initialized():
            dist.all_gather_object(found, self._mistakes)
        else:
            found = [self._mistakes]
        if not trainer.is_global_zero:
            return
        images: Any = trainer.datamodule.test_images  # type: ignore[attr-defined]
        _save(confusion(pl_module.confusion, images.classes), self.folder / "confusion.png")
        mistakes_ = mistakes(_most_confident(found), images)
        _save(mistakes_, self.folder / "mistakes.png")


def curves(history: list[dict[str, Any]]) -> Figure:
    """Loss and accuracy of each epoch; the epoch of the best val/acc is marked."""
    figure = Figure(figsize=(10, 4))
    figure.subplots_adjust(0.07, 0.13, 0.98, 0.96)
    scored = [row for row in history if row.get("val/acc", math.nan) >= 0]  # not NaN
    best = max(scored, key=lambda row: row["val/acc"], default={})
    for axes, name in zip(figure.subplots(1, 2), ("loss", "acc"), strict=True):
        for stage in "train", "val":
            points = [(r["epoch"], r[f"{stage}/{name}"]) for r in history if f"{stage}/{name}" in r]
            if points:
                axes.plot(*zip(*points, strict=True), marker=".", label=stage)
        if f"val/{name}" in best:
            axes.axvline(best["epoch"], color="grey", linestyle=":")
            label = f"best, epoch {best['epoch']}: {best[f'val/{name}']:.4f}"
            axes.plot(best["epoch"], best[f"val/{name}"], "k*", markersize=10, label=label)
        axes.set(xlabel="epoch", ylabel={"loss": "loss", "acc": "accuracy"}[name])
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def confusion(matrix: Tensor, classes: list[str]) -> Figure:
    """The confusion matrix (C, C) of the test, as torchmetrics draws it."""
    side = min(max(5.0, 0.75 * len(classes)), 15.0)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes, labels = figure.subplots(), [*classes]
    plot_confusion_matrix(matrix, axes, len(classes) <= 20, labels)  # type: ignore[arg-type]
    if len(classes) > 50:  # nobody could read them
        axes.set(xticks=[], yticks=[])
    return figure


def mistakes(found: Tensor, images: Any) -> Figure:
    """A sheet of images with true and predicted class and the confidence in the latter.

    Args:
        found: (n, 4) confidence, row, predicted label, true label.
        images: the test split.
    """
    columns = max(math.ceil(math.sqrt(len(found))), 3)
    rows = max(math.ceil(len(found) / columns), 1)
    figure = Figure(figsize=(1.5 * columns, 2 * rows + 0.4))
    figure.suptitle("most confident mistakes" if len(found) else "no mistakes")
    axes = figure.add_axes((0, 0, 1, 2 * rows / (2 * rows + 0.4)))  # one for all: 36 take seconds
    axes.set_axis_off()
    for place, (confidence, *numbers) in enumerate(found.tolist()):
        row, predicted, label = map(int, numbers)
        y, x = divmod(place, columns)
        title = f"{images.classes[label]}\nas {images.classes[predicted]}\n{confidence:.1%}"
        axes.text(x + 0.5, y + 0.26, title, ha="center", va="bottom", fontsize=8)
        corners = (x + 0.04, x + 0.96, y + 0.98, y + 0.29)
        axes.imshow(images.images[row].transpose(1, 2, 0), extent=corners)
    axes.set(xlim=(0, columns), ylim=(rows, 0), aspect="auto")
    return figure


def _most_confident(found: list[Tensor]) -> Tensor:
    """At most `NUM_MISTAKES`; of equal confidence, the earlier row first."""
    joined = torch.cat(found)
    joined = joined[joined[:, 1].argsort(stable=True)]
    return joined[joined[:, 0].argsort(descending=True, stable=True)][:NUM_MISTAKES]


def _save(figure: Figure, path: Path) -> None:
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=110))
