"""Going on from a checkpoint as if training had never stopped."""

import logging
import warnings
from typing import Any

import torch

from project.data import local_batch_size
from project.errors import UserError

log = logging.getLogger("project")


def goes_on(checkpoint: dict[str, Any], state: dict[str, Any], num_steps: int) -> bool:
    """Whether steps are left to train.

    Args:
        state: of the run's record, in the checkpoint.
        num_steps: of the whole training, as the config now has it.
    """
    was_stopped = state["is_stopped"] and num_steps == state["num_steps"]  # early, by a callback
    return checkpoint["global_step"] < num_steps and not was_stopped


def check(checkpoint: dict[str, Any], config: dict[str, Any]) -> None:
    """Holds the config against the one that the checkpoint was trained with.

    Raises:
        UserError: the optimizer is another, or a place inside an epoch does not exist here.
    """
    then, there = checkpoint["config"], "the run that wrote the checkpoint"
    names = [c["optimizer"].get("_target_") for c in (then, config)]
    if names[0] != names[1]:
        raise UserError(
            f"{there} used {names[0]}, whose state is of no use to {names[1]}. "
            f"weights=FILE takes up the weights alone."
        )
    keys = "batch_size", "limit_train_images", "val_fraction", "split_seed"
    changed = [key for key in keys if then["data"].get(key) != config["data"].get(key)]
    if changed and is_inside_epoch(checkpoint):
        key = changed[0]
        raise UserError(
            f"data.{key} was {then['data'].get(key)} in {there}, inside an epoch: it can change "
            f"between epochs only. best.ckpt may be of an epoch's end."
        )


def is_inside_epoch(checkpoint: dict[str, Any]) -> bool:
    """Whether batches of the checkpoint's epoch are left."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
    return progress["started"] > progress["processed"]


def reopen_epoch(checkpoint: dict[str, Any], state: dict[str, Any]) -> None:
    """Takes back the end of an epoch that max_steps had cut short: its other batches come now."""
    for progress in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
        progress["processed"] -= 1
    row = state["history"].pop()
    metrics = {name: value for name, value in row.items() if name.startswith("val/")}
    checkpoint["epoch_metrics"] = metrics


def reposition(checkpoint: dict[str, Any], accumulate: int) -> None:
    """Counts the batches of an epoch anew if a step accumulates another number of them."""
    then = checkpoint["config"]["trainer"].get("accumulate_grad_batches") or 1
    if then == accumulate:
        return
    for progress in ("total", "current"):
        counts = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"][progress]
        behind = counts["ready"] - counts["completed"]  # 1 in on_train_batch_end
        for name in counts:
            counts[name] = counts[name] // then * accumulate
        counts["completed"] = counts["ready"] - behind


def rebuild_buckets(trainer: Any, task: Any) -> None:
    """Gives DDP the buckets that it has after the first step of a training.

    It lays them out anew after the first backward, in the order in which gradients came. With more
    than two ranks another layout sums in another order (torch/nn/parallel/distributed.py,
    _rebuild_buckets). One forward and backward on nothing, and all is as it was.
    """
    model = trainer.strategy.model
    if not hasattr(model, "reducer"):
        return
    data, world_size = trainer.datamodule, trainer.world_size
    count = local_batch_size(data.batch_size, world_size, trainer.accumulate_grad_batches)
    size = count, 3, data.image_size, data.image_size
    buffers = [buffer.clone() for buffer in task.buffers()]
    with trainer.precision_plugin.forward_context():
        model(torch.zeros(size, dtype=task.dtype, device=task.device)).sum().backward()
    task.zero_grad()
    for buffer, before in zip(task.buffers(), buffers, strict=True):
        buffer.copy_(before)


def has_same_schedule(
    then: dict[str, Any], num_steps_then: int, now: dict[str, Any], num_steps: int
) -> bool:
    """Whether two configs, with the steps of their trainings, give each step the same rate."""
    keys = "optimizer", "scheduler"
    return num_steps == num_steps_then and all(then[key] == now[key] for key in keys)


def renew_schedule(trainer: Any, task: Any) -> None:
    """Takes rate, decay and schedule from the config, not from the checkpoint.

    The schedule stands where it would after so many steps, had it been this one from the start.
    """
    (optimizer,), (schedule,) = task.configure_optimizers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no step of an optimizer lies between
        for _ in range(trainer.global_step):
            schedule["scheduler"].step()
    trainer.lr_scheduler_configs[0].scheduler.load_state_dict(schedule["scheduler"].state_dict())
    for group, new in zip(trainer.optimizers[0].param_groups, optimizer.param_groups, strict=True):
        group |= {name: value for name, value in new.items() if name != "params"}
