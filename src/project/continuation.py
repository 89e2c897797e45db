"""Going on from a checkpoint as if training had never stopped."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from project.errors import UserError
from project.steps import local_batch_size


def goes_on(checkpoint: dict[str, Any], state: dict[str, Any], num_steps: int) -> bool:
    """Whether steps are left to train, or a validation to end.

    Args:
        state: of the run's record, in the checkpoint.
        num_steps: of the whole training, as the config now has it.
    """
    was_stopped = state["is_stopped"] and num_steps == state["num_steps"]  # early, by a callback
    is_inside = checkpoint["global_step"] < num_steps or state["is_validating"]
    return is_inside and not was_stopped


def check_limits(checkpoint: dict[str, Any], num_steps: int, is_new: bool) -> None:
    """Holds the limits of this training against what a checkpoint has behind it.

    Args:
        is_new: whether the run begins in a folder of its own.

    Raises:
        UserError: they ask for fewer steps, or a new run has nothing to train.
    """
    done = checkpoint["global_step"]
    if done > num_steps or (is_new and done == num_steps):
        raise UserError(
            f"The checkpoint has trained {done} steps already, of {num_steps}: raise "
            f"trainer.max_epochs or trainer.max_steps to go on, or evaluate (fit=false)."
        )


def take_position(
    checkpoint: dict[str, Any],
    state: dict[str, Any],
    config: dict[str, Any],
    num_steps: int,
    accumulate: int,
) -> None:
    """Makes the place where a checkpoint stands one of this training, in place.

    Args:
        config: of this training; the other is in the checkpoint.
        accumulate: batches of an optimizer step, here.

    Raises:
        UserError: the optimizer is another, or the steps of an epoch are.
    """
    then, loops = checkpoint["config"], checkpoint["loops"]["fit_loop"]
    names = [c["optimizer"].get("_target_") for c in (then, config)]
    if names[0] != names[1]:
        raise UserError(
            f"The checkpoint's run used {names[0]}, whose state is of no use to {names[1]}. "
            f"weights=FILE takes up the weights alone."
        )
    decays = [bool(c["optimizer"].get("weight_decay")) for c in (then, config)]
    if decays[0] != decays[1]:
        raise UserError("optimizer.weight_decay can change, but not from or to 0, in a checkpoint.")
    if state["is_cut"] and goes_on(checkpoint, state, num_steps):
        _reopen_epoch(checkpoint, state)
    progress = loops["epoch_progress"]["current"]
    is_inside = progress["started"] > progress["processed"]
    fixed = dict(_leaves("data.source", then["data"].get("source")))
    now = dict(_leaves("data.source", config["data"].get("source")))
    for key in "batch_size", "limit_train_images", "val_fraction", "split_seed":
        fixed[f"data.{key}"], now[f"data.{key}"] = (c["data"].get(key) for c in (then, config))
    keys = ["limit_train_batches"]
    keys += ["accumulate_grad_batches"] if then["trainer"].get(keys[0]) is not None else []
    for key in keys:
        name = f"trainer.{key}"
        fixed[name], now[name] = (c["trainer"].get(key) for c in (then, config))
    if is_inside:
        fixed["seed"], now["seed"] = then["seed"], config["seed"]
    for key in sorted(fixed | now):
        if fixed.get(key) != now.get(key):
            raise UserError(
                f"{key} was {fixed.get(key)} in the run of the checkpoint, here it is "
                f"{now.get(key)}: its steps would be others. weights=FILE begins anew from the "
                f"weights."
            )
    before = then["trainer"].get("accumulate_grad_batches") or 1
    for counts in loops["epoch_loop.batch_progress"].values():
        if isinstance(counts, dict):  # batches of whole steps; completed is one behind in hooks
            behind = counts["ready"] - counts["completed"]
            counts |= {name: count // before * accumulate for name, count in counts.items()}
            counts["completed"] = counts["ready"] - behind


def _leaves(key: str, node: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, dict):
        yield key, node
    for name, child in node.items() if isinstance(node, dict) else ():
        yield from _leaves(f"{key}.{name}", child)


def _reopen_epoch(checkpoint: dict[str, Any], state: dict[str, Any]) -> None:
    """Takes back the end of an epoch that was cut short: its other batches come now."""
    for progress in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
        progress["processed"] -= 1
    row = state["history"].pop()
    metrics = {name: value for name, value in row.items() if name.startswith("val/")}
    checkpoint["epoch_metrics"] = metrics


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


def drop_schedule(
    checkpoint: dict[str, Any], state: dict[str, Any], config: dict[str, Any], num_steps: int
) -> bool:
    """Takes the schedule out of a checkpoint if this training has another; returns whether."""
    then = checkpoint["config"]
    is_same = all(then[key] == config[key] for key in ("optimizer", "scheduler"))
    if is_same and num_steps == state["num_steps"]:
        return False
    checkpoint["lr_schedulers"] = []
    return True


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
