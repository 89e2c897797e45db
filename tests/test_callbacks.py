"""Checkpoints and history, without training."""

import csv
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn

from project.callbacks import PlainCheckpointIO, RunRecord
from project.files import write_atomically

NAN = float("nan")


class FakeTrainer:
    """A Trainer whose checkpoints are plain files that hold the step."""

    state = SimpleNamespace(fn=TrainerFn.FITTING)
    sanity_checking, is_global_zero = False, True

    def __init__(self) -> None:
        self.current_epoch, self.global_step = -1, 0
        progress = SimpleNamespace(is_last_batch=True)
        self.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))

    def save_checkpoint(self, path: Path) -> None:
        state = {"state_dict": {"net.w": torch.tensor(self.global_step)}}
        PlainCheckpointIO().save_checkpoint(state, path)


def train(record: RunRecord, accuracies: list[float | None]) -> None:
    """Goes through the hooks of epochs of 10 steps with these val/acc."""
    trainer: Any = FakeTrainer()
    module: Any = SimpleNamespace(metrics={}, losses=SimpleNamespace(check=lambda trainer: None))
    for accuracy in accuracies:
        trainer.current_epoch += 1
        trainer.global_step += 10
        if accuracy is not None:
            module.metrics |= {"val/loss": 1 - accuracy, "val/acc": accuracy}
            record.on_validation_end(trainer, module)
        module.metrics |= {"train/loss": 0.5, "train/acc": 0.5}
        record.on_train_epoch_end(trainer, module)
    record.on_train_end(trainer, module)


def step_of(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["state_dict"]["net.w"])


@pytest.mark.parametrize(
    ("accuracies", "best_step"),
    [([0.1, 0.9, 0.2], 20), ([0.5, 0.7, 0.7], 20), ([NAN, 0.1, NAN], 20), ([0.0, NAN], 10)],
)
def test_best_is_the_highest_the_first_on_ties_and_never_nan(tmp_path, accuracies, best_step):
    record = RunRecord(tmp_path)
    train(record, accuracies)
    assert step_of(tmp_path / "checkpoints/best.ckpt") == best_step
    assert step_of(tmp_path / "checkpoints/last.ckpt") == 10 * len(accuracies)
    assert record.best["val/acc"] == accuracies[best_step // 10 - 1]
    assert int(torch.load(tmp_path / "checkpoints/model.pt")["w"]) == best_step


def test_without_validation_the_last_is_chosen(tmp_path):
    record = RunRecord(tmp_path)
    train(record, [None, None])
    assert record.chosen_path == tmp_path / "checkpoints/last.ckpt"
    assert not (tmp_path / "checkpoints/best.ckpt").exists()
    assert int(torch.load(tmp_path / "checkpoints/model.pt")["w"]) == 20


def test_validation_inside_an_epoch_saves_its_best_at_once(tmp_path):
    record, trainer = RunRecord(tmp_path), FakeTrainer()
    trainer.global_step = 5
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = False
    metrics = {"val/loss": 0.1, "val/acc": 0.9}
    module: Any = SimpleNamespace(
        metrics=metrics, losses=SimpleNamespace(check=lambda trainer: None)
    )
    record.on_validation_end(trainer, module)  # type: ignore[arg-type]
    assert step_of(tmp_path / "checkpoints/best.ckpt") == 5


def test_the_history_has_a_row_an_epoch_with_every_digit(tmp_path):
    train(RunRecord(tmp_path), [0.1 + 0.2, None])
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["10", "20"]
    assert [row["val/acc"] for row in rows] == [repr(0.1 + 0.2), ""]


def test_the_record_travels_in_a_checkpoint(tmp_path):
    record, other = RunRecord(tmp_path / "a"), RunRecord(tmp_path / "b")
    train(record, [0.3, 0.9])
    (tmp_path / "b" / "checkpoints").mkdir(parents=True)
    record.best_path.rename(other.best_path)
    other.load_state_dict(record.state_dict())
    train(other, [0.5])
    assert [row["val/acc"] for row in other.history] == [0.3, 0.9, 0.5]
    assert other.best["val/acc"] == 0.9


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

    with pytest.raises(OSError, match="disk full"):
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
