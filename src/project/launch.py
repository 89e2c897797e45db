"""A run: its folder, its ranks under torchrun's agent, its results and exit status.

The process that the user starts never becomes a rank. It composes the config, lets torchrun's
agent start the ranks from a fork server, waits for them and reports.
"""

import functools
import inspect
import itertools
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
from project.cli import closing_table, explained, open_streams, quoted
from project.devices import check_world, num_local_ranks
from project.errors import Preempted, RankFailed, UserError
from project.failure import (
    check_progress,
    clear,
    first_failure,
    next_attempt,
    preempted,
    tidy,
    write_preempted,
)
from project.files import write_json
from project.folder import in_use, read_results, shown
from project.rank import Train, run_rank
from project.resume import resumed, take_up
from project.schema import check_knobs
from project.stored import take_up_config


def start(main: Callable[..., Any], train: Train) -> None:
    """The entry of train.py: runs Hydra's `main`, or resumes a run, in the right process.

    Under torchrun rank 0 alone composes the config; the others wait for the folder of its run.
    """
    open_streams()
    try:
        with explained(main):
            _start(main, train)
    except UserError as error:
        sys.exit(f"train.py: {error}")
    except OSError as error:  # a read-only or full disk, met by this process
        if error.filename is None:
            raise
        sys.exit(f"train.py: {error.filename}: {error.strerror}.")
    except Preempted:  # a rank under an outside torchrun, which would start others anew
        sys.exit(0)
    except KeyboardInterrupt:  # while nothing runs yet
        sys.exit(128 + signal.SIGINT)
    finally:
        end_fork_server()


def _start(main: Callable[..., Any], train: Train) -> None:
    words = sys.argv[1:]
    folder = resumed(words)
    groups = Path(inspect.unwrap(main).__code__.co_filename).parent / "conf"
    begin = functools.partial(_resume, folder, words, groups, train) if folder else main
    if not dist.is_torchelastic_launched():
        start_fork_server()  # imports while this process composes
        begin()
    elif {"-m", "--multirun"} & set(words):
        sys.exit("A sweep starts ranks of its own: python train.py -m ..., without torchrun.")
    elif os.environ["RANK"] == "0":
        try:
            if folder := _folder_of_restarted():
                with in_use(folder):
                    _report(folder, train)
            else:
                begin()
        finally:  # after --help, say, the others need not wait
            if not _launcher_store().check(["folder"]):
                _launcher_store().set("folder", "")
    elif name := _launcher_store().get("folder").decode():
        _run_in_place(Path(name), train, _launcher_store())


def _resume(folder: Path, words: list[str], groups: Path, train: Train) -> None:
    with in_use(folder):
        undo = take_up(folder, words, groups)
        if undo is None:
            cfg: Any = OmegaConf.load(folder / ".hydra" / "config.yaml")
            print(f"already {closing_table(read_results(folder), folder, cfg)}", flush=True)
        else:
            _report(folder, train, undo)


def run_job(train: Train) -> None:
    """Runs the job that Hydra has composed."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    with in_use(folder):
        _report(folder, train)


def _report(folder: Path, train: Train, undo: Callable[[], None] = lambda: None) -> None:
    """Runs the job in `folder`; the one place where errors become messages."""
    print(f"run folder {shown(folder)}", flush=True)
    try:
        results = run(folder, train)
    except UserError as error:
        undo()
        sys.exit(f"train.py: {error}")
    except RankFailed as error:
        print(error.traceback, end="", file=sys.stderr)
        sys.exit(f"train.py: {error}. Run folder: {shown(folder)}")
    except Preempted as stopped:
        command = f"python train.py {quoted('resume', shown(folder))}"
        print(f"train.py: {stopped}. Go on with: {command}", file=sys.stderr)
        # An outside torchrun would start ranks that end otherwise anew.
        sys.exit(0 if dist.is_torchelastic_launched() else 128 + stopped.number)
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

    A folder with a checkpoint goes on, one with complete results returns them, an empty one begins.
    Ranks that die are started afresh, up to `launch.max_restarts` times.

    Returns:
        the content of `results.json`, with status "complete".

    Raises:
        UserError: the config asks for what cannot be.
        RankFailed: a rank failed; `results.json` has status "failed" and the reason.
        Preempted: a signal asked the run to stop; status "preempted".
    """
    if read_results(folder).get("status") == "complete":
        return read_results(folder)
    cfg: Any = OmegaConf.load(folder / ".hydra" / "config.yaml")
    try:
        if _folder_of_restarted():
            check_progress(folder, first_failure(folder))
        else:
            tidy(folder)
        clear(folder)
        if missing := OmegaConf.missing_keys(cfg):
            raise UserError(f"Give a value: {'=..., '.join(sorted(missing))}=...")
        check_knobs(cfg)
        if not cfg.fit:
            take_up_config(cfg, folder)
        _launch(folder, train, cfg)
    except (UserError, RankFailed) as error:
        stopped = preempted(folder)
        if stopped and isinstance(error, RankFailed):  # ranks that were stopped end like this
            raise stopped from None
        _write_failure(folder, str(error).splitlines()[0])
        raise
    except SignalException as error:
        stopped = preempted(folder) or Preempted(error.sigval)
        if read_results(folder).get("status") != "complete":
            write_preempted(folder, stopped)
        raise stopped from None
    tidy(folder)
    return read_results(folder)


def _launch(folder: Path, train: Train, cfg: Any) -> None:
    """Runs the ranks where config and environment say; afresh if they die."""
    num_ranks = num_local_ranks(cfg.trainer)
    if dist.is_torchelastic_launched():
        check_world(num_ranks, cfg.trainer)
        if path := _path_for_restarts():
            path.write_text(str(folder))
        _launcher_store().set("folder", str(folder))
        return _run_in_place(folder, train, _launcher_store())
    if cfg.launch.inplace:
        return _run_alone(folder, train, num_ranks)
    if cfg.trainer.num_nodes > 1:
        raise UserError("trainer.num_nodes > 1: start train.py with torchrun on every node.")
    first = next_attempt(folder)
    for attempt in itertools.count(first):
        try:
            return run_ranks(folder, train, num_ranks, attempt)
        except RankFailed as error:
            if preempted(folder) or attempt - first >= cfg.launch.max_restarts:
                raise
            check_progress(folder, error)
            again = f"Restart {attempt - first + 1} of {cfg.launch.max_restarts}"
            print(f"train.py: {error}. {again}.", file=sys.stderr, flush=True)
            clear(folder)
    raise AssertionError("unreachable")


def _write_failure(folder: Path, reason: str) -> None:
    """Leaves a completed result alone: what ends a rank after that takes nothing away."""
    if read_results(folder).get("status") != "complete":
        write_json(folder / "results.json", {"status": "failed", "reason": reason})


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
    except (Exception, Preempted) as error:
        raise first_failure(folder) or error from None


@functools.cache
def _launcher_store() -> dist.Store:
    """Where the ranks of an outside torchrun meet; in each attempt without what the last left."""
    store, _, _ = next(iter(dist.rendezvous("env://")))
    return dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def _path_for_restarts() -> Path | None:
    """Where the first attempt under an outside torchrun leaves its folder for the next.

    Beside the error files of all attempts, since the launcher's store may be new in each.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path).parents[2] / "run_folder" if path else None


def _folder_of_restarted() -> Path | None:
    """The folder to go on in, if this is not the first attempt under an outside torchrun."""
    path = _path_for_restarts() if dist.is_torchelastic_launched() else None
    if not path or not path.exists() or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        return None
    return Path(path.read_text())
