"""What a run changes in Lightning 2.6.6, in one place; a test holds that it is still there."""

import contextlib
import functools
from collections import OrderedDict
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
    who defines the hooks of a batch, and which hooks of ours are empty. Also, nothing is collected
    from `self.log` where nothing was logged.
    """
    task, connector = trainer.lightning_module, trainer._logger_connector
    if type(trainer.profiler) is PassThroughProfiler:
        trainer.profiler.profile = lambda action_name: NOTHING  # type: ignore[assignment]
    if is_param_in_hook_signature(task.training_step, "batch_idx", min_args=2):
        trainer.fit_loop.epoch_loop._build_kwargs = lambda kwargs, batch, number: OrderedDict(
            batch=batch, batch_idx=number
        )
    selector = trainer._data_connector._datahook_selector
    selector.get_instance = functools.cache(selector.get_instance)
    for owner in task, *trainer.callbacks:
        if type(owner).__module__.partition(".")[0] == __package__:  # others may call their own
            _leave_out_empty_hooks(owner)
    end = connector.on_batch_end
    connector.on_batch_end = lambda: end() if trainer._results else _forget(trainer._results)


def _leave_out_empty_hooks(owner: Any) -> None:
    """Lightning passes over what cannot be called."""
    parent = LightningModule if isinstance(owner, LightningModule) else Callback
    for hook in HOOKS:
        if hook not in vars(owner) and getattr(type(owner), hook) is getattr(parent, hook):
            vars(owner)[hook] = None


def _forget(results: Any) -> None:
    results.batch = results.batch_size = None


def begin_validation_anew(checkpoint: dict[str, Any]) -> None:
    """Makes a checkpoint from inside a validation one that begins with this validation.

    Lightning goes on inside a validation that had a batch under way (RESTARTED_MID_EVALUATION), at
    the batch where it was; that is the first here, since the sums of the others are not kept.
    """
    batches = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
    counts = dict.fromkeys(["ready", "started", "processed", "completed"], 0)
    batches |= {"current": counts, "total": counts | {"ready": 1, "started": 1}}
    batches["is_last_batch"] = False
