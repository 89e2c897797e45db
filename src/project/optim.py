"""Weight decay and learning-rate schedules. The optimizers are those of `torch.optim`."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    SequentialLR,
)

from project.errors import UserError


def decay_weights_only(optimizer: Optimizer) -> None:
    """Exempts biases, norms and other vectors from an optimizer's weight decay, if it has any.

    They move to a second parameter group; an optimizer without weight decay keeps its one.
    """
    (group,) = optimizer.param_groups
    if group.get("weight_decay"):
        vectors = [parameter for parameter in group["params"] if parameter.ndim < 2]
        group["params"] = [parameter for parameter in group["params"] if parameter.ndim >= 2]
        optimizer.add_param_group({"params": vectors, "weight_decay": 0.0})


def warmup_then_decay(
    optimizer: Optimizer, num_steps: int, warmup: float, decay: str | None
) -> LRScheduler:
    """Raises the rate linearly to the optimizer's, then lets it fall to 0 after the last step.

    Step it after every optimizer step. The first step runs at 1 / warm-up steps of the full rate.

    Args:
        num_steps: optimizer steps of the whole training.
        warmup: fraction of them to warm up, 0 to below 1.
        decay: "linear", "cosine", or None to stay at the full rate.

    Raises:
        UserError: an unknown decay, or a fraction out of range.
    """
    if not 0 <= warmup < 1:
        raise UserError(f"scheduler.warmup={warmup} is a fraction of training, in [0, 1).")
    num_warmup = round(warmup * num_steps)
    falling = _decay(optimizer, max(num_steps - num_warmup, 1), decay)
    if num_warmup == 0:
        return falling
    rising = LinearLR(optimizer, start_factor=1 / num_warmup, total_iters=num_warmup - 1)
    return SequentialLR(optimizer, [rising, falling], milestones=[num_warmup])


def _decay(optimizer: Optimizer, num_steps: int, decay: str | None) -> LRScheduler:
    if decay is None:
        return ConstantLR(optimizer, factor=1)
    if decay == "linear":
        return LinearLR(optimizer, start_factor=1, end_factor=0, total_iters=num_steps)
    if decay == "cosine":
        return CosineAnnealingLR(optimizer, T_max=num_steps)
    raise UserError(f"scheduler.decay={decay}: choose linear, cosine or null.")
