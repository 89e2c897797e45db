"""What a run leaves behind, so that nothing is lost: checkpoints, and a row an epoch."""

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from project import continuation, heartbeat, keep, signals, upstream
from project.agreement import Agreement, ValidationAgreement
from project.checkpoint import LAST
from project.errors import Preempted
from project.files import link_atomically, write_csv

log = logging.getLogger(__package__)


class RunRecord(Checkpoint):
    """Keeps the record of a run in its folder: `checkpoints/` and `metrics.csv`.

    Saves `last.ckpt` at the end of each epoch, when else it is due, and when a signal asks the run
    to stop: always at a step from which training goes on as if it had never stopped. The history
    travels inside, `metrics.csv` is written whole from it. At the end `model.pt`: a state dict.

    Args:
        folder: of the run; rank 0 writes.
        config: the run's, plain and unresolved; travels in the checkpoints.
        every_n_steps, every_minutes: saves inside epochs; optimizer steps of the whole training.
        top_k: how many of the best checkpoints to keep.

    Attributes:
        history: one row an epoch.
        best: which checkpoints are the best, and their files.
    """

    def __init__(
        self,
        folder: Path,
        config: Any,
        every_n_steps: int | None = None,
        every_minutes: float | None = None,
        top_k: int = 1,
    ) -> None:
        self.folder, self.config, self.last_path = folder, config, folder / LAST
        self.every_n_steps, self.every_minutes = every_n_steps, every_minutes
        self.best = keep.Best(self.last_path.parent, top_k)
        self.history: list[dict[str, Any]] = []
        self._is_cut = self._is_stopped = self._is_validating = False
        self._new: keep.Entry | None = None  # of the best, and not saved yet

    @property
    def chosen_path(self) -> Path:
        """The checkpoint to test and to hand on: the best, without validation the last."""
        return self.best.path if self.best.entries else self.last_path

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leaves it to this callback when to save, and when to stop."""
        upstream.take_out(trainer)

    def state_dict(self) -> dict[str, Any]:
        """What travels in a checkpoint: the history, and where the training stands."""
        state = {"history": self.history, "best": self.best.entries, "num_steps": self._num_steps}
        flags = "is_cut", "is_stopped", "is_validating"
        return state | {name: getattr(self, f"_{name}") for name in flags}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Adds the config, so that a checkpoint alone can be evaluated."""
        checkpoint["config"] = self.config
        if self._is_validating:
            upstream.begin_validation_anew(checkpoint)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Makes the position of the run that wrote a checkpoint that of this one.

        Raises:
            UserError: this run cannot go on from there.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            state, steps = checkpoint["callbacks"][self.state_key], trainer.datamodule.num_steps()
            accumulate = trainer.accumulate_grad_batches
            continuation.take_position(checkpoint, state, self.config, steps, accumulate)
            self._renews = continuation.drop_schedule(checkpoint, state, self.config, steps)
            is_new = Path(trainer.ckpt_path).parent != self.last_path.parent
            continuation.check_limits(checkpoint, steps, is_new)
            trainer.should_stop = not continuation.goes_on(checkpoint, state, steps)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up the history of the run that wrote a checkpoint."""
        self.history, self.best.entries = state_dict["history"], state_dict["best"]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Makes the files agree with the record: a kill may have come between them."""
        self._num_steps = trainer.datamodule.num_steps()
        if trainer.ckpt_path:
            self.best.adopt(Path(trainer.ckpt_path), writes=trainer.is_global_zero)
            if trainer.is_global_zero:
                link_atomically(Path(trainer.ckpt_path), self.last_path)  # in place of a damaged
                write_csv(self.folder / "metrics.csv", self.history)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """From here on requests to stop are granted at step boundaries."""
        step = trainer.global_step
        if step:
            continuation.rebuild_buckets(trainer, pl_module)
            if self._renews:
                continuation.renew_schedule(trainer, pl_module)
        self._agreement = Agreement(step, self.every_n_steps, self.every_minutes)
        signals.defer(True)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At a step boundary saves or stops, if all ranks find it due."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        due, step = self._agreement, trainer.global_step
        due.look(step)
        if due.is_save_due or due.request:
            # An epoch's end and a validation come first: to go on from here would leave them out.
            loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
            is_end = loop._num_ready_batches_reached() or step == self._num_steps
            if not is_end and not loop._should_check_val_fx(fetcher):
                self._settle(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Does not let a broken network be validated."""
        if trainer.state.fn == TrainerFn.FITTING:
            pl_module.losses.check(trainer)
            self._inside = ValidationAgreement(trainer)

    def on_validation_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Stops if that is due; later the validation begins anew, if max_steps leaves one."""
        if trainer.state.fn == TrainerFn.FITTING and self._inside.is_due():
            self._is_validating, self._agreement.request = True, self._inside.request
            self._settle(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Notes an improvement, and saves it at once if validation ran inside an epoch."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        values = {name: v for name, v in pl_module.metrics.items() if name.startswith("val/")}
        self._new = self.best.enter({"step": trainer.global_step, **values}) or self._new
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._agreement.is_save_due |= self._new is not None
            self._agreement.speak(trainer.global_step)
            self._settle(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Adds the epoch's row and saves; comes after the module's own hook, as Checkpoints do."""
        names = sorted(pl_module.metrics, key=lambda name: not name.startswith("train/"))
        row = {"epoch": trainer.current_epoch + 1, "step": trainer.global_step}
        row |= {name: pl_module.metrics.pop(name) for name in names}
        self.history.append(row)
        log.info("  ".join(f"{k} {v:.4f}" if "/" in k else f"{k} {v}" for k, v in row.items()))
        self._is_cut = not trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        self._is_stopped, self._agreement.is_save_due = trainer.should_stop, True
        self._agreement.speak(trainer.global_step)
        self._settle(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """From here on requests to stop are granted at once."""
        signals.defer(False)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """A rank that ends is not asked to stop."""
        signals.end()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Writes `model.pt`, also if there was nothing left to train."""
        if trainer.is_global_zero:
            keep.hand_on(self.chosen_path, self.last_path.with_name("model.pt"))

    def results(self, trainer: Any) -> dict[str, Any]:
        """What `results.json` says of the training."""
        best = self.best.entries[0] if self.best.entries else {}
        return {
            **{name: value for name, value in best.items() if "/" in name},
            "epochs": len(self.history),
            "steps": trainer.global_step,
            "checkpoint": str(self.chosen_path.relative_to(self.folder)),
        }

    def _settle(self, trainer: Any) -> None:
        """Saves, and stops, if that is due; all ranks are here."""
        due = self._agreement
        if due.request:
            signals.end()  # no further one interrupts the saving
        if due.is_save_due or due.request:
            trainer.lightning_module.losses.check(trainer)
            with heartbeat.phase("saving"):
                trainer.save_checkpoint(self.last_path)
                if trainer.is_global_zero:
                    write_csv(self.folder / "metrics.csv", self.history)
                    if self._new:
                        self.best.link(self._new, self.last_path)
            due.saved()
            self._new = None
        if due.request:
            raise Preempted(due.request, f" at step {trainer.global_step}, saved")
