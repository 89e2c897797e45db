"""One rank of a run: its environment, log file, process group, and what it says when it fails."""

import os
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import _utils as loaders

from project import signals
from project.console import open_streams
from project.devices import on_gpu, threads_a_rank
from project.errors import Preempted, RankFailed, UserError
from project.failure import dead_ranks, record_failure, text_of, write_report
from project.files import write_json
from project.heartbeat import beating, stacks_on_request
from project.logs import quiet, rank_logging
from project.processes import end_with_parent, end_workers, pid_file
from project.secret import hide

# Seconds after which a collective gives up that nobody found stuck. So long, since its clock also
# runs while everything is stopped (Ctrl-Z).
SLACK = 3600.0
LONG = 1e8  # seconds; launch.timeout may be infinite

Train = Callable[[DictConfig, Path], dict[str, Any]]


def run_rank(folder: Path, train: Train, store: dist.Store | None = None) -> None:
    """Trains as one rank of the run in `folder`; RANK and its siblings are in the environment.

    Rank 0 writes `results.json`. A failure is left in `ranks/<rank>-<attempt>.json` and raised.
    Signs of life go to `ranks/<rank>.beat`, at SIGUSR2 the stacks to `<rank>-<attempt>.stacks`.

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
    beats = beating(folder / "ranks" / f"{rank}.beat")
    stacks = stacks_on_request(report.with_suffix(".stacks"))
    pid = pid_file(folder / "ranks" / f"{rank}.pid")
    # Logging first, since its imports may take longer than a sign of life.
    with rank_logging(train_log, report), beats, stacks, pid, signals.handled():
        try:
            path = folder / ".hydra" / "config.yaml"
            hide(path.read_text())
            cfg: Any = OmegaConf.load(path)
            with signals.fatal() if int(os.environ["WORLD_SIZE"]) > 1 else nullcontext():
                _join_group(cfg, store)
            results = train(cfg, folder)
            dist.barrier()  # complete is what all ranks have completed
            signals.end()
            seconds = round(time.monotonic() - started, 3)
            if rank == 0:
                results = {"status": "complete", **results, "seconds": seconds}
                write_json(folder / "results.json", results)
        except BaseException as error:
            signals.end()
            number = error.number if isinstance(error, Preempted) else signals.requested()
            if number and not dead_ranks(folder):  # else the agent asks, since another died
                # An error, if another was asked too and left before.
                stopped = error if isinstance(error, Preempted) else Preempted(number)
                write_report(report, str(stopped), signal=int(number))
                end_workers()
                _leave_group()
                raise stopped from None
            # First of all, before the other ranks can notice and fail in their turn.
            record_failure(report, train_log, error, _mistake_behind(error))
            end_workers()
            if not torch.cuda.is_initialized():  # NCCL waits for collectives that will never end
                _leave_group()
            # Only an Exception makes the agent end the job: after others it waits for a result.
            if not isinstance(error, Exception | Preempted):
                raise RuntimeError(f"{type(error).__name__} inside a rank") from error
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
    text = text_of(error)
    first = text.partition("\n")[0]
    if "Expected more than 1 value per channel" in first:
        return f"{first}\nBatchNorm needs more images a rank: a larger data.batch_size."
    if isinstance(error, RuntimeError) and "CUDA" in first and "memory" in first.lower():
        return (
            f"{first}\nTry trainer.precision=bf16-mixed, trainer.accumulate_grad_batches=2 (the "
            f"same steps in smaller parts), a smaller data.batch_size, or more devices."
        )
    if isinstance(error, InstantiationException):
        key, cause = text.rpartition("full_key: ")[2], error.__cause__
        return f"{key}: {first} {type(cause).__name__}: {cause} (traceback in the run's train.log)"
    if "InvalidCxxCompiler" in text:
        return "compile=true needs a C++ compiler on CPUs (apt install g++)."
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    by_lightning = bool(frames) and frames[-1].f_globals["__name__"].startswith("lightning.")
    of_arguments = ValueError | TypeError | RuntimeError | MisconfigurationException
    if by_lightning and isinstance(error, of_arguments):
        return f"{' '.join(first.split())} (traceback in the run's train.log)"
    return None


def _join_group(cfg: DictConfig, store: dist.Store | None) -> None:
    """Makes the default group, which Lightning finds and keeps: the strategy stays "ddp"."""
    has_gpu = on_gpu(cfg.trainer)
    if has_gpu:
        devices, local_rank = cfg.trainer.devices, int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local_rank if isinstance(devices, int | str) else devices[local_rank])
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
        timeout=timedelta(seconds=min(cfg.launch.timeout + SLACK, LONG)),
        store=store,
        rank=-1 if store is None else int(os.environ["RANK"]),
        world_size=-1 if store is None else int(os.environ["WORLD_SIZE"]),
    )


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_process(
    folder: str, train: Train, attempt: int, environment: Mapping[str, str] | None
) -> None:
    """The entry point of a process that the agent starts from the fork server.

    Args:
        environment: variables of this job, if others run beside it: then the console is not its.
    """
    signals.restored()
    end_with_parent()
    open_streams()
    if environment is not None:
        os.environ.update(environment)
        quiet(Path(folder) / "ranks" / f"{os.environ['RANK']}-{attempt}.log")
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    torch.set_num_threads(threads_a_rank(int(os.environ["LOCAL_WORLD_SIZE"])))
    try:
        run_rank(Path(folder), train)
    except (Exception, Preempted) as error:
        loaders.python_exit_status = True  # none waits for its workers, which are gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it is on record; the parent shows the first
        # A rank that returned would wait for the agent, which may have been told to end.
        raise error if isinstance(error, Exception) else RankFailed(str(error)) from None
