"""A run: its folder, its ranks under torchrun's agent, its results and exit status.

The process that the user starts never becomes a rank. It composes the config, lets torchrun's
agent start the ranks from a fork server, waits for them and reports.
"""

import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import record

from project.agent import end_fork_server, run_ranks, start_fork_server
from project.cli import closing_table, explained, open_streams
from project.devices import check_world, num_local_ranks
from project.errors import RankFailed, UserError
from project.failure import first_failure
from project.files import write_json
from project.folder import shown
from project.rank import Train, run_rank
from project.schema import check_knobs
from project.stored import take_up_config


def start(main: Callable[..., Any], train: Train) -> None:
    """The entry of train.py: runs Hydra's `main` in the right process.

    Under torchrun rank 0 alone composes the config; the others wait for the folder of its run.
    """
    open_streams()
    try:
        with explained(main):
            _start(main, train)
    except UserError as error:
        sys.exit(f"train.py: {error}")
    except KeyboardInterrupt:  # while nothing runs yet
        sys.exit(128 + signal.SIGINT)
    finally:
        end_fork_server()


def _start(main: Callable[..., Any], train: Train) -> None:
    if not dist.is_torchelastic_launched():
        start_fork_server()  # imports while this process composes
        main()
    elif {"-m", "--multirun"} & set(sys.argv):
        sys.exit("A sweep starts ranks of its own: python train.py -m ..., without torchrun.")
    elif os.environ["RANK"] == "0":
        try:
            main()
        finally:  # after --help, say, the others need not wait
            if not _launcher_store().check(["folder"]):
                _launcher_store().set("folder", "")
    elif folder := _launcher_store().get("folder").decode():
        _run_in_place(Path(folder), train, _launcher_store())


def run_job(train: Train) -> None:
    """Runs the job that Hydra has composed; the one place where errors become messages."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    print(f"run folder {shown(folder)}", flush=True)
    try:
        results = run(folder, train)
    except UserError as error:
        sys.exit(f"train.py: {error}")
    except RankFailed as error:
        print(error.traceback, end="", file=sys.stderr)
        sys.exit(f"train.py: {error}. Run folder: {shown(folder)}")
    except SignalException as stopped:
        reason = f"stopped by {signal.Signals(stopped.sigval).name}"
        _write_failure(folder, reason)
        print(f"train.py: {reason}. Run folder: {shown(folder)}", file=sys.stderr)
        sys.exit(128 + stopped.sigval)
    try:
        cfg: Any = OmegaConf.load(folder / ".hydra" / "config.yaml")
        table = closing_table(results, folder, cfg)
        with (folder / "train.log").open("a") as file:
            file.write(f"{table}\n")
        print(table, flush=True)
    except BrokenPipeError:  # nobody reads: Python's own flush at the end must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(folder: Path, train: Train) -> dict[str, Any]:
    """Trains the run in `folder` on as many ranks as its config says.

    Returns:
        the content of `results.json`, with status "complete".

    Raises:
        UserError: the config asks for what cannot be.
        RankFailed: a rank failed; `results.json` has status "failed" and the reason.
    """
    cfg: Any = OmegaConf.load(folder / ".hydra" / "config.yaml")
    results = folder / "results.json"
    for stale in (results, *folder.glob("ranks/*.json"), *folder.glob("ranks/*.pid")):
        stale.unlink(missing_ok=True)  # success and failure are what this attempt writes
    try:
        if missing := OmegaConf.missing_keys(cfg):
            raise UserError(f"Give a value: {'=..., '.join(sorted(missing))}=...")
        check_knobs(cfg)
        if not cfg.fit:
            take_up_config(cfg, folder)
        num_ranks = num_local_ranks(cfg.trainer)
        if dist.is_torchelastic_launched():
            check_world(num_ranks, cfg.trainer)
            _launcher_store().set("folder", str(folder))
            _run_in_place(folder, train, _launcher_store())
        elif cfg.launch.inplace:
            _run_alone(folder, train, num_ranks)
        elif cfg.trainer.num_nodes > 1:
            raise UserError("trainer.num_nodes > 1: start train.py with torchrun on every node.")
        else:
            run_ranks(folder, train, num_ranks)
    except (UserError, RankFailed) as error:
        _write_failure(folder, str(error).splitlines()[0])
        raise
    return json.loads(results.read_text())


def _write_failure(folder: Path, reason: str) -> None:
    """Leaves a completed result alone: what ends a rank after that takes nothing away."""
    results = folder / "results.json"
    if not results.exists():
        write_json(results, {"status": "failed", "reason": reason})


def _run_alone(folder: Path, train: Train, num_ranks: int) -> None:
    """Trains in this process, for debuggers, in the environment of a single rank."""
    if num_ranks > 1:
        raise UserError(f"launch.inplace trains one rank, trainer.devices asks for {num_ranks}.")
    names = "RANK LOCAL_RANK GROUP_RANK TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS"
    before = os.environ.copy()
    os.environ.update(dict.fromkeys(names.split(), "0"), TORCHELASTIC_RUN_ID="inplace")
    os.environ.update(WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", GROUP_WORLD_SIZE="1")
    try:
        _run_in_place(folder, train, dist.HashStore())
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run_in_place(folder: Path, train: Train, store: dist.Store) -> None:
    """Trains as a rank in this process; `record` tells an outside torchrun of a failure."""
    try:
        record(run_rank)(folder, train, store)
    except Exception as error:
        raise first_failure(folder) or error from None


@functools.cache
def _launcher_store() -> dist.Store:
    """Where the ranks of an outside torchrun meet."""
    store, _, _ = next(iter(dist.rendezvous("env://")))
    return store
