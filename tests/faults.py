"""Callbacks that make one rank fail in training."""

import os
import signal

from lightning.pytorch.callbacks import Callback


class Fault(Callback):
    """Fails on `rank` after `step` steps: how = exception | kill | vanish."""

    def __init__(self, rank: int, step: int, how: str) -> None:
        self.rank, self.step, self.how = rank, step, how

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            getattr(self, self.how)()

    def exception(self) -> None:
        raise ArithmeticError("injected")

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def vanish(self) -> None:
        os._exit(0)
