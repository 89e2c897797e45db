"""Callbacks that watch which steps wait for what the device has computed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(Callback):
    """Leaves reads-<rank>.json: after which steps Python asked a tensor for its value.

    On a GPU it would have to wait for it.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.mode = Reads(lambda: trainer.global_step)
        self.mode.__enter__()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.mode.__exit__(None, None, None)
        path = Path(trainer.default_root_dir) / f"reads-{trainer.global_rank}.json"
        path.write_text(json.dumps(sorted(self.mode.steps)))


class Reads(TorchDispatchMode):
    """Notes the step at each operation of which a GPU's host would wait for the result."""

    WAITS = (
        torch.ops.aten._local_scalar_dense,
        torch.ops.aten.nonzero,
        torch.ops.aten.masked_select,
        torch.ops.aten.equal,
        torch.ops.aten._unique2,
    )

    def __init__(self, step: Callable[[], int]) -> None:
        super().__init__()
        self.step, self.steps = step, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in self.WAITS:
            self.steps.add(self.step())
        return func(*args, **(kwargs or {}))


class NoWaiting(Callback):
    """On a GPU: a step that does not log fails if it waits for the device."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        following = trainer.global_step + 1
        is_quiet = trainer.global_step >= 2 and following % trainer.log_every_n_steps
        torch.cuda.set_sync_debug_mode("error" if is_quiet else "default")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
