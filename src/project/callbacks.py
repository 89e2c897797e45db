"""What a run leaves behind: plain checkpoints, the history of its epochs, lines on the console."""

import logging
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from project.errors import UserError
from project.files import link_atomically, write_atomically, write_csv

log = logging.getLogger("project")


class PlainCheckpointIO(CheckpointIO):
    """Checkpoints as plain files: tensors, numbers, strings, lists and dicts.

    Written whole or not at all, and read without running any code from them.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint atomically; called on rank 0."""
        write_atomically(Path(path), lambda file: torch.save(checkpoint, file))

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

    After each epoch `last.ckpt`; `best.ckpt` is that of the highest val/acc, the first on ties,
    never NaN. The history travels inside the checkpoints and `metrics.csv` is written whole from
    it. At the end of training `model.pt`: the plain state dict of the network, best or else last.

    Args:
        folder: of the run; rank 0 writes.
        config: the run's, plain and unresolved; travels in the checkpoints.

    Attributes:
        history: one row an epoch.
        best: val/loss and val/acc of `best.ckpt`; empty without validation.
    """

    def __init__(self, folder: Path, config: Any = None) -> None:
        self.folder, self.config = folder, config
        self.last_path = folder / "checkpoints" / "last.ckpt"
        self.best_path = folder / "checkpoints" / "best.ckpt"
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, float] = {}
        self._improved = False

    @property
    def chosen_path(self) -> Path:
        """The checkpoint to test and to hand on: the best, without validation the last."""
        return self.best_path if self.best else self.last_path

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leaves SIGTERM to end a rank at once.

        Lightning 2.6.6 broadcasts inside its handler of the signal (_sigterm_notifier_fn), which
        never returns where another rank waits in another collective.
        """
        trainer._signal_connector.register_signal_handlers = lambda: None

    def state_dict(self) -> dict[str, Any]:
        """What travels in a checkpoint."""
        return {"history": self.history, "best": self.best}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Adds the config, so that a checkpoint alone can be evaluated."""
        checkpoint["config"] = self.config

    def on_load_checkpoint(
        self, trainer: lightning.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Refuses to go on where nothing is left to do.

        Raises:
            UserError: the limits of the training are those that the checkpoint has reached.
        """
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        done = checkpoint["global_step"]
        if trainer.state.fn == TrainerFn.FITTING and done >= data.num_steps():
            raise UserError(
                f"ckpt_path has trained {done} steps already: set trainer.max_epochs or "
                f"trainer.max_steps to go on, or fit=false to evaluate."
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up the history of the run that wrote a checkpoint."""
        self.history = state_dict["history"]
        if self.best_path.exists():  # not so in another folder, which finds a best of its own
            self.best = state_dict["best"]

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Does not let a broken network be validated."""
        if trainer.state.fn == TrainerFn.FITTING:
            pl_module.losses.check(trainer)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Notes an improvement, and saves it at once if validation ran inside an epoch."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        values = {name: pl_module.metrics[name] for name in ("val/loss", "val/acc")}
        if not values["val/acc"] > self.best.get("val/acc", float("-inf")):
            return
        self.best, self._improved = values, True
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            trainer.save_checkpoint(self.best_path)
            self._improved = False

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Adds the epoch's row and saves; comes after the module's own hook, as Checkpoints do."""
        pl_module.losses.check(trainer)
        names = sorted(pl_module.metrics, key=lambda name: not name.startswith("train/"))
        row = {"epoch": trainer.current_epoch + 1, "step": trainer.global_step}
        row |= {name: pl_module.metrics.pop(name) for name in names}
        self.history.append(row)
        log.info("  ".join(f"{k} {v:.4f}" if "/" in k else f"{k} {v}" for k, v in row.items()))
        self._save(trainer)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Writes `model.pt`; the last epoch's end, which max_steps brings too, has been saved."""
        if trainer.is_global_zero:
            files = PlainCheckpointIO()
            state = files.load_checkpoint(self.chosen_path)["state_dict"]
            net = {name.removeprefix("net."): value for name, value in state.items()}
            files.save_checkpoint(net, self.last_path.with_name("model.pt"))

    def results(self, trainer: lightning.Trainer) -> dict[str, Any]:
        """What `results.json` says of the training."""
        return {
            **self.best,
            "epochs": len(self.history),
            "steps": trainer.global_step,
            "checkpoint": str(self.chosen_path.relative_to(self.folder)),
        }

    def _save(self, trainer: lightning.Trainer) -> None:
        trainer.save_checkpoint(self.last_path)
        if not trainer.is_global_zero:
            return
        if self._improved:
            link_atomically(self.last_path, self.best_path)
        self._improved = False
        write_csv(self.folder / "metrics.csv", self.history)
