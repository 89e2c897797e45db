"""The one agreement between ranks: at a step that all of them know, go on, save, or stop."""

import time

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
        every_minutes: a save is due; the clock of the slowest rank decides.
    """

    def __init__(self, step: int, every_minutes: float | None) -> None:
        self.every_minutes = every_minutes
        self._next = step + 1
        self._step, self._time = step, time.monotonic()
        self._saved = self._time

    def is_due(self, step: int) -> bool:
        """Whether the ranks speak after this step; costs a comparison."""
        return step >= self._next

    def reach(self, step: int) -> tuple[bool, int]:
        """Speaks with the other ranks, which must all call this after the same step.

        Returns:
            whether to save, and the signal that asks to stop (0: go on).
        """
        now = time.monotonic()
        a_step = (now - self._time) / max(step - self._step, 1)
        is_old = self.every_minutes is not None and now - self._saved >= 60 * self.every_minutes
        votes = torch.tensor([signals.requested(), is_old, a_step], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(votes, dist.ReduceOp.MAX)  # on the CPU: by gloo, no device waits
        request, save, a_step = votes.tolist()
        self._next = step + max(1, int(SECONDS_BETWEEN / max(a_step, 1e-6)))
        self._step, self._time = step, now
        return bool(save), int(request)

    def saved(self) -> None:
        """Starts the minutes anew."""
        self._saved = time.monotonic()
