"""One rank of a run: its environment, log file, process group, and what it says when it fails."""

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from project.errors import UserError
from project.files import write_json

# Upstream's warnings that do not apply here, by a pattern of how they begin.
UNFOUNDED = (
    "It is recommended to use `self.log",  # asks for sync_dist; our values are reduced already
    "`isinstance.treespec, LeafSpec.` is deprecated",  # Lightning 2.6.6 on torch 2.14
    "The '.*_dataloader' does not have many workers",  # batches are slices of a mapped array
)

Train = Callable[[DictConfig, Path], dict[str, Any]]

log = logging.getLogger("project")


def run_rank(folder: Path, train: Train, store: dist.Store | None = None) -> None:
    """Trains as one rank of the run in `folder`; RANK and its siblings are in the environment.

    Rank 0 writes `results.json`. A failure is left in `ranks/<rank>-<attempt>.json` and raised.

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
    with _pid_file(folder / "ranks" / f"{rank}.pid"), _logging(train_log, report):
        try:
            cfg: Any = OmegaConf.load(folder / ".hydra" / "config.yaml")
            _join_group(cfg, store)
            results = train(cfg, folder)
            seconds = round(time.monotonic() - started, 3)
            if rank == 0:
                results = {"status": "complete", **results, "seconds": seconds}
                write_json(folder / "results.json", results)
        except (Exception, SystemExit) as error:
            # First of all, before the other ranks can notice and fail in their turn.
            _record_failure(report.with_suffix(".json"), error)
            # Only an exception makes the agent end the job: an early exit with status 0 would not.
            raise RuntimeError(f"exit {error.code}") if isinstance(error, SystemExit) else error
        finally:
            _leave_group(failed=sys.exc_info()[0] is not None)


def cause_of(error: BaseException | None) -> UserError | None:
    """The user's mistake behind an exception; Hydra's instantiate wraps what it raises."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__
    return error


def _record_failure(path: Path, error: BaseException) -> None:
    mistake = cause_of(error)
    if mistake is None:
        log.error(traceback.format_exc().rstrip())
    content = {
        "time": time.time(),
        "error": str(mistake) if mistake else f"{type(error).__name__}: {error}",
        "traceback": None if mistake else traceback.format_exc(),
    }
    write_json(path, content)


@contextlib.contextmanager
def _pid_file(path: Path) -> Iterator[None]:
    path.write_text(f"{os.getpid()}\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _logging(train_log: Path | None, report: Path) -> Iterator[None]:
    """Rank 0 speaks on the console and in `train_log`; the others only in `ranks/`, prints too."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    if train_log:
        handlers.append(logging.FileHandler(train_log))
        handlers[-1].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    else:
        with report.with_suffix(".log").open("ab") as file:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(file.fileno(), stream.fileno())
    root, before = logging.getLogger(), logging.getLogger().level
    logging.captureWarnings(True)
    for beginning in UNFOUNDED:
        warnings.filterwarnings("ignore", beginning)
    root.setLevel(logging.INFO)
    for name in ("lightning.pytorch", "lightning.fabric"):  # their tips and notices
        logging.getLogger(name).setLevel(logging.WARNING)
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(before)
        logging.captureWarnings(False)


def _join_group(cfg: DictConfig, store: dist.Store | None) -> None:
    """Makes the default group, which Lightning finds and keeps: the strategy stays "ddp"."""
    on_gpu = cfg.trainer.accelerator in ("gpu", "cuda", "auto") and torch.cuda.is_available()
    if on_gpu:
        devices, local_rank = cfg.trainer.devices, int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local_rank if isinstance(devices, int | str) else devices[local_rank])
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        timeout=timedelta(seconds=cfg.launch.timeout),
        store=store,
        rank=int(os.environ["RANK"]) if store else -1,
        world_size=int(os.environ["WORLD_SIZE"]) if store else -1,
    )


def _leave_group(failed: bool) -> None:
    # After a failure NCCL would wait here for collectives that never end.
    if dist.is_initialized() and not (failed and torch.cuda.is_initialized()):
        dist.destroy_process_group()


def rank_process(folder: str, train: Train) -> None:
    """The entry point of a process that the agent starts from the fork server."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threads = os.environ.get("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(int(threads) if threads else max((cores or 1) // local_ranks, 1))
    run_rank(Path(folder), train)


def _end_with_parent() -> None:
    """No rank outlives the process that the user started, not even if that one is SIGKILLed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
