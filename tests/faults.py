"""Callbacks that make one rank fail in training."""

import os
import signal
import warnings
from pathlib import Path

from lightning.pytorch.callbacks import Callback

from project import agreement
from project.errors import UserError


class Fault(Callback):
    """Fails on `rank` after each of `steps`; `how` names a method.

    once: only the first time that the run comes there.
    """

    def __init__(self, rank: int, steps: list[int], how: str, once: bool = False) -> None:
        self.rank, self.steps, self.how, self.once = rank, steps, how, once
        if how == "ask":
            agreement.SECONDS_BETWEEN = 0.0  # the ranks speak after each step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.weight = next(pl_module.parameters()).data
        if trainer.global_rank == self.rank and trainer.global_step in self.steps:
            struck = Path(trainer.default_root_dir) / "ranks" / f"struck-{trainer.global_step}"
            if not (self.once and struck.exists()):
                struck.touch()
                getattr(self, self.how)()

    def exception(self) -> None:
        raise ArithmeticError("injected")

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def mistake(self) -> None:
        raise UserError("injected")

    def vanish(self) -> None:
        os._exit(0)

    def ask(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def poison(self) -> None:
        self.weight.fill_(float("nan"))

    def nothing(self) -> None:
        pass


class BadLoss(Callback):
    """Makes the loss of one step NaN."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step + 1 == self.step:
            batch[0].fill_(float("nan"))


class BadWeight(BadLoss):
    """Makes a weight infinite after one step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            next(pl_module.parameters()).data.view(-1)[0] = float("inf")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        pass


class Warns(Callback):
    """Warns at every step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        warnings.warn("this matters", stacklevel=1)


class Asks(Callback):
    """Gets SIGTERM after one step, on the last rank alone."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        self.step, self.number = step, number
        agreement.SECONDS_BETWEEN = 0.0  # the ranks speak after each step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        is_last = trainer.global_rank == trainer.world_size - 1
        is_boundary = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if is_last and is_boundary and trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)
