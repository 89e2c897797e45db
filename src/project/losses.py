"""What training and evaluation add up on the device, without waiting for it."""

from typing import NoReturn

import lightning
import torch
import torch.distributed as dist
from torch import Tensor

from project.errors import UserError


class EpochSums:
    """Sums of one epoch on one rank: of losses, of right answers, of images.

    Every image counts exactly once, which averages of batch averages do not give. A plain object:
    DDP would overwrite registered buffers with those of rank 0.
    """

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.correct = torch.zeros((), dtype=torch.int64, device=device)
        self.count = 0

    def add(self, losses: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Counts a batch without waiting for the device; (B,), (B, C), (B,)."""
        self.loss += losses.detach().sum(dtype=torch.float64)
        self.correct += (logits.detach().argmax(1) == labels).sum()
        self.count += labels.shape[0]

    def reduce(self) -> tuple[float, float, int]:
        """Sums over all ranks, which must all call this; changes nothing.

        Returns:
            mean loss, accuracy in [0, 1], number of images. Both means are NaN without images.
        """
        total = self._vector()
        if dist.is_initialized():
            dist.all_reduce(total)
        loss, correct, count = total.tolist()
        if count == 0:
            return float("nan"), float("nan"), 0
        return loss / count, correct / count, int(count)

    def gather(self) -> Tensor:
        """The sums of each rank, (ranks, 3) float64 on the CPU; all ranks must call this."""
        own = self._vector()
        if not dist.is_initialized():
            return own[None].cpu()
        each = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(each, own)
        return torch.stack(each).cpu()

    def restore(self, gathered: Tensor) -> None:
        """Takes up this rank's sums from `gather`, of another number of ranks rank 0 all."""
        rank, world_size = 0, 1
        if dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
        if len(gathered) != world_size:
            gathered = torch.cat([gathered.sum(0, keepdim=True), gathered.new_zeros(rank, 3)])
        loss, correct, count = gathered[rank].tolist()
        self.loss.fill_(loss)
        self.correct.fill_(int(correct))
        self.count = int(count)

    def _vector(self) -> Tensor:
        count = torch.full_like(self.loss, self.count)
        return torch.stack([self.loss, self.correct.double(), count])  # exact below 2**53


class Confusion:
    """Counts of an evaluation on one rank: how often each true class was taken for which.

    Args:
        num_classes: rows and columns.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.cells = torch.zeros(num_classes**2, dtype=torch.int64, device=device)
        self.num_classes = num_classes

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Counts a batch without waiting for the device; (B, C), (B,)."""
        cells = labels * self.num_classes + logits.detach().argmax(1)
        self.cells.scatter_add_(0, cells, torch.ones_like(cells))

    def reduce(self) -> Tensor:
        """Over all ranks, which must all call this: (C, C) int64, a row for each true class."""
        if dist.is_initialized():
            dist.all_reduce(self.cells)
        return self.cells.view(self.num_classes, self.num_classes).cpu()


class RecentLosses:
    """The losses of the batches since the last look, and whether they are numbers.

    To look is to wait for the device, so only steps that log or save do.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._batches: list[int] = []

    def add(self, loss: Tensor, batch_idx: int) -> None:
        """Keeps the loss of a batch, a scalar, and its number in the epoch, without waiting."""
        self._losses.append(loss.detach())
        self._batches.append(batch_idx)

    def take(self, trainer: lightning.Trainer) -> Tensor:
        """The losses since the last call, each the mean over ranks: (n,), on the CPU.

        All ranks must call this alike, and in each epoch.

        Raises:
            UserError: a loss is not finite; the step is named.
        """
        if not self._losses:
            return torch.empty(0)
        losses, batches = torch.stack(self._losses), self._batches
        self._losses, self._batches = [], []
        if trainer.world_size > 1:
            dist.all_reduce(losses)
            losses /= trainer.world_size
        losses = losses.cpu()
        if wrong := (~losses.isfinite()).nonzero().flatten().tolist():
            accumulate = trainer.accumulate_grad_batches
            steps_per_epoch = int(trainer.num_training_batches) // accumulate
            step = trainer.current_epoch * steps_per_epoch + batches[wrong[0]] // accumulate + 1
            _refuse(f"the loss of step {step}", trainer)
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
