"""One rank of a run: its environment, log file, process group, and what it says when it fails."""

import contextlib
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from project import signals
from project.devices import on_gpu, threads_a_rank
from project.errors import Preempted, RankFailed, UserError
from project.failure import end_with_parent, pid_file, record_failure, write_preempted
from project.files import write_json

# Upstream's warnings that do not apply here, by a pattern of how they begin.
UNFOUNDED = (
    "It is recommended to use `self.log",  # asks for sync_dist; our values are reduced already
    "`isinstance.treespec, LeafSpec.` is deprecated",  # Lightning 2.6.6 on torch 2.14
    "Total length of `list` across ranks is zero",  # data.val_fraction=0 asks for no validation
    "The number of training batches .* is smaller than the logging interval",
    "You're resuming from a checkpoint that ended before the epoch ended",  # exactly, see resume.py
    "The '.*_dataloader' does not have many workers",  # batches are slices of a mapped array
)

Train = Callable[[DictConfig, Path], dict[str, Any]]

log = logging.getLogger("project")


def run_rank(folder: Path, train: Train, store: dist.Store | None = None) -> None:
    """Trains as one rank of the run in `folder`; RANK and its siblings are in the environment.

    Rank 0 writes `results.json`. A failure is left in `ranks/<rank>-<attempt>.json` and raised.

    Raises:
        Preempted: a signal asked the run to stop, and it has stopped.

    Args:
        train: the program, from config and folder to results.
        store: where the ranks meet, if they have met already (under an outside torchrun).
    """
    started = time.monotonic()
    rank, attempt = int(os.environ["RANK"]), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]  # else Lightning takes the ranks for SLURM's
    report = folder / "ranks" / f"{rank}-{attempt}"
    report.parent.mkdir(exist_ok=True)
    train_log = folder / "train.log" if rank == 0 else None
    pid = pid_file(folder / "ranks" / f"{rank}.pid")
    with pid, _logging(train_log, report), signals.handled():
        try:
            cfg: Any = OmegaConf.load(folder / ".hydra" / "config.yaml")
            _join_group(cfg, store)
            results = train(cfg, folder)
            dist.barrier()  # complete is what all ranks have completed
            signals.end()
            seconds = round(time.monotonic() - started, 3)
            if rank == 0:
                results = {"status": "complete", **results, "seconds": seconds}
                write_json(folder / "results.json", results)
        except Preempted as stopped:
            signals.end()
            if rank == 0:
                log.info("%s", stopped)
                write_preempted(folder, stopped)
            _leave_group()
            raise
        except (Exception, SystemExit) as error:
            signals.end()
            # First of all, before the other ranks can notice and fail in their turn.
            record_failure(report, train_log, error, _mistake_behind(error))
            if not torch.cuda.is_initialized():  # NCCL waits for collectives that will never end
                _leave_group()
            # Only an exception makes the agent end the job: an early exit with status 0 would not.
            if isinstance(error, SystemExit):
                raise RuntimeError(f"sys.exit({error.code}) inside a rank") from error
            raise
        _leave_group()


def _mistake_behind(error: BaseException) -> str | None:
    """What to tell a user who can mend it, None if the program is at fault."""
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    link: BaseException | None = error
    while link is not None:  # Hydra's instantiate wraps what it raises
        if isinstance(link, UserError):
            return str(link)
        link = link.__cause__
    first = str(error).partition("\n")[0]
    if "Expected more than 1 value per channel" in first:
        return f"{first}\nBatchNorm needs more images a rank: a larger data.batch_size."
    if isinstance(error, RuntimeError) and "CUDA" in first and "memory" in first.lower():
        return (
            f"{first}\nTry trainer.precision=bf16-mixed, trainer.accumulate_grad_batches=2 (the "
            f"same steps in smaller parts), a smaller data.batch_size, or more devices."
        )
    if isinstance(error, InstantiationException):
        key, cause = str(error).rpartition("full_key: ")[2], error.__cause__
        return f"{key}: {first} {type(cause).__name__}: {cause} (traceback in the run's train.log)"
    if "InvalidCxxCompiler" in str(error):
        return "compile=true needs a C++ compiler on CPUs (apt install g++)."
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    by_lightning = bool(frames) and frames[-1].f_globals["__name__"].startswith("lightning.")
    of_arguments = ValueError | TypeError | RuntimeError | MisconfigurationException
    if by_lightning and isinstance(error, of_arguments):
        return f"{' '.join(first.split())} (traceback in the run's train.log)"
    return None


class Console(logging.StreamHandler):
    """Keeps clear of the bar, and goes quiet when nobody reads any more (`train.py | head`)."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Leaves out what the bar shows."""
        return not getattr(record, "on_bar", False)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes above the bar."""
        with tqdm.external_write_mode(self.stream):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Training goes on; train.log has it all."""
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            super().handleError(record)


@contextlib.contextmanager
def _logging(train_log: Path | None, report: Path) -> Iterator[None]:
    """Rank 0 speaks on the console and in `train_log`; the others only in `ranks/`, prints too."""
    handlers: list[logging.Handler] = [Console(sys.stdout)]
    if train_log:
        handlers.append(logging.FileHandler(train_log))
        handlers[-1].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    else:
        with report.with_suffix(".log").open("ab") as file:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(file.fileno(), stream.fileno())
    import lightning.pytorch  # sets its loggers up when imported: so before they are changed here

    tqdm.set_lock(threading.RLock())  # its own would start a process to track semaphores
    root = logging.getLogger()
    before = root.level, root.handlers
    root.setLevel(logging.INFO)
    root.handlers = handlers
    lightning.pytorch._logger.setLevel(logging.WARNING)  # no tips, no notices
    logging.captureWarnings(True)
    for pattern in UNFOUNDED:
        warnings.filterwarnings("ignore", pattern)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.level, root.handlers = before
        for handler in handlers:
            handler.close()


def _join_group(cfg: DictConfig, store: dist.Store | None) -> None:
    """Makes the default group, which Lightning finds and keeps: the strategy stays "ddp"."""
    has_gpu = on_gpu(cfg.trainer)
    if has_gpu:
        devices, local_rank = cfg.trainer.devices, int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local_rank if isinstance(devices, int | str) else devices[local_rank])
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
        timeout=timedelta(seconds=cfg.launch.timeout),
        store=store,
        rank=-1 if store is None else int(os.environ["RANK"]),
        world_size=-1 if store is None else int(os.environ["WORLD_SIZE"]),
    )


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_process(folder: str, train: Train, attempt: int) -> None:
    """The entry point of a process that the agent starts from the fork server."""
    end_with_parent()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    torch.set_num_threads(threads_a_rank(int(os.environ["LOCAL_WORLD_SIZE"])))
    try:
        run_rank(Path(folder), train)
    except (Exception, Preempted) as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it is on record; the parent shows the first
        # A rank that returned would wait for the agent, which may have been told to end.
        raise error if isinstance(error, Exception) else RankFailed(str(error)) from None
