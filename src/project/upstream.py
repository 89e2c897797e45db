"""What a run changes in Lightning 2.6.6, in one place; a test holds that it is still there."""

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

NOTHING = contextlib.nullcontext()
HOOKS = (  # of a step, that have nothing to do by default
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def take_out(trainer: Any) -> None:
    """Puts the one agreement in the place of Lightning's two, before a training begins.

    It broadcasts before each step (_broadcast_sigterm_tensor), which makes the host wait for the
    device, and inside its handler of SIGTERM (_sigterm_notifier_fn), which never returns where
    another rank waits in another collective: no handler is registered. With max_steps it also
    takes an epoch that has ended for one to go on with (_iteration_based_training), and ends it
    again.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    trainer.fit_loop._iteration_based_training = lambda: False
    _ask_once(trainer)


def _ask_once(trainer: Any) -> None:
    """Lets Lightning find out once what it would find out at each step, to the same effect.

    How to profile when nobody does, whether `training_step` takes a number (inspect.signature),
    who defines the hooks of a batch, and which hooks of our own callbacks are empty. Also, nothing
    is collected from `self.log` where nothing was logged, or done to clip without a limit.
    """
    task, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    if type(trainer.profiler) is PassThroughProfiler:
        trainer.profiler.profile = lambda action_name: NOTHING  # type: ignore[assignment]
    vars(loop).pop("_build_kwargs", None)  # of another task
    if is_param_in_hook_signature(task.training_step, "batch_idx", min_args=2):
        loop._build_kwargs = lambda kwargs, batch, i: OrderedDict(batch=batch, batch_idx=i)
    selector = trainer._data_connector._datahook_selector
    selector.get_instance = functools.cache(selector.get_instance)
    for callback in trainer.callbacks:
        if type(callback).__module__.partition(".")[0] == __package__:
            _leave_out_empty_hooks(callback)
    _spare(trainer._logger_connector, "on_batch_end", lambda: _is_logged(trainer))
    _spare(trainer.precision_plugin, "_clip_gradients", lambda: _is_clipped(trainer))


def _leave_out_empty_hooks(callback: Any) -> None:
    """Lightning passes over what cannot be called; a user's callback may call its own."""
    for hook in HOOKS:
        if getattr(type(callback), hook) is getattr(Callback, hook):
            vars(callback)[hook] = None


def _spare(owner: Any, name: str, is_needed: Callable[[], bool]) -> None:
    """Calls a method of `owner` only where it is needed."""
    vars(owner).pop(name, None)  # as an earlier stage left it
    method = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: method(*args, **kwargs) if is_needed() else None)


def _is_logged(trainer: Any) -> bool:
    if not trainer._results:
        trainer._results.batch = trainer._results.batch_size = None  # lets go of them, as it would
    return bool(trainer._results)


def _is_clipped(trainer: Any) -> bool:
    task, name = trainer.lightning_module, "configure_gradient_clipping"
    is_own = name in vars(task) or getattr(type(task), name) is not getattr(LightningModule, name)
    return is_own or trainer.gradient_clip_val is not None


def begin_validation_anew(checkpoint: dict[str, Any]) -> None:
    """Makes a checkpoint from inside a validation one that begins with this validation.

    Lightning goes on inside a validation that had a batch under way (RESTARTED_MID_EVALUATION), at
    the batch where it was; that is the first here, since the sums of the others are not kept.
    """
    batches = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
    counts = dict.fromkeys(["ready", "started", "processed", "completed"], 0)
    batches |= {"current": counts, "total": counts | {"ready": 1, "started": 1}}
    batches["is_last_batch"] = False
