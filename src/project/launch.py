"""A run: its folder, its ranks under torchrun's agent, its results and exit status.

The process that the user starts never becomes a rank. It composes the config, lets torchrun's
agent start the ranks from a fork server, waits for them and reports.
"""

import itertools
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing.errors import record

from project import outside
from project.agent import run_ranks
from project.devices import check_world, num_local_ranks
from project.errors import Preempted, RankFailed, UserError
from project.failure import (
    check_progress,
    clear,
    first_report,
    next_attempt,
    note,
    tidy,
    write_failed,
    write_preempted,
)
from project.folder import read_results
from project.parallel import Share
from project.processes import sweep_up
from project.rank import Train, run_rank
from project.schema import check_knobs
from project.secret import hide
from project.stored import take_up_config


def run(folder: Path, train: Train, share: Share | None = None) -> dict[str, Any]:
    """Trains the run in `folder` on as many ranks as its config says.

    A folder with a checkpoint goes on, one with complete results returns them, an empty one begins.
    Ranks that die are started afresh, up to `launch.max_restarts` times.

    Args:
        train: the program of each rank.
        share: what the ranks get of the machine, if other jobs run at the same time.

    Returns:
        the content of `results.json`, with status "complete".

    Raises:
        UserError: the config asks for what cannot be.
        RankFailed: a rank failed; `results.json` has status "failed" and the reason.
        Preempted: a signal asked the run to stop; status "preempted".
    """
    if read_results(folder).get("status") == "complete":
        return read_results(folder)
    path = folder / ".hydra" / "config.yaml"
    hide(path.read_text())
    cfg: Any = OmegaConf.load(path)
    try:
        if outside.restarted():
            check_progress(folder, first_report(folder))
        else:
            tidy(folder)
        if not dist.is_torchelastic_launched():
            sweep_up(folder)  # after one whose parent was killed just now
        clear(folder)
        if missing := OmegaConf.missing_keys(cfg):
            raise UserError(f"Give a value: {'=..., '.join(sorted(missing))}=...")
        check_knobs(cfg)
        if not cfg.fit:
            take_up_config(cfg, folder)
        _launch(folder, train, cfg, share)
        results = read_results(folder)
        if results.get("status") != "complete":
            raise RankFailed("the ranks ended in order, but without results")
    except (UserError, RankFailed) as error:
        write_failed(folder, str(error).splitlines()[0])
        raise
    except Preempted as error:
        report = first_report(folder)
        stopped = report if isinstance(report, Preempted) else error
        if read_results(folder).get("status") != "complete":
            write_preempted(folder, stopped)
        raise stopped from None
    tidy(folder)
    return results


def _launch(folder: Path, train: Train, cfg: Any, share: Share | None) -> None:
    """Runs the ranks where config and environment say; afresh if they die."""
    num_ranks = num_local_ranks(cfg.trainer)
    if dist.is_torchelastic_launched():
        check_world(num_ranks, cfg.trainer)
        outside.announce(folder)
        return run_outside(folder, train)
    if cfg.launch.inplace and share:
        raise UserError("launch.inplace trains in this process, one job of a sweep at a time.")
    if cfg.launch.inplace:
        return _run_alone(folder, train, num_ranks)
    if cfg.trainer.num_nodes > 1:
        raise UserError("trainer.num_nodes > 1: start train.py with torchrun on every node.")
    first = next_attempt(folder)
    for attempt in itertools.count(first):
        try:
            with share(cfg.trainer, num_ranks) if share else nullcontext() as environment:
                timeout = cfg.launch.timeout
                return run_ranks(folder, train, num_ranks, timeout, attempt, environment)
        except RankFailed as error:
            if attempt - first >= cfg.launch.max_restarts:
                raise
            check_progress(folder, error)
            again = f"{error}. Restart {attempt - first + 1} of {cfg.launch.max_restarts}."
            print(f"train.py: {again}", file=sys.stderr, flush=True)
            note(folder, again)
            clear(folder)
    raise AssertionError("unreachable")


def _run_alone(folder: Path, train: Train, num_ranks: int) -> None:
    """Trains in this process, for debuggers, in the environment of a single rank."""
    if num_ranks > 1:
        raise UserError(f"launch.inplace trains one rank, trainer.devices asks for {num_ranks}.")
    names = "RANK LOCAL_RANK GROUP_RANK TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS"
    before = os.environ.copy()
    os.environ.update(dict.fromkeys(names.split(), "0"), TORCHELASTIC_RUN_ID="inplace")
    os.environ.update(WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", GROUP_WORLD_SIZE="1")
    try:
        run_in_place(folder, train, dist.HashStore())
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_outside(folder: Path, train: Train) -> None:
    """Trains as a rank that an outside torchrun has started."""
    cfg: Any = OmegaConf.load(folder / ".hydra" / "config.yaml")
    with outside.watched(folder, cfg.launch.timeout):
        run_in_place(folder, train, outside.store())


def run_in_place(folder: Path, train: Train, store: dist.Store) -> None:
    """Trains as a rank in this process; `record` tells an outside torchrun of a failure."""
    try:
        record(run_rank)(folder, train, store)
    except (Exception, Preempted) as error:
        raise first_report(folder) or error from None
