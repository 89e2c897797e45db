"""What makes a step quick, and that it changes nothing else; figures come from benchmarks/."""

import json
import sys
import tracemalloc
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities import grad_norm

from conftest import TINY
from test_task import make_trainer

from project import upstream
from project.data import TrainBatches
from project.model import CNN
from project.pack import PackedImages
from project.task import Classifier

READS = "+callbacks.reads._target_=reads.HostReads"


@pytest.mark.parametrize("more", [[], ["data.on_device=true"], ["data.augment.cutout=8"]], ids=str)
def test_only_steps_that_log_read_what_the_device_has_computed(run_here, tmp_path, more):
    words = [*TINY, "trainer.log_every_n_steps=4", "trainer.max_epochs=2", "test=false"]
    folder = run_here(tmp_path / "run", *words, "data.augment.crop_padding=2", *more, READS)
    ends = {9, 12}  # of an epoch, and of the training
    assert {*json.loads((folder / "reads-0.json").read_text())} == {4, 8, 12} | ends


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("on_device", ["true", "false"])
def test_on_a_gpu_other_steps_do_not_wait_for_it(run_here, tmp_path, on_device):
    words = [*TINY, "trainer=gpu", f"data.on_device={on_device}", "trainer.log_every_n_steps=50"]
    words += ["data.augment.crop_padding=2", "data.augment.cutout=8"]
    words += ["+callbacks.quiet._target_=reads.NoWaiting"]
    run_here(tmp_path / "run", *words)
    with pytest.raises(RuntimeError, match="synchronizing"):
        run_here(tmp_path / "reading", *words, "model._target_=toy.Reading")


@pytest.mark.parametrize("program", [["--help"], ["--cfg", "job"]], ids=str)
def test_questions_about_the_config_import_no_torch(command, program):
    done = command("python", "train.py", *program, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hydra" in names
    assert not names & {"torch", "lightning", "torchvision", "matplotlib", "optuna", "tensorboard"}


# What Lightning is asked once


class Called(lightning.Callback):
    """Has one hook of a step."""

    def __init__(self) -> None:
        self.steps = 0

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.steps += 1


class Hooked(Classifier):
    """Has hooks of its own, and logs at each step."""

    clipped = transferred = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("own", float(batch_idx))
        return super().training_step(batch, batch_idx)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.clipped += 1

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transferred += 1
        return batch


class Plain(Classifier):
    """Sets its attributes as any module does."""

    __setattr__ = lightning.LightningModule.__setattr__  # type: ignore[assignment]


class Numberless(Classifier):
    """Wants no number of the batch."""

    def training_step(self, batch: Any) -> torch.Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)


class Takes(lightning.Callback):
    """As RunRecord does."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        upstream.take_out(trainer)


class Counts(lightning.Callback):
    """Counts the functions of Python that are called in four steps."""

    calls = 0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            sys.setprofile(self.count)
        if batch_idx == 4:
            sys.setprofile(None)

    def count(self, frame: Any, event: str, arg: Any) -> None:
        self.calls += event == "call"


def of(kind: type[Classifier], **changes: Any) -> Classifier:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"num_classes": 10, "seed": 0, "net": CNN(10, widths=[4])}
    settings["optimizer"] = lambda weights: torch.optim.SGD(weights, 0.05)
    settings["scheduler"] = lambda o, num_steps: torch.optim.lr_scheduler.ConstantLR(o, 1)
    return kind(**settings | changes)


def test_a_step_makes_a_fifth_fewer_calls_than_lightnings(make_data):
    """If it took more, what upstream.py changes would not be there any more."""
    counts = Counts(), Counts()
    for counted, more in zip(counts, ([], [Takes()]), strict=True):
        task = of(Classifier if more else Plain)
        make_trainer(max_epochs=1, callbacks=[counted, *more]).fit(task, datamodule=make_data())
    print(f"Python calls a step: {counts[0].calls / 4:.0f}, ours {counts[1].calls / 4:.0f}")
    assert 0 < counts[1].calls < 0.8 * counts[0].calls


@pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`")
def test_hooks_of_ones_own_are_called(make_data, tmp_path):
    called, task, logger = Called(), of(Hooked), CSVLogger(tmp_path)
    settings = {"callbacks": [called, Takes()], "logger": logger, "log_every_n_steps": 1}
    make_trainer(max_epochs=1, **settings).fit(task, datamodule=make_data())
    assert called.steps == task.clipped == 6
    assert task.transferred == 6 + 2  # and those of the validation
    rows = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("own")
    logged = [row.split(",")[column] for row in rows[1:]]
    assert [float(value) for value in logged if value] == [0, 1, 2, 3, 4, 5]


def test_a_step_may_do_without_its_number(make_data):
    nets = []
    for kind in Classifier, Numberless:
        task = of(kind)
        make_trainer(callbacks=[Takes()]).fit(task, datamodule=make_data())
        nets.append(task.net.state_dict())
    assert all(torch.equal(nets[0][name], nets[1][name]) for name in nets[0])


def test_a_profiler_of_ones_own_is_asked(make_data):
    profiler = SimpleProfiler()
    trainer = make_trainer(max_epochs=1, profiler=profiler, callbacks=[Takes()])
    trainer.fit(of(Classifier), datamodule=make_data())
    assert len(profiler.recorded_durations["run_training_batch"]) == 6


def test_clipping_asked_of_the_trainer_clips(make_data):
    class Norms(lightning.Callback):
        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step:  # gradients of the step before
                norms.append(float(grad_norm(pl_module.net, 2)["grad_2.0_norm_total"]))

    norms: list[float] = []
    trainer = make_trainer(max_epochs=1, gradient_clip_val=0.01, callbacks=[Norms(), Takes()])
    trainer.fit(of(Classifier), datamodule=make_data())
    assert max(norms) == pytest.approx(0.01, rel=1e-3)


def test_hooks_of_ones_own_stay_what_they_are(make_data):
    """Also empty ones: a callback may hand on to others."""
    called = Called()
    make_trainer(max_epochs=1, callbacks=[called, Takes()]).fit(of(Hooked), datamodule=make_data())
    called.on_train_batch_end(None, None, None, None, 0)  # type: ignore[arg-type]


def test_a_clipping_that_is_set_later_clips(make_data):
    class Late(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.gradient_clip_val = 1e-12

    task = of(Classifier)
    before = {name: weight.clone() for name, weight in task.net.named_parameters()}
    make_trainer(max_epochs=1, callbacks=[Late(), Takes()]).fit(task, datamodule=make_data())
    after = dict(task.net.named_parameters())
    assert all(torch.allclose(before[name], after[name], atol=1e-9) for name in before)


# Growth


def test_an_epoch_begins_without_python_objects_for_its_images():
    batches = TrainBatches(torch.arange(10**6), 500, 1, 2, 1, seed=0)
    tracemalloc.start()
    try:
        assert len(next(iter(batches))) == 250
        assert tracemalloc.get_traced_memory()[1] < 10**5  # bytes; a list takes 8 an image
    finally:
        tracemalloc.stop()


def test_a_pack_larger_than_the_memory_is_mapped(tmp_path):
    count = 10**8  # 300 GB, of which none is written
    shape = (count, 3, 32, 32)
    np.lib.format.open_memmap(tmp_path / "images.npy", "w+", np.uint8, shape)
    np.lib.format.open_memmap(tmp_path / "labels.npy", "w+", np.int64, (count,))
    (tmp_path / "classes.json").write_text('["black"]')
    images, labels, _ = PackedImages(tmp_path)[torch.tensor([7, count - 1])]
    assert images.shape == (2, 3, 32, 32)
    assert not images.any()
    assert labels.tolist() == [0, 0]


def test_rows_on_a_device_come_from_its_own_copy(tmp_path):
    np.save(tmp_path / "images.npy", np.arange(5 * 3 * 4, dtype=np.uint8).reshape(5, 3, 2, 2))
    np.save(tmp_path / "labels.npy", np.arange(5))
    (tmp_path / "classes.json").write_text("[]")
    packed, rows = PackedImages(tmp_path), torch.tensor([4, 0])
    assert all(torch.equal(a, b) for a, b in zip(packed.on(rows), packed[rows], strict=True))
    images, labels, same = packed.on(rows.to("meta"))  # a device without memory
    assert (images.shape, labels.shape) == ((2, 3, 2, 2), (2,))
    assert {images.device.type, labels.device.type, same.device.type} == {"meta"}
    copy = packed._there
    packed.on(rows.to("meta"))
    assert packed._there is copy
