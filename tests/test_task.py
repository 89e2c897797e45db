"""What a Trainer makes of the task and the data module, in one process."""

import itertools
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conftest import DATA

from project import progress, sources
from project.augment import normalise
from project.datamodule import ImageDataModule
from project.errors import UserError
from project.losses import Confusion, EpochSums
from project.model import CNN
from project.optim import warmup_then_decay
from project.progress import Progress
from project.seeds import seed_generators
from project.task import Classifier


def make_task(net: nn.Module | None = None, seed: int = 0) -> Classifier:
    torch.manual_seed(seed)
    sgd = partial(torch.optim.SGD, lr=0.05)
    schedule = partial(warmup_then_decay, warmup=0.1, decay="linear")
    return Classifier(net or CNN(10, widths=[4]), sgd, schedule, num_classes=10, seed=seed)


def make_trainer(**changes: Any) -> lightning.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    return lightning.Trainer(**settings | changes)


LIMITS = [
    {},
    {"accumulate_grad_batches": 3},
    {"limit_train_batches": 4},
    {"limit_train_batches": 0.5},
    {"limit_train_batches": 4, "accumulate_grad_batches": 2},
    {"max_steps": 5},
    {"max_epochs": -1, "max_steps": 9},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_the_schedule_has_as_many_steps_as_the_training(make_data, limits):
    data, task, trainer = make_data(), make_task(), make_trainer(**limits)
    trainer.fit(task, datamodule=data)
    assert trainer.global_step == data.num_steps() > 0
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)


def test_what_has_no_end_or_cuts_a_step_in_two_is_refused(make_data):
    with pytest.raises(UserError, match="no end"):
        make_trainer(max_epochs=-1).fit(make_task(), datamodule=make_data())
    with pytest.raises(UserError, match="no step"):
        make_trainer(max_epochs=0).fit(make_task(), datamodule=make_data())
    trainer = make_trainer(limit_train_batches=4, accumulate_grad_batches=3)
    with pytest.raises(UserError, match="leaves 4 batches an epoch"):
        trainer.fit(make_task(), datamodule=make_data())
    for interval in 4, 0.25:  # of 18 batches: 4
        trainer = make_trainer(val_check_interval=interval, accumulate_grad_batches=3)
        with pytest.raises(UserError, match="validates after 4 batches, inside an optimizer step"):
            trainer.fit(make_task(), datamodule=make_data())


def test_train_and_test_of_different_classes_are_refused(tmp_path):
    def source(root, split, image_size):
        listing = sources.shapes(root, split, image_size, num_train=20, num_test=20, seed=0)
        return listing._replace(classes=[f"{name} {split}" for name in listing.classes])

    with pytest.raises(UserError, match=r"differ in classes .*disc test"):
        ImageDataModule(source, str(tmp_path), **DATA).test_images  # noqa: B018


def test_a_missing_test_split_shows_before_the_training(tmp_path):
    def source(root, split, image_size):
        count = {"train": 200, "test": 0}[split]
        return sources.shapes(root, split, image_size, num_train=count, num_test=count, seed=0)

    data = ImageDataModule(source, str(tmp_path), **DATA)
    data.open(test=False)
    with pytest.raises(UserError, match="no test images"):
        data.open(test=True)


class Spy(nn.Module):
    """A linear network that keeps the images it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.seen = nn.Linear(3 * 32 * 32, 10), []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen.append(images.detach().clone())
        return self.head(images.flatten(1))


def test_test_images_are_only_normalised_and_each_is_scored_once(make_data):
    data, spy = make_data(), Spy()
    task = make_task(spy)
    make_trainer().test(task, datamodule=data, verbose=False)
    images, labels, _ = data.test_images[torch.arange(101)]
    plain = normalise(images, data.mean, data.std)
    assert torch.equal(torch.cat(spy.seen), plain)
    logits = spy.head(plain.flatten(1))
    assert task.metrics["test/count"] == 101
    assert task.metrics["test/acc"] == int((logits.argmax(1) == labels).sum()) / 101
    assert task.metrics["test/loss"] == pytest.approx(F.cross_entropy(logits, labels).item())
    assert task.confusion is not None
    assert task.confusion.sum(1).equal(torch.bincount(labels, minlength=10))


def test_validation_images_are_only_normalised(make_data):
    data, spy = make_data(), Spy()
    make_trainer().validate(make_task(spy), datamodule=data, verbose=False)
    held_out = normalise(data.train_images[data.split[1]][0], data.mean, data.std)
    assert torch.equal(torch.cat(spy.seen), held_out)


def test_training_sees_the_training_part_augmented_by_each_epochs_table(make_data):
    data, spy = make_data(seed=5), Spy()
    make_trainer(limit_val_batches=0).fit(make_task(spy), datamodule=data)
    rows = data.split[0]
    expected = []
    for epoch in 0, 1:
        generator = torch.Generator().manual_seed(5 + epoch)  # as DistributedSampler's
        order = rows[torch.randperm(len(rows), generator=generator)]
        table = data.augment.table(200, 32, seed=5, epoch=epoch)[order]
        images = data.augment.crop_and_flip(data.train_images[order][0], table)
        expected.append(normalise(images, data.mean, data.std))
    assert torch.equal(torch.cat(spy.seen), torch.cat(expected))
    assert len(rows) == 180
    assert not set(rows.tolist()) & set(data.split[1].tolist())


def test_sums_of_uneven_batches_are_those_of_the_whole():
    logits, labels = torch.randn(107, 5), torch.randint(5, (107,))
    losses = F.cross_entropy(logits, labels, reduction="none")
    sums, confusion = EpochSums(torch.device("cpu")), Confusion(5, torch.device("cpu"))
    for part in *torch.arange(107).split(50), torch.arange(0):  # 50, 50, 7 and none
        sums.add(losses[part], logits[part], labels[part])
        confusion.add(logits[part], labels[part])
    loss, accuracy, count = sums.reduce()
    matrix = confusion.reduce()
    assert loss == pytest.approx(losses.double().mean().item(), rel=1e-12)
    assert accuracy == int((logits.argmax(1) == labels).sum()) / 107
    assert count == int(matrix.sum()) == 107
    assert matrix[2, 3] == int(((labels == 2) & (logits.argmax(1) == 3)).sum())


class Disturbance(lightning.Callback):
    """Draws from the global generator between batches, as a foreign callback may."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        torch.rand(7)


def test_dropout_is_a_function_of_seed_step_and_rank(make_data):
    nets = []
    for extra in [], [Disturbance()]:
        torch.manual_seed(0)
        task = make_task(nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(3072, 10)))
        make_trainer(callbacks=extra).fit(task, datamodule=make_data())
        nets.append(task.net.state_dict())
    assert all(torch.equal(nets[0][name], nets[1][name]) for name in nets[0])


def test_generators_are_seeded_as_by_torch():
    draws = []
    for seed in torch.manual_seed, partial(seed_generators, device=torch.device("cpu")):
        torch.manual_seed(0)
        seed(2**62 + 3)
        draws.append(torch.rand(5).tolist())
    assert draws[0] == draws[1]


def test_all_generators_differ_by_epoch_batch_and_rank():
    draws = set()
    for epoch, batch, rank in itertools.product(range(2), range(3), range(4)):
        place = {"current_epoch": epoch, "global_rank": rank, "device": torch.device("cpu")}
        task: Any = SimpleNamespace(seed=0, **place)
        Classifier.on_train_batch_start(task, (), batch)  # type: ignore[arg-type]
        draws.add((torch.rand(()).item(), random.random(), np.random.rand()))
    assert all(len(set(column)) == 2 * 3 * 4 for column in zip(*draws, strict=True))


class Uniform(nn.Linear):
    """Scores all classes alike, whatever it sees: its loss is log(10)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.flatten(1)) * 0


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_line_of_a_step_shows_the_loss(make_data, caplog, accumulate):
    trainer = make_trainer(
        accumulate_grad_batches=accumulate, log_every_n_steps=2, callbacks=[Progress()]
    )
    name = progress.log.name
    with caplog.at_level("INFO", name):
        trainer.fit(make_task(Uniform(3072, 10)), datamodule=make_data())
    lines = [record.getMessage() for record in caplog.records if record.name == name]
    epochs = [1, 1, 1, 2, 2, 2]
    steps = zip(epochs, range(2, 13, 2), strict=True)
    expected = [f"epoch {epoch}/2  step {step}/12  loss 2.3026  lr" for epoch, step in steps]
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected


class Breaks(lightning.Callback):
    """Spoils one batch."""

    def __init__(self, batch_idx: int) -> None:
        self.batch_idx = batch_idx

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == self.batch_idx and trainer.current_epoch == 1:
            batch[0].fill_(float("nan"))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_step_of_a_broken_loss_is_named(make_data, optimizer, accumulate):
    """Also where an optimizer asks for the loss several times a step."""
    task = make_task()
    task.make_optimizer = partial(optimizer, lr=0.01)
    callbacks = [Breaks(4 * accumulate - 1), Progress()]
    trainer = make_trainer(
        accumulate_grad_batches=accumulate, log_every_n_steps=5, callbacks=callbacks
    )
    with pytest.raises(UserError, match=r"the loss of step 10 \(epoch 2\) is not a finite"):
        trainer.fit(task, datamodule=make_data())


def test_loader_workers_change_nothing(make_data):
    nets = []
    for num_workers in 0, 2:
        task = make_task()
        make_trainer().fit(task, datamodule=make_data(num_workers=num_workers))
        nets.append(task.net.state_dict())
    assert all(torch.equal(nets[0][name], nets[1][name]) for name in nets[0])


def test_images_that_live_on_the_device_change_nothing(make_data):
    found = []
    for on_device in False, True:
        data, task = make_data(on_device=on_device), make_task()
        trainer = make_trainer()
        trainer.fit(task, datamodule=data)
        trainer.test(task, datamodule=data, verbose=False)
        found.append((task.net.state_dict(), task.metrics))
    assert all(torch.equal(found[0][0][name], found[1][0][name]) for name in found[0][0])
    assert found[0][1] == found[1][1]


def test_where_images_live_on_the_device_row_numbers_alone_travel(make_data):
    data = make_data(on_device=True)
    make_trainer(limit_train_batches=2).fit(make_task(), datamodule=data)
    batches = [*data.train_dataloader(), *data.val_dataloader(), *data.test_dataloader()]
    assert {(batch.dtype, batch.ndim) for batch in batches} == {(torch.int64, 1)}


def test_another_seed_gives_another_network(make_data):
    nets = []
    for seed in 0, 1:
        task = make_task(seed=seed)
        make_trainer(max_epochs=1).fit(task, datamodule=make_data(seed=seed))
        nets.append(task.net.state_dict())
    assert not torch.equal(nets[0]["head.weight"], nets[1]["head.weight"])
