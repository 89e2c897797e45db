"""The command line of train.py: a new run, or one to go on with; errors become messages."""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from project import outside, signals
from project.agent import end_fork_server, start_fork_server
from project.checkpoint import LAST
from project.cli import closing_table, explained, open_streams, quoted
from project.errors import Preempted, RankFailed, UserError
from project.folder import in_use, read_results, shown
from project.launch import run, run_in_place
from project.rank import Train
from project.resume import resumed, take_up
from project.secret import hidden


def start(main: Callable[..., Any], train: Train) -> None:
    """The entry of train.py: runs Hydra's `main`, or resumes a run, in the right process.

    Under torchrun rank 0 alone composes the config; the others wait for the folder of its run.
    """
    open_streams()
    signals.granted_at_once()
    try:
        with explained(main):
            _start(main, train)
    except UserError as error:
        sys.exit(f"train.py: {error}")
    except OSError as error:  # a read-only or full disk, met by this process
        if error.filename is None:
            raise
        sys.exit(f"train.py: {error.filename}: {error.strerror}.")
    except Preempted as stopped:  # while nothing runs yet, or a rank under an outside torchrun
        sys.exit(_status(stopped))
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
            if folder := outside.restarted():
                with in_use(folder):
                    _report(folder, train)
            else:
                begin()
        finally:  # after --help, say, the others need not wait
            if not outside.store().check(["folder"]):
                outside.store().set("folder", "")
    elif name := outside.store().get("folder").decode():
        run_in_place(Path(name), train, outside.store())


def _resume(folder: Path, words: list[str], groups: Path, train: Train) -> None:
    with in_use(folder):
        undo = take_up(folder, words, groups)
        if undo is None:
            cfg: Any = OmegaConf.load(folder / ".hydra" / "config.yaml")
            print(f"already {closing_table(read_results(folder), folder, cfg)}", flush=True)
        else:
            path = folder / ".hydra" / "hydra.yaml"
            began = path.exists() and OmegaConf.load(path).hydra.runtime.cwd
            if began and began != str(Path.cwd()):
                print(f"relative paths (data.root) start here; the run began in {began}")
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
        sys.exit(hidden(f"train.py: {error}"))
    except RankFailed as error:
        undo()
        print(error.traceback, end="", file=sys.stderr)
        where = _way_on(folder) if (folder / LAST).exists() else f"Run folder: {shown(folder)}"
        sys.exit(hidden(f"train.py: {error}. {where}"))
    except Preempted as stopped:
        print(f"train.py: {stopped}. {_way_on(folder)}", file=sys.stderr)
        sys.exit(_status(stopped))
    try:
        cfg: Any = OmegaConf.load(folder / ".hydra" / "config.yaml")
        table = closing_table(results, folder, cfg)
        with (folder / "train.log").open("a") as file:
            file.write(f"{table}\n")
        print(table, flush=True)
    except BrokenPipeError:  # nobody reads: Python's own flush at the end must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _way_on(folder: Path) -> str:
    return f"Go on with: python train.py {quoted('resume', shown(folder))}"


def _status(stopped: Preempted) -> int:
    """An outside torchrun would start anew what ends otherwise than with 0."""
    return 0 if dist.is_torchelastic_launched() else 128 + stopped.number
