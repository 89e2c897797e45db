"""What an outside torchrun leaves for its ranks: a store to meet in, a folder for restarts."""

import functools
import os
from pathlib import Path

import torch.distributed as dist


@functools.cache
def store() -> dist.Store:
    """Where the ranks of an outside torchrun meet; in each attempt without what the last left."""
    shared, _, _ = next(iter(dist.rendezvous("env://")))
    return dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", shared)


def announce(folder: Path) -> None:
    """Rank 0 tells the others, and later attempts, where the run is."""
    if path := _note():
        path.write_text(str(folder))
    store().set("folder", str(folder))


def restarted() -> Path | None:
    """The folder to go on in, if this is not the first attempt under an outside torchrun."""
    path = _note() if dist.is_torchelastic_launched() else None
    if not path or not path.exists() or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        return None
    return Path(path.read_text())


def _note() -> Path | None:
    """A file for later attempts, beside the error files of all of them: their store is new."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path).parents[2] / "run_folder" if path else None
