"""Which checkpoint files a run keeps: the last, the one before it, and the best."""

import logging
import pickle
from pathlib import Path
from typing import Any

import torch

from project.checkpoint import LAST, PREVIOUS
from project.files import link_atomically, write_atomically

log = logging.getLogger(__package__)

Entry = dict[str, Any]


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint atomically; `last.ckpt` becomes `previous.ckpt`.

    Raises:
        UserError: it cannot be written; all files are as they were.
    """
    previous = path.with_name(Path(PREVIOUS).name) if path.name == Path(LAST).name else None
    write_atomically(path, lambda file: torch.save(checkpoint, file), keep=previous)


def hand_on(source: Path, target: Path) -> None:
    """Writes the plain state dict of the network in a checkpoint."""
    state = torch.load(source, map_location="cpu", weights_only=True)["state_dict"]
    save({name.removeprefix("net."): value for name, value in state.items()}, target)


class Best:
    """The checkpoints of the highest val/acc; the first on ties, never NaN.

    `best.ckpt` is the very best. If there is room for more, each also has a file with its
    accuracy and step in its name. All are links to what was saved as the last.

    Args:
        folder: of the checkpoints.
        size: how many to keep.

    Attributes:
        entries: val/acc, val/loss and step of each, the best first.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.path = folder / "best.ckpt"
        self.entries: list[Entry] = []

    def enter(self, entry: Entry) -> Entry | None:
        """Returns the entry if it is among the best."""
        if entry["val/acc"] == entry["val/acc"]:  # not NaN
            entries = sorted([*self.entries, entry], key=lambda e: -e["val/acc"])  # is stable
            self.entries = entries[: self.size]
        return entry if entry in self.entries else None

    def link(self, entry: Entry, source: Path) -> None:
        """Gives the checkpoint `source` the file names of its entry; drops those that fell out."""
        if self.size > 1:
            link_atomically(source, self._own_path(entry))
        if entry is self.entries[0]:
            link_atomically(source, self.path)
        for path in {*self.folder.glob("acc-*.ckpt")} - {*map(self._own_path, self.entries)}:
            path.unlink()

    def adopt(self, source: Path, writes: bool) -> None:
        """Finds the files of the entries beside `source`, the checkpoint that they come from.

        What is not there any more is forgotten, and said.

        Args:
            writes: whether to give them their names in this folder; true on rank 0.
        """
        step = _step_of(source)
        found = {}
        for entry in self.entries:
            beside = source.with_name("best.ckpt"), source.parent / self._own_path(entry).name
            paths = [source] if entry["step"] == step else beside
            found[entry["step"]] = next((p for p in paths if _step_of(p) == entry["step"]), None)
        self.entries = [entry for entry in self.entries if found[entry["step"]]][: self.size]
        if lost := [step for step, path in found.items() if path is None]:
            log.warning("the checkpoint of step %s, so far the best, is not there any more", lost)
        if writes:
            for entry in self.entries:
                self.link(entry, found[entry["step"]])

    def _own_path(self, entry: Entry) -> Path:
        return self.folder / f"acc-{entry['val/acc']:.4f}-step-{entry['step']}.ckpt"


def _step_of(path: Path) -> int | None:
    """The optimizer step of a checkpoint, without reading its tensors; None if it is not one."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)["global_step"]
    except (OSError, RuntimeError, KeyError, pickle.UnpicklingError):
        return None
