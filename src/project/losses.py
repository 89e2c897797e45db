"""What training and evaluation add up on the device, without waiting for it."""

from typing import NoReturn

import lightning
import torch
import torch.distributed as dist
from torch import Tensor

from project.errors import UserError


class EpochSums:
    """Sums of one epoch on one rank, reduced over ranks once, at its end.

    Every image counts exactly once, which averages of batch averages do not give. A plain object:
    DDP would overwrite registered buffers with those of rank 0.

    Args:
        num_classes: for the confusion matrix.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.confusion = torch.zeros(num_classes**2, dtype=torch.int64, device=device)
        self.num_classes = num_classes

    def add(self, losses: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Counts a batch without waiting for the device; (B,), (B, C), (B,)."""
        self.loss += losses.detach().double().sum()
        cells = labels * self.num_classes + logits.detach().argmax(1)
        self.confusion.scatter_add_(0, cells, torch.ones_like(cells))

    def reduce(self) -> tuple[float, float, int, Tensor]:
        """Sums over all ranks, which must all call this.

        Returns:
            mean loss, accuracy in [0, 1], number of images, and the confusion matrix (C, C) int64
            with a row for each true class. Both means are NaN if there were no images.
        """
        if dist.is_initialized():
            dist.all_reduce(self.loss)
            dist.all_reduce(self.confusion)
        matrix = self.confusion.view(self.num_classes, self.num_classes).cpu()
        count = int(matrix.sum())
        if count == 0:
            return float("nan"), float("nan"), 0, matrix
        return self.loss.item() / count, int(matrix.trace()) / count, count, matrix


class RecentLosses:
    """The losses of the batches since the last look, and whether they are numbers.

    To look is to wait for the device, so only steps that log or save do.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._steps: list[int] = []

    def add(self, loss: Tensor, step: int) -> None:
        """Keeps the loss of a batch, a scalar, and its optimizer step, without waiting."""
        self._losses.append(loss.detach())
        self._steps.append(step)

    def take(self, trainer: lightning.Trainer) -> Tensor:
        """The losses since the last call, each the mean over ranks: (n,), on the CPU.

        All ranks must call this alike.

        Raises:
            UserError: a loss is not finite; the step is named.
        """
        if not self._losses:
            return torch.empty(0)
        losses, steps = torch.stack(self._losses), self._steps
        self._losses, self._steps = [], []
        if dist.is_initialized():
            dist.all_reduce(losses)
            losses /= dist.get_world_size()
        losses = losses.cpu()
        if wrong := (~losses.isfinite()).nonzero().flatten().tolist():
            _refuse(f"the loss of step {steps[wrong[0]]}", trainer)
        return losses

    def check(self, trainer: lightning.Trainer) -> None:
        """Comes before each checkpoint: nothing is saved that is not finite.

        Raises:
            UserError: a loss since the last look, or a weight, is not finite.
        """
        self.take(trainer)
        weights = trainer.lightning_module.parameters()
        sums = torch.stack([weight.detach().double().sum() for weight in weights])
        if not sums.isfinite().all():
            _refuse(f"a weight after step {trainer.global_step}", trainer)


def _refuse(what: str, trainer: lightning.Trainer) -> NoReturn:
    raise UserError(
        f"{what} (epoch {trainer.current_epoch + 1}) is not a finite number. Lower optimizer.lr, "
        f"or set trainer.gradient_clip_val=1.\nEarlier checkpoints of the run are as they were."
    )
