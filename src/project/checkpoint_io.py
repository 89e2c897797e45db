"""How Lightning writes and reads checkpoints here."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import CheckpointIO

from project import keep


class PlainCheckpointIO(CheckpointIO):
    """Checkpoints as plain files: tensors, numbers, strings, lists and dicts.

    Written whole or not at all, and read without running any code from them.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint; called on rank 0."""
        keep.save(checkpoint, Path(path))

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a checkpoint; `weights_only` is not a choice here."""
        return torch.load(path, map_location=map_location, weights_only=True)

    def remove_checkpoint(self, path: Any) -> None:
        """Deletes a checkpoint."""
        Path(path).unlink(missing_ok=True)
