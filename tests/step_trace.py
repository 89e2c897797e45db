"""Callbacks that record what each rank saw and did."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision

from reference_ddp import Trace

from project.errors import Preempted


class StepTrace(Callback):
    """As reference_ddp.py does with --trace.

    Leaves trace/<rank>-<first step>.pt, a file each time that the training is begun.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.trace = Trace()
        self.name = f"{trainer.global_rank}-{trainer.global_step:04}.pt"

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer) -> None:
        self.trace.before_step(optimizer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch, batch_idx
    ) -> None:
        self.trace.batch(outputs["loss"], batch[2])
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.trace.after_step(pl_module.net)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:  # of the shares, how many images each rank has scored
            self.trace.values["val"].append(pl_module._eval_sums.count)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        torch.save(self.trace.values, trace_folder(trainer) / self.name)

    def on_exception(self, trainer: Any, pl_module: Any, exception) -> None:
        if isinstance(exception, Preempted):  # to be taken up again
            self.on_train_end(trainer, pl_module)


def trace_folder(trainer: Any) -> Path:
    folder = Path(trainer.default_root_dir) / "trace"
    folder.mkdir(exist_ok=True)
    return folder


def read_trace(folder: Path, rank: int) -> dict[str, list]:
    """What one rank did in a run, from the beginning to the end of its training."""
    parts = [torch.load(path) for path in sorted(folder.glob(f"trace/{rank}-*.pt"))]
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def step_losses(ranks: list[dict[str, list]]) -> list[float]:
    """Of each step the mean over ranks; a batch's loss is its part of the step's."""
    losses = torch.tensor([rank["losses"] for rank in ranks], dtype=torch.float64)
    return losses.mean(0).view(len(ranks[0]["rates"]), -1).sum(1).tolist()


class Apart(Callback):
    """Gives each rank other weights before training begins."""

    def setup(self, trainer: Any, pl_module: Any, stage) -> None:
        for weight in pl_module.parameters():
            weight.data += trainer.global_rank


class HalfOnCPU(Callback):
    """fp16 and its scaler, which Lightning's Trainer offers on GPUs only, on CPUs."""

    def setup(self, trainer: Any, pl_module: Any, stage) -> None:
        if trainer.precision_plugin.device == "cpu":
            trainer.strategy.precision_plugin = MixedPrecision("16-mixed", "cpu")


class Inputs(Callback):
    """Leaves trace/inputs-<rank>.pt: (rows, images) of each batch, as the network gets them."""

    def __init__(self) -> None:
        self.batches = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch, batch_idx) -> None:
        self.batches.append((batch[2].clone(), batch[0].clone()))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        torch.save(self.batches, trace_folder(trainer) / f"inputs-{trainer.global_rank}.pt")


class Gradients(Callback):
    """Leaves trace/gradients.pt: at each step and for each weight the gradients of all ranks,
    computed without DDP, and the one that the optimizer gets.
    """

    def __init__(self) -> None:
        self.steps = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch, batch_idx) -> None:
        net = copy.deepcopy(pl_module.net)
        F.cross_entropy(net(batch[0]), batch[1]).backward()
        self.own: list[Any] = [weight.grad for weight in net.parameters()]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer) -> None:
        weights = [weight.grad.clone() for weight in pl_module.net.parameters()]
        self.steps.append(
            [(gathered(own), got) for own, got in zip(self.own, weights, strict=True)]
        )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            torch.save(self.steps, trace_folder(trainer) / "gradients.pt")


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """(ranks, ...) on all of them."""
    each = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(each, tensor)
    return torch.stack(each)


class Matrix(Callback):
    """Leaves trace/matrix-<rank>.pt: the confusion matrix of a test."""

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        torch.save(pl_module.confusion, trace_folder(trainer) / f"matrix-{trainer.global_rank}.pt")
