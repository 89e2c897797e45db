"""What a person sees, a logger gets, and a watch finds, while a run trains."""

import logging
import math
import shutil
import sys
import time
from datetime import timedelta
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore
from tqdm import tqdm

from project.heartbeat import beat

log = logging.getLogger(__package__)

SECONDS_BETWEEN = 0.3  # two refreshments of the bar


class Progress(Callback):
    """A bar on a terminal; elsewhere a line every `trainer.log_every_n_steps` optimizer steps.

    At those steps loss, learning rate and images a second also go to the loggers, as step/loss,
    step/lr and step/images_per_second. The loss is that of the global batch, over all ranks; it is
    read from the device at those steps only, and the bar shows the latest. Images a second leave
    validation out, the time left does not.

    Each batch leaves a sign of life (see `project.heartbeat`).
    """

    _bar: tqdm | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Counts from here: a continued training is not faster than it is."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._num_steps, self._batch_size = data.num_steps(), data.batch_size
        steps_per_epoch = trainer.num_training_batches // trainer.accumulate_grad_batches
        self._num_epochs = math.ceil(self._num_steps / steps_per_epoch)
        self._first_step = self._shown_step = trainer.global_step
        self._started, self._due, self._loss = time.monotonic(), 0.0, "-"
        if self._first_step:
            log.info("going on from step %d of %d", self._first_step, self._num_steps)
            _hide_later_steps(trainer)
        if trainer.is_global_zero and sys.stdout.isatty():
            # Rows and columns are given, since some terminals have none (0 × 0) and get no bar.
            size: dict[str, Any] = {"ncols": _num_columns(), "nrows": 20}
            shape = "{desc} |{bar}|"
            self._bar = tqdm(total=self._num_steps, file=sys.stdout, bar_format=shape, **size)
        beat(trainer.global_step, "training")
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Begins to count images a second."""
        self._epoch_started, self._epoch_step = time.monotonic(), trainer.global_step

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Looks at step and clock, and mostly returns."""
        step, every = trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]
        beat(step)
        if every and step % every == 0 and step != self._shown_step:
            self._shown_step = step
            self._log_step(trainer, pl_module)
        if self._bar is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + SECONDS_BETWEEN
            self._bar.n = step
            self._bar.ncols = _num_columns()
            self._bar.set_description_str(self._line(trainer))

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Another phase."""
        beat(phase="validation")

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """A sign of life."""
        beat()

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Back to training, or to an end."""
        beat(phase="training" if trainer.state.fn == TrainerFn.FITTING else None)

    def on_test_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Another phase."""
        beat(phase="test")

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """A sign of life."""
        beat()

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Clears the bar away, and tells of an early stop."""
        self._clear()
        if trainer.global_step < self._num_steps:
            log.info("stopped early, at step %d of %d", trainer.global_step, self._num_steps)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Clears the bar away, so that a message stands on a line of its own."""
        self._clear()

    def _clear(self) -> None:
        if self._bar is not None:
            self._bar.leave = False
            self._bar.close()
            self._bar = None

    def _log_step(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        losses = pl_module.losses.take(trainer)  # over all ranks, which are all here
        loss = losses[-trainer.accumulate_grad_batches :].mean().item()
        self._loss = f"{loss:.4f}"
        log.info(self._line(trainer), extra={"on_bar": self._bar is not None})
        values = {
            "loss": loss,
            "lr": _rate(trainer),
            "images_per_second": self._speed(trainer),
        }
        for logger in trainer.loggers:
            logger.log_metrics({f"step/{k}": v for k, v in values.items()}, trainer.global_step)

    def _line(self, trainer: lightning.Trainer) -> str:
        step = trainer.global_step
        done = (step - self._first_step) / (time.monotonic() - self._started)
        left = str(timedelta(seconds=round((self._num_steps - step) / max(done, 1e-9))))
        return (
            f"epoch {trainer.current_epoch + 1}/{self._num_epochs}  step {step}/{self._num_steps}  "
            f"loss {self._loss}  lr {_rate(trainer):.4g}  "
            f"{self._speed(trainer):,.0f} images/s  {left.removeprefix('0:')} left"
        )

    def _speed(self, trainer: lightning.Trainer) -> float:
        num_images = (trainer.global_step - self._epoch_step) * self._batch_size
        return num_images / (time.monotonic() - self._epoch_started)


def _hide_later_steps(trainer: lightning.Trainer) -> None:
    """Tells TensorBoard's files, which go on, that steps after this one come anew."""
    session = SessionLog(status=SessionLog.START)
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if isinstance(logger, TensorBoardLogger):
            writer: Any = logger.experiment.file_writer
            writer.add_event(Event(step=trainer.global_step + 1, session_log=session))


def _num_columns() -> int:
    return shutil.get_terminal_size().columns


def _rate(trainer: lightning.Trainer) -> float:
    """The learning rate of the next step: the schedule has moved on already."""
    return trainer.optimizers[0].param_groups[0]["lr"]
