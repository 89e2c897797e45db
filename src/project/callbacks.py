"""What a run leaves behind, so that nothing is lost: plain checkpoints and a row an epoch."""

import logging
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from project import continuation, signals
from project.agreement import Agreement
from project.errors import Preempted
from project.failure import StepFile
from project.files import write_atomically, write_csv
from project.keep import Best, Entry, previous_of

log = logging.getLogger("project")


class PlainCheckpointIO(CheckpointIO):
    """Checkpoints as plain files: tensors, numbers, strings, lists and dicts.

    Written whole or not at all, and read without running any code from them.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint atomically; called on rank 0. The last becomes the one before."""
        write_atomically(
            Path(path), lambda file: torch.save(checkpoint, file), keep=previous_of(Path(path))
        )

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a checkpoint; `weights_only` is not a choice here."""
        return torch.load(path, map_location=map_location, weights_only=True)

    def remove_checkpoint(self, path: Any) -> None:
        """Deletes a checkpoint."""
        Path(path).unlink(missing_ok=True)


class RunRecord(Checkpoint):
    """Keeps the record of a run in its folder: `checkpoints/` and `metrics.csv`.

    Saves `last.ckpt` at the end of each epoch, when asked to in between, and when a signal asks
    the run to stop; always at a step boundary, from which training goes on as if it had never
    stopped. The history travels inside, and `metrics.csv` is written whole from it. At the end of
    training `model.pt`: the plain state dict of the network, best or else last.

    Args:
        folder: of the run; rank 0 writes.
        config: the run's, plain and unresolved; travels in the checkpoints.
        every_n_steps: saves inside epochs, counted in optimizer steps of the whole training.
        every_minutes: saves when the latest is so old.
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
        self.folder, self.config = folder, config
        self.every_n_steps, self.every_minutes = every_n_steps, every_minutes
        self.last_path = folder / "checkpoints" / "last.ckpt"
        self.best = Best(folder / "checkpoints", top_k)
        self.history: list[dict[str, Any]] = []
        self._is_cut = self._is_stopped = False
        self._new: Entry | None = None  # of the best, and not saved yet
        self._owes_save, self._request = False, 0

    @property
    def chosen_path(self) -> Path:
        """The checkpoint to test and to hand on: the best, without validation the last."""
        return self.best.path if self.best.entries else self.last_path

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Puts the one agreement in the place of Lightning's (2.6.6).

        It broadcasts before each step (_broadcast_sigterm_tensor), which makes the host wait for
        the device, and inside its handler of SIGTERM (_sigterm_notifier_fn), which never returns
        where another rank waits in another collective. With max_steps it also takes an epoch that
        has ended for one to go on with (_iteration_based_training), and ends it again.
        """
        trainer._signal_connector.register_signal_handlers = lambda: None
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        trainer.fit_loop._iteration_based_training = lambda: False

    # What travels in a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """The history, and where the training stands."""
        state = {"history": self.history, "best": self.best.entries, "num_steps": self._num_steps}
        return state | {"is_cut": self._is_cut, "is_stopped": self._is_stopped}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Adds the config, so that a checkpoint alone can be evaluated."""
        checkpoint["config"] = self.config

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Makes the position of the run that wrote a checkpoint that of this one.

        Raises:
            UserError: its optimizer is another, or its place in an epoch does not exist here.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            state = checkpoint["callbacks"][self.state_key]
            continuation.check(checkpoint, self.config)
            trainer.should_stop = not continuation.goes_on(
                checkpoint, state, trainer.datamodule.num_steps()
            )
            if state["is_cut"] and not trainer.should_stop:
                continuation.reopen_epoch(checkpoint, state)
            continuation.reposition(checkpoint, trainer.accumulate_grad_batches)
            self._then = checkpoint["config"], state["num_steps"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up the history of the run that wrote a checkpoint."""
        self.history, self.best.entries = state_dict["history"], state_dict["best"]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Makes the files agree with the record: a kill may have come between them."""
        self._num_steps = trainer.datamodule.num_steps()
        if trainer.ckpt_path:
            self.best.adopt(Path(trainer.ckpt_path), writes=trainer.is_global_zero)
            if trainer.is_global_zero:
                write_csv(self.folder / "metrics.csv", self.history)

    # Training

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """From here on requests to stop are granted at step boundaries."""
        step = trainer.global_step
        if step:
            continuation.rebuild_buckets(trainer, pl_module)
            if not continuation.has_same_schedule(*self._then, self.config, self._num_steps):
                continuation.renew_schedule(trainer, pl_module)
        self._agreement = Agreement(step, self.every_minutes)
        self._step_file = StepFile(self.folder / "ranks" / f"{trainer.global_rank}.step")
        signals.defer(True)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At a step boundary saves or stops, if all ranks find it due."""
        step, loop = trainer.global_step, trainer.fit_loop.epoch_loop
        self._step_file.write(step)
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if self.every_n_steps and step % self.every_n_steps == 0:
            self._owes_save = True
        if self._agreement.is_due(step):
            self._agree(step)
        # What is due at the end of an epoch, or before a validation, waits for its end: a
        # checkpoint from here would leave them out.
        at_end = loop._num_ready_batches_reached() or step == self._num_steps
        if not at_end and not loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
            self._settle(trainer)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Does not let a broken network be validated."""
        if trainer.state.fn == TrainerFn.FITTING:
            pl_module.losses.check(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Notes an improvement, and saves it at once if validation ran inside an epoch."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        values = {name: pl_module.metrics[name] for name in ("val/loss", "val/acc")}
        self._new = self.best.enter({"step": trainer.global_step, **values}) or self._new
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._owes_save |= self._new is not None
            self._agree(trainer.global_step)
            self._settle(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Adds the epoch's row and saves; comes after the module's own hook, as Checkpoints do."""
        names = sorted(pl_module.metrics, key=lambda name: not name.startswith("train/"))
        row = {"epoch": trainer.current_epoch + 1, "step": trainer.global_step}
        row |= {name: pl_module.metrics.pop(name) for name in names}
        self.history.append(row)
        log.info("  ".join(f"{k} {v:.4f}" if "/" in k else f"{k} {v}" for k, v in row.items()))
        self._is_cut = not trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        self._is_stopped, self._owes_save = trainer.should_stop, True
        self._agree(trainer.global_step)
        self._settle(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """From here on requests to stop are granted at once."""
        signals.defer(False)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """A rank that has failed, or is stopping, is not asked to stop any more."""
        signals.end()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Writes `model.pt`; what max_steps leaves of an epoch has been saved as its end."""
        if trainer.is_global_zero:
            files = PlainCheckpointIO()
            state = files.load_checkpoint(self.chosen_path)["state_dict"]
            net = {name.removeprefix("net."): value for name, value in state.items()}
            files.save_checkpoint(net, self.last_path.with_name("model.pt"))

    def results(self, trainer: Any) -> dict[str, Any]:
        """What `results.json` says of the training."""
        best = self.best.entries[:1]
        return {
            **{name: value for entry in best for name, value in entry.items() if "/" in name},
            "epochs": len(self.history),
            "steps": trainer.global_step,
            "checkpoint": str(self.chosen_path.relative_to(self.folder)),
        }

    def _agree(self, step: int) -> None:
        save, request = self._agreement.reach(step)
        self._owes_save |= save
        self._request = self._request or request

    def _settle(self, trainer: Any) -> None:
        """Does what the ranks have found due: here training can be taken up again."""
        if self._owes_save or self._request:
            trainer.lightning_module.losses.check(trainer)
            trainer.save_checkpoint(self.last_path)
            self._agreement.saved()
            if trainer.is_global_zero:
                write_csv(self.folder / "metrics.csv", self.history)
                if self._new:
                    self.best.link(self._new, self.last_path)
        self._owes_save, self._new = False, None
        if self._request:
            raise Preempted(self._request, f" at step {trainer.global_step}, saved")
