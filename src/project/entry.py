"""The command line of train.py: a new run, or one to go on with; errors become messages.

Nothing here imports torch before a config is composed: `--help` needs none.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from project import outside, signals
from project.cli import asks_to_run, closing_table, explained, quoted
from project.console import open_streams, say
from project.errors import Preempted, RankFailed, UserError
from project.failure import write_preempted
from project.folder import in_use, read_results, shown
from project.processes import end_fork_server, start_fork_server
from project.search import OptunaSweeper
from project.secret import hidden
from project.sweeper import GridSweeper

if TYPE_CHECKING:
    from project.parallel import Share
    from project.rank import Train


def start(main: Callable[..., Any], train: "Train") -> None:
    """The entry of train.py: runs Hydra's `main`, or resumes a run, in the right process.

    Under torchrun rank 0 alone composes the config; the others wait for the folder of its run.
    """
    open_streams()
    signals.granted_at_once()
    _register([GridSweeper, OptunaSweeper], functools.partial(_work, train=train, in_sweep=True))
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
        say(f"train.py: {stopped}.", sys.stderr)
        sys.exit(_status(stopped))
    finally:
        signals.ignored()
        end_fork_server()


def _start(main: Callable[..., Any], train: "Train") -> None:
    words = sys.argv[1:]
    folder = _resumed(words)
    begin = functools.partial(_resume, folder, words, main, train) if folder else main
    if not outside.is_launched():
        if asks_to_run(words):
            start_fork_server()  # imports while this process composes
        begin()
    elif os.environ["RANK"] == "0":
        try:
            if folder := outside.restarted():
                _end(_work(folder, train))
            else:
                begin()
        finally:  # after --help, say, the others need not wait
            if not outside.store().check(["folder"]):
                outside.store().set("folder", "")
    elif name := outside.store().get("folder").decode():
        with signals.held():
            from project.launch import run_outside
        run_outside(Path(name), train)


def _resumed(words: list[str]) -> Path | None:
    if not any("resume=" in word for word in words):
        return None
    with signals.held():
        from project.resume import resumed
    return resumed(words)


def _resume(folder: Path, words: list[str], main: Callable[..., Any], train: "Train") -> None:
    from project.resume import is_sweep, take_up, take_up_sweep

    groups = Path(inspect.unwrap(main).__code__.co_filename).parent / "conf"
    if is_sweep(folder):
        sys.argv[1:] = take_up_sweep(folder, words, groups)
        _say_where(folder / "multirun.yaml")
        main()
        return
    with in_use(folder):
        undo = take_up(folder, words, groups)
        if undo is None:
            cfg: Any = OmegaConf.load(folder / ".hydra" / "config.yaml")
            say(f"already {closing_table(read_results(folder), folder, cfg)}")
        else:
            _say_where(folder / ".hydra" / "hydra.yaml")
            _end(_report(folder, train, undo))


def _say_where(path: Path) -> None:
    began = path.exists() and OmegaConf.load(path).hydra.runtime.cwd
    if began and began != str(Path.cwd()):
        say(f"relative paths (data.root) start here; the run began in {began}")


def run_job(train: "Train") -> None:
    """Runs the job that Hydra has composed."""
    _end(_work(Path(HydraConfig.get().runtime.output_dir), train))


def _end(status: int) -> None:
    if status:
        sys.exit(status)


def _work(
    folder: Path, train: "Train", in_sweep: bool = False, share: "Share | None" = None
) -> int:
    with in_use(folder):
        return _report(folder, train, in_sweep=in_sweep, share=share)


def _report(
    folder: Path,
    train: "Train",
    undo: Callable[[], None] = lambda: None,
    in_sweep: bool = False,
    share: "Share | None" = None,
) -> int:
    """Runs the job in `folder`, the one place where errors become messages; its exit status."""
    try:
        with signals.held():
            say(f"run folder {shown(folder)}")
            from project.launch import run
        results = run(folder, train, share)
    except UserError as error:
        undo()
        say(hidden(f"train.py: {error}"), sys.stderr)
        return 1
    except RankFailed as error:
        from project.checkpoint import LAST

        undo()
        where = "" if (folder / LAST).exists() else "Nothing was saved yet. "
        where += _way_on(folder)
        say(hidden(f"{error.traceback}train.py: {error}. {where}"), sys.stderr)
        return 1
    except Preempted as stopped:
        if not read_results(folder):  # it came before the run began
            write_preempted(folder, stopped)
        if not in_sweep:  # which says so itself
            say(f"train.py: {stopped}. {_way_on(folder)}", sys.stderr)
        return _status(stopped)
    cfg: Any = OmegaConf.load(folder / ".hydra" / "config.yaml")
    table = closing_table(results, folder, cfg)
    with (folder / "train.log").open("a") as file:
        file.write(f"{table}\n")
    say(table)
    return 0


def _way_on(folder: Path) -> str:
    return f"Go on with: python train.py {quoted('resume', shown(folder))}"


def _status(stopped: Preempted) -> int:
    """An outside torchrun would start anew what ends otherwise than with 0."""
    return 0 if outside.is_launched() else stopped.status


def _register(sweepers: Sequence[type[GridSweeper]], work: Callable[..., int]) -> None:
    """Tells Hydra of our sweepers, and them of what a job is.

    Hydra takes plugins from its namespace package hydra_plugins only (Plugins._instantiate), which
    all projects of an environment share; ours stay in the package that they are for.
    """
    names = [f"{sweeper.__module__}.{sweeper.__name__}" for sweeper in sweepers]
    known = Plugins.is_in_toplevel_plugins_module
    Plugins.is_in_toplevel_plugins_module = staticmethod(  # type: ignore[method-assign]
        lambda clazz: clazz in names or known(clazz)
    )
    for sweeper in sweepers:
        sweeper.work = staticmethod(work)
        Plugins.instance().register(sweeper)
