"""The folder of a run: new, and never somebody else's."""

import contextlib
import itertools
import os
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf


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
    """Ends a command whose explicit folder holds a run, before Hydra writes over its config."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Looks at `hydra.run.dir`."""
        _refuse_used(config.hydra.run.dir, ".hydra", "results.json")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Looks at `hydra.sweep.dir`."""
        _refuse_used(config.hydra.sweep.dir, "multirun.yaml")


def _refuse_used(folder: str, *signs: str) -> None:
    if any(Path(folder, sign).exists() for sign in signs):
        # Not by an Exception, of which Hydra would make a warning.
        sys.exit(f"train.py: {folder} already holds a run. Choose another folder.")


def shown(folder: Path) -> str:
    """A path as short as can be."""
    return min(os.path.relpath(folder), str(folder), key=len)
