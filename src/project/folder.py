"""The folder of a run: new, and never somebody else's."""

import contextlib
import fcntl
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from project.errors import UserError

LOCK = ".lock"  # of a sweep; that of a run lies in ranks/


def unused_folder(path: str) -> str:
    """Makes the first of `path`, `path-1`, `path-2`, ... that nobody has, and returns it.

    A Hydra resolver: two runs that start in the same second never share a folder.
    """
    for number in itertools.count():
        folder = Path(f"{path}-{number}" if number else path)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return str(folder)
    raise AssertionError("unreachable")


OmegaConf.register_new_resolver("unused_folder", unused_folder, use_cache=True, replace=True)


class RefuseUsedFolder(Callback):
    """Ends a command whose explicit folder holds a run, before its config is written over."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Looks at `hydra.run.dir`."""
        _refuse_used(config.hydra.run.dir, ".hydra", "results.json")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Looks at `hydra.sweep.dir`, unless the sweep is to go on there."""
        if not config.hydra.sweeper.get("resume"):
            _refuse_used(config.hydra.sweep.dir, "multirun.yaml", ".hydra")


def _refuse_used(folder: str, *signs: str) -> None:
    if any(Path(folder, sign).exists() for sign in signs):
        # Not by an Exception, of which Hydra would make a warning.
        sys.exit(f"train.py: {folder} already holds a run. Choose another folder.")


@contextlib.contextmanager
def in_use(folder: Path, lock: str = "ranks/lock") -> Iterator[None]:
    """Holds a run's folder for this process.

    Args:
        lock: file in it, made if it is not there.

    Raises:
        UserError: another holds it.
    """
    path = folder / lock
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:  # left there: to remove a lock is a race
        if not _locked(file, fcntl.LOCK_EX):
            raise UserError(f"{shown(folder)} is in use: its run is still going on.")
        yield


def is_in_use(folder: Path) -> bool:
    """Whether a process works in a run's folder just now."""
    path = folder / "ranks" / "lock"
    if not path.exists():
        return False
    with path.open() as file:
        return not _locked(file, fcntl.LOCK_SH)


def _locked(file: IO[str], how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_results(folder: Path) -> dict[str, Any]:
    """The content of `results.json`, empty if a run has not come to an end.

    Raises:
        UserError: it is damaged.
    """
    path = folder / "results.json"
    try:
        results = json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        results = None
    if not isinstance(results, dict):
        raise UserError(f"{path} is damaged. Without it the run goes on from its checkpoint.")
    return results


def shown(folder: Path) -> str:
    """A path as short as can be."""
    return min(os.path.relpath(folder), str(folder), key=len)
