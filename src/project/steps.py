"""How many images a rank takes at a time, and how many optimizer steps make a training."""

import math

from project.errors import UserError


def local_batch_size(batch_size: int, world_size: int, accumulate: int) -> int:
    """Images a rank takes at a time, so that one optimizer step sees `batch_size` of them.

    Raises:
        UserError: the global batch does not divide; the nearest sizes that do are named.
    """
    parts = world_size * accumulate
    if batch_size > 0 and batch_size % parts == 0:
        return batch_size // parts
    raise UserError(
        f"data.batch_size={batch_size} is the global batch and does not divide by "
        f"{world_size} ranks × {accumulate} accumulated batches. Nearest that do: "
        f"{_nearest(batch_size, parts)}."
    )


def _nearest(size: int, parts: int) -> str:
    below = size // parts * parts
    return " or ".join(str(multiple) for multiple in (below, below + parts) if multiple > 0)


def steps_per_epoch(num_images: int, batch_size: int) -> int:
    """Optimizer steps of an epoch; the images that do not fill the last are dropped.

    Raises:
        UserError: there is not even one.
    """
    if not 1 <= batch_size <= num_images:
        raise UserError(
            f"data.batch_size={batch_size}: choose 1 to {num_images}, the count of training images."
        )
    return num_images // batch_size


def num_steps(
    steps_an_epoch: int,
    accumulate: int,
    limit_batches: float | int | None,
    max_epochs: int | None,
    max_steps: int,
    val_check_interval: float | int | None,
) -> int:
    """Optimizer steps of a whole training, from the limits of Lightning's Trainer.

    Args:
        limit_batches: batches of a rank and epoch: a number, a fraction, or None.
        max_epochs, max_steps: -1 (or None) for no limit.
        val_check_interval: batches between validations: a number, a fraction of an epoch, or
            None if it is a time.

    Raises:
        UserError: training has no end or no step, or a limit or a validation cuts a step in two.
    """
    if accumulate < 1:
        raise UserError(f"trainer.accumulate_grad_batches={accumulate} must be at least 1.")
    batches = steps_an_epoch * accumulate
    limit = 1.0 if limit_batches is None else limit_batches
    limited = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    if limited % accumulate:
        raise UserError(
            f"trainer.limit_train_batches={limit} leaves {limited} batches an epoch, not whole "
            f"optimizer steps of trainer.accumulate_grad_batches={accumulate}."
        )
    epochs = math.inf if max_epochs is None or max_epochs < 0 else max_epochs
    steps = limited // accumulate * epochs
    steps = min(steps, max_steps) if max_steps >= 0 else steps
    if steps in (0, math.inf):
        wrong = "no end" if steps else "no step"
        raise UserError(f"Set trainer.max_epochs or trainer.max_steps: training has {wrong}.")
    _check_validation(val_check_interval, limited, accumulate)
    return int(steps)


def _check_validation(interval: float | int | None, num_batches: int, accumulate: int) -> None:
    if interval is None:
        raise UserError(
            "trainer.val_check_interval: give batches, or a fraction of an epoch. A run that "
            "validates by the clock could not be repeated."
        )
    if isinstance(interval, bool) or interval <= 0:
        raise UserError(f"trainer.val_check_interval={interval} must be above 0.")
    batches = interval if isinstance(interval, int) else max(int(num_batches * interval), 1)
    if batches % accumulate:  # on resume half a step would be lost
        raise UserError(
            f"trainer.val_check_interval={interval} validates after {batches} batches, inside an "
            f"optimizer step of trainer.accumulate_grad_batches={accumulate}. "
            f"Use {_nearest(batches, accumulate)}."
        )
