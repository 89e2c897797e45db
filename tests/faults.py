"""Callbacks that make one rank fail."""

import os
import signal
import sys
import time
import warnings
from pathlib import Path

from lightning.pytorch.callbacks import Callback

from project import agreement, signals
from project.errors import UserError


class Faults(Callback):
    """What can happen to a rank."""

    def exception(self) -> None:
        raise ArithmeticError("injected")

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def mistake(self) -> None:
        raise UserError("injected")

    def vanish(self) -> None:
        os._exit(0)

    def leave(self) -> None:
        sys.exit(3)

    def sleep(self) -> None:
        time.sleep(1000)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def ask(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def hold(self) -> None:
        """Stays where it is until a request has come, which somebody else sends."""
        until = time.monotonic() + 3
        while not signals.requested() and time.monotonic() < until:
            time.sleep(0.01)


class Strike(Faults):
    """Strikes `rank` in one phase of a run, once; `how` names a method."""

    def __init__(self, rank: int, phase: str, how: str) -> None:
        self.rank, self.phase, self.how = rank, phase, how

    def strike(self, trainer, phase: str) -> None:
        if trainer.global_rank == self.rank and self.phase == phase:
            struck = Path(trainer.default_root_dir) / "ranks" / "struck"
            if not struck.exists():
                struck.touch()
                getattr(self, self.how)()

    def setup(self, trainer, pl_module, stage) -> None:
        if stage == "fit":
            self.strike(trainer, "set-up")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == 5:
            self.strike(trainer, "training")

    def on_validation_batch_start(self, trainer, *args, **kwargs) -> None:
        if not trainer.sanity_checking:
            self.strike(trainer, "validation")

    def on_save_checkpoint(self, trainer, pl_module, checkpoint) -> None:
        """On rank 0 in the midst of the writing, which is its business alone."""
        fsync = os.fsync

        def strike(number: int) -> None:
            os.fsync = fsync
            self.strike(trainer, "saving")
            fsync(number)

        if self.rank == 0:
            os.fsync = strike
        else:
            self.strike(trainer, "saving")

    def on_test_batch_start(self, trainer, *args, **kwargs) -> None:
        self.strike(trainer, "test")


class Fault(Faults):
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
    """Gets SIGTERM after one step, on the last rank alone.

    inside: in the validation that follows, after its first batch, which all ranks have.
    """

    def __init__(self, step: int, number: int = signal.SIGTERM, inside: bool = False) -> None:
        self.step, self.number, self.inside = step, number, inside
        agreement.SECONDS_BETWEEN = 0.0  # the ranks speak after each step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        is_last = trainer.global_rank == trainer.world_size - 1
        is_boundary = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if is_last and is_boundary and trainer.global_step == self.step and not self.inside:
            os.kill(os.getpid(), self.number)

    def on_validation_batch_end(self, trainer, *args, **kwargs) -> None:
        is_last = trainer.global_rank == trainer.world_size - 1
        if is_last and trainer.global_step == self.step and self.inside:
            os.kill(os.getpid(), self.number)
