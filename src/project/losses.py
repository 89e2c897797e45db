"""Losses that wait on the device until somebody looks at them."""

from typing import NoReturn

import lightning
import torch
import torch.distributed as dist
from torch import Tensor

from project.errors import UserError


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
