"""A callback for the parity tests: each rank's loss at each step, exactly."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback


class StepTrace(Callback):
    def __init__(self, folder: str) -> None:
        self.folder, self.losses = Path(folder), []

    def on_train_batch_end(self, trainer, pl_module, outputs: Any, batch, batch_idx) -> None:
        self.losses.append(outputs["loss"].item())

    def on_train_end(self, trainer, pl_module) -> None:
        torch.save(self.losses, self.folder / f"losses-{trainer.global_rank}.pt")
