"""Checkpoint files, without training."""

import inspect
import os
import pickle
from pathlib import Path

import pytest
import torch

from project.checkpoint_io import PlainCheckpointIO
from project.errors import UserError
from project.files import write_atomically
from project.keep import Best

NAN = float("nan")


def train(best: Best, accuracies: list[float]) -> None:
    """Saves after each of these val/acc, at steps 10, 20, ..."""
    for number, accuracy in enumerate(accuracies, 1):
        last = best.folder / "last.ckpt"
        PlainCheckpointIO().save_checkpoint({"global_step": 10 * number}, last)
        if entry := best.enter({"step": 10 * number, "val/acc": accuracy}):
            best.link(entry, last)


def step_of(path: Path) -> int:
    return torch.load(path, weights_only=True)["global_step"]


@pytest.mark.parametrize(
    ("accuracies", "best_step"),
    [([0.1, 0.9, 0.2], 20), ([0.5, 0.7, 0.7], 20), ([NAN, 0.1, NAN], 20), ([0.0, NAN], 10)],
)
def test_best_is_the_highest_the_first_on_ties_and_never_nan(tmp_path, accuracies, best_step):
    best = Best(tmp_path, size=1)
    train(best, accuracies)
    assert step_of(tmp_path / "best.ckpt") == best_step
    assert step_of(tmp_path / "last.ckpt") == 10 * len(accuracies)
    assert step_of(tmp_path / "previous.ckpt") == 10 * len(accuracies) - 10
    assert [entry["step"] for entry in best.entries] == [best_step]


def test_nan_alone_is_no_best(tmp_path):
    best = Best(tmp_path, size=1)
    train(best, [NAN, NAN])
    assert not best.entries
    assert not best.path.exists()


def test_the_best_three_are_kept_under_their_accuracy_and_step(tmp_path):
    train(Best(tmp_path, size=3), [0.5, 0.2, 0.9, 0.3, 0.9, 0.1])
    names = {path.name: step_of(path) for path in tmp_path.glob("acc-*")}
    assert names == {
        "acc-0.5000-step-10.ckpt": 10,
        "acc-0.9000-step-30.ckpt": 30,
        "acc-0.9000-step-50.ckpt": 50,
    }
    assert step_of(tmp_path / "best.ckpt") == 30


@pytest.mark.parametrize("size", [1, 2])
def test_another_folder_takes_up_the_best_files_that_are_still_there(tmp_path, size, caplog):
    best, other = Best(tmp_path / "a", size), Best(tmp_path / "b", size)
    train(best, [0.3, 0.9, 0.5])
    other.entries, other_step = [*best.entries], step_of(tmp_path / "a/last.ckpt")
    other.folder.mkdir()
    other.adopt(tmp_path / "a/last.ckpt", writes=True)
    assert other_step == 30
    assert other.entries == best.entries
    assert step_of(other.path) == 20
    best.path.unlink()
    (tmp_path / "a/acc-0.9000-step-20.ckpt").unlink(missing_ok=True)
    other.adopt(tmp_path / "a/last.ckpt", writes=True)
    assert [entry["step"] for entry in other.entries] == ([30] if size == 2 else [])
    assert "step [20]" in caplog.text


def test_the_older_goes_only_after_the_newer_is_safely_there(tmp_path, monkeypatch):
    """A kill between any two of these leaves a last or a previous that is whole."""
    io, path = PlainCheckpointIO(), tmp_path / "last.ckpt"
    for step in 10, 20:
        io.save_checkpoint({"global_step": step}, path)
    seen = []

    def look(number: int) -> None:
        seen.append([step_of(tmp_path / f"{name}.ckpt") for name in ("last", "previous")])

    monkeypatch.setattr(os, "fsync", look)
    io.save_checkpoint({"global_step": 30}, path)
    assert seen == [[20, 10]]
    assert [step_of(tmp_path / f"{name}.ckpt") for name in ("last", "previous")] == [30, 20]


def test_what_the_one_agreement_replaces_is_still_there_upstream():
    """RunRecord.setup puts attributes in the place of these methods of Lightning."""
    from lightning.pytorch.loops.fit_loop import _FitLoop
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    assert callable(_TrainingEpochLoop._broadcast_sigterm_tensor)
    assert callable(_SignalConnector.register_signal_handlers)
    assert callable(_FitLoop._iteration_based_training)
    source = inspect.getsource(_TrainingEpochLoop.advance)
    assert "self._broadcast_sigterm_tensor()" in source
    assert "_sigterm_notifier_fn" in inspect.getsource(_SignalConnector.register_signal_handlers)
    assert "self._iteration_based_training()" in inspect.getsource(_FitLoop.on_run_start)


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "fsync", lambda number: seen.append((tmp_path / "a").exists()))
    write_atomically(tmp_path / "a", lambda file: file.write(b"x"))
    assert seen == [False]
    assert (tmp_path / "a").read_bytes() == b"x"


def test_a_write_that_fails_leaves_the_earlier_file_and_no_part(tmp_path):
    path = tmp_path / "last.ckpt"
    PlainCheckpointIO().save_checkpoint({"step": 1}, path)

    def fail(file) -> None:
        file.write(b"half")
        raise OSError("disk full")

    with pytest.raises(UserError, match=r"last.ckpt cannot be written: disk full\."):
        write_atomically(path, fail)
    assert PlainCheckpointIO().load_checkpoint(path) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


class Trap:
    """Runs code when unpickled by a careless reader."""

    def __reduce__(self):
        return print, ("code ran",)


def test_no_code_runs_from_a_checkpoint(tmp_path, capsys):
    torch.save({"state_dict": Trap()}, tmp_path / "trap.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        PlainCheckpointIO().load_checkpoint(tmp_path / "trap.ckpt", weights_only=False)
    assert "code ran" not in capsys.readouterr().out
