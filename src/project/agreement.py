"""The one agreement between ranks: at a step that all of them know, go on, save, or stop."""

import time
from typing import Any

import torch
import torch.distributed as dist

from project import signals

SECONDS_BETWEEN = 0.5


class Agreement:
    """Lets all ranks decide alike, twice a second, for next to nothing.

    Every rank computes from the speed that was agreed last at which optimizer step it will speak
    next; so there is nothing to wait for and no message in between. It takes the place of every
    other agreement (Lightning 2.6.6 broadcasts before each step whether a SIGTERM has come).

    Args:
        step: optimizer steps done so far.
        every_n_steps: a save is due; null for never.
        every_minutes: the same; the clock that is ahead decides.

    Attributes:
        is_save_due: whether all ranks have found so, and nobody has saved since.
        request: the signal that asks the run to stop, 0 for none.
    """

    def __init__(self, step: int, every_n_steps: int | None, every_minutes: float | None) -> None:
        self.every_n_steps, self.every_minutes = every_n_steps, every_minutes
        self.is_save_due, self.request = False, 0
        self._next = step + 1
        self._step, self._time = step, time.monotonic()
        self._saved = self._time

    def look(self, step: int) -> None:
        """Comes after each optimizer step, and mostly costs a comparison."""
        if self.every_n_steps and step % self.every_n_steps == 0:
            self.is_save_due = True
        if step >= self._next:
            self.speak(step)

    def speak(self, step: int) -> None:
        """Asks the other ranks, which must all call this after the same step."""
        now = time.monotonic()
        a_step = (now - self._time) / max(step - self._step, 1)
        is_old = self.every_minutes is not None and now - self._saved >= 60 * self.every_minutes
        votes = torch.tensor([signals.requested(), is_old, a_step], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(votes, dist.ReduceOp.MAX)  # on the CPU: by gloo, no device waits
        request, is_old, a_step = votes.tolist()
        self.is_save_due |= bool(is_old)
        self.request = self.request or int(request)
        self._next = step + max(1, int(SECONDS_BETWEEN / max(a_step, 1e-6)))
        self._step, self._time = step, now

    def saved(self) -> None:
        """Starts the minutes anew."""
        self.is_save_due, self._saved = False, time.monotonic()


class ValidationAgreement(Agreement):
    """The same inside a validation, after batches that no rank lacks.

    Not where `trainer.max_steps` is reached: from there Lightning goes on with nothing.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(0, None, None)
        self._batch, common = 0, torch.tensor(trainer.num_val_batches[0])
        if dist.is_initialized():
            dist.all_reduce(common, dist.ReduceOp.MIN)
        is_last = trainer.global_step == trainer.max_steps
        self._num_batches = 0 if is_last or trainer.sanity_checking else int(common)

    def is_due(self) -> bool:
        """Comes after each batch; whether all ranks are to stop."""
        self._batch += 1
        if self._batch <= self._num_batches:
            self.look(self._batch)
        return self.request > 0
