"""What a run changes in Lightning 2.6.6, in one place; a test holds that it is still there."""

from typing import Any


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


def begin_validation_anew(checkpoint: dict[str, Any]) -> None:
    """Makes a checkpoint from inside a validation one that begins with this validation.

    Lightning goes on inside a validation that had a batch under way (RESTARTED_MID_EVALUATION), at
    the batch where it was; that is the first here, since the sums of the others are not kept.
    """
    batches = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
    counts = dict.fromkeys(["ready", "started", "processed", "completed"], 0)
    batches |= {"current": counts, "total": counts | {"ready": 1, "started": 1}}
    batches["is_last_batch"] = False
