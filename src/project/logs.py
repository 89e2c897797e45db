"""Where a rank speaks: rank 0 on the console and in train.log, the others in their files."""

import contextlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from project.secret import hidden

# Upstream's warnings that do not apply here, by a pattern of how they begin.
UNFOUNDED = (
    "It is recommended to use `self.log",  # asks for sync_dist; our values are reduced already
    "`isinstance.treespec, LeafSpec.` is deprecated",  # Lightning 2.6.6 on torch 2.14
    "Total length of `list` across ranks is zero",  # data.val_fraction=0 asks for no validation
    "The number of training batches .* is smaller than the logging interval",
    "You're resuming from a checkpoint that ended before the epoch ended",  # exactly, see resume.py
    "The '.*_dataloader' does not have many workers",  # batches are slices of a mapped array
)


class Discreet(logging.Formatter):
    """Tells no secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """A record as text."""
        return hidden(super().format(record))


class Console(logging.StreamHandler):
    """Keeps clear of the bar."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Leaves out what the bar shows."""
        return not getattr(record, "on_bar", False)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes above the bar."""
        with tqdm.external_write_mode(self.stream):
            super().emit(record)


def quiet(path: Path) -> None:
    """From here on what this process prints is appended to a file."""
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())


@contextlib.contextmanager
def rank_logging(train_log: Path | None, report: Path) -> Iterator[None]:
    """Rank 0 speaks on the console and in `train_log`; the others only in `ranks/`, prints too."""
    handlers: list[logging.Handler] = [Console(sys.stdout)]
    handlers[0].setFormatter(Discreet())
    if train_log:
        handlers.append(logging.FileHandler(train_log))
        handlers[-1].setFormatter(Discreet("%(asctime)s %(levelname)s %(message)s"))
    else:
        quiet(report.with_suffix(".log"))
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
