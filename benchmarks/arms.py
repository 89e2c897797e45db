"""Ways to train on given batches, timed: a bare loop, and ever more around it."""

import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

REPOSITORY = Path(__file__).parents[1]
sys.path.append(str(REPOSITORY))
import train  # noqa: E402

ON_GPU = torch.cuda.is_available()
Batch = tuple[Tensor, Tensor, Tensor]
SMOOTHING = 0.1  # of labels, in all arms


class Batches:
    """A few batches over and over, and a clock.

    Args:
        batches: images, labels and rows of each.
        num_batches: of an epoch.
        skipped: batches after which the clock begins to run: the first ones allocate.
        log_every: steps, for those that log.

    Attributes:
        seconds: of a step.
    """

    def __init__(
        self, batches: Sequence[Batch], num_batches: int, skipped: int, log_every: int
    ) -> None:
        self.batches, self.num_batches, self.skipped = batches, num_batches, skipped
        self.log_every = log_every
        self.seconds = float("nan")

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        began, last = 0.0, self.num_batches - 1  # after the last one Lightning asks for no more
        for number, batch in enumerate(itertools.islice(itertools.cycle(self.batches), last + 1)):
            if number == self.skipped:
                began = now()
            if number == last:
                self.seconds = (now() - began) / (last - self.skipped)
            yield batch


def now() -> float:
    """Seconds, when the device has done what it was asked to do so far."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


Arm = Callable[[nn.Module, Batches], None]


def fixed(net: nn.Module, batches: Batches) -> None:
    """Forward, backward and step on one batch, without any loop around it."""
    model, optimizer, scheduler = _ready(net, len(batches))
    (images, labels, _), began = batches.batches[0], 0.0
    for number in range(len(batches)):
        if number == batches.skipped:
            began = now()
        loss = F.cross_entropy(model(images), labels, label_smoothing=SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    batches.seconds = (now() - began) / (len(batches) - batches.skipped)


def raw(net: nn.Module, batches: Batches) -> None:
    """The loop of the DDP tutorial.

    Gradients go between forward and backward, as Lightning has it: after the step a large network
    is slower by 5 % on CPUs.
    """
    model, optimizer, scheduler = _ready(net, len(batches))
    for images, labels, _ in batches:
        loss = F.cross_entropy(model(images), labels, label_smoothing=SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


def _ready(net: nn.Module, steps: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = wrapped(net)
    return model.train(), *optimized(net, steps)


def wrapped(net: nn.Module, **options: Any) -> DistributedDataParallel:
    """A replica, on the device of its rank."""
    if not ON_GPU:
        return DistributedDataParallel(net, **options)
    device = torch.cuda.current_device()
    return DistributedDataParallel(net.to(device), device_ids=[device], **options)


def optimized(net: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    """The default optimizer and schedule, by hand."""
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    groups: list[Any] = [{"params": [weight for weight in weights if weight.ndim >= 2]}]
    groups += [{"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, 0.01, momentum=0.9, nesterov=True, weight_decay=0.01)
    return optimizer, LinearLR(optimizer, 1, 0, total_iters=steps)


class Bare(lightning.LightningModule):
    """A loss and an optimizer."""

    def __init__(self, net: nn.Module, steps: int) -> None:
        super().__init__()
        self.net, self.steps = net, steps

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss."""
        return F.cross_entropy(self.net(batch[0]), batch[1], label_smoothing=SMOOTHING)

    def configure_optimizers(self) -> Any:
        """Those of the raw loop."""
        optimizer, scheduler = optimized(self.net, self.steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Usual(Bare):
    """With metrics as templates have them: `forward` of torchmetrics and `self.log`, each step."""

    def __init__(self, net: nn.Module, steps: int) -> None:
        super().__init__(net, steps)
        self.loss, self.accuracy = MeanMetric(), MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss."""
        images, labels, _ = batch
        logits = self.net(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=SMOOTHING)
        self.loss(loss)
        self.accuracy(logits, labels)
        self.log("train/loss", self.loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.accuracy, on_step=False, on_epoch=True, prog_bar=True)
        return loss


def barebones(net: nn.Module, batches: Batches) -> None:
    """Lightning with nothing: `Trainer(barebones=True)`."""
    trainer = lightning.Trainer(barebones=True, **_trainer())
    trainer.fit(Bare(net, len(batches)), batches)


def usual(net: nn.Module, batches: Batches) -> None:
    """Lightning as templates use it: metrics, loggers, bar and checkpoints."""
    with tempfile.TemporaryDirectory() as folder, terminal():
        trainer = lightning.Trainer(
            logger=[TensorBoardLogger(folder), CSVLogger(folder)],
            callbacks=[ModelCheckpoint(folder), TQDMProgressBar()],
            enable_model_summary=False,
            log_every_n_steps=batches.log_every,
            **_trainer(),
        )
        trainer.fit(Usual(net, len(batches)), batches)


def _trainer() -> dict[str, Any]:
    return {
        "strategy": "ddp",
        "accelerator": "gpu" if ON_GPU else "cpu",
        "devices": torch.distributed.get_world_size(),
        "max_epochs": 1,
        "use_distributed_sampler": False,
    }


def ours(net: nn.Module, batches: Batches) -> None:
    """train.py with metrics, CSV and TensorBoard, bar and checkpoints."""
    Data.batches, Data.net = batches, net
    words = [
        "data._target_=arms.Data",
        "model._target_=arms.Data.network",
        "~model.widths",
        "logger=[tensorboard,csv]",
        f"trainer={'gpu' if ON_GPU else 'cpu'}",
        f"trainer.devices={torch.distributed.get_world_size()}",
        "trainer.max_epochs=1",
        f"trainer.log_every_n_steps={batches.log_every}",
        f"label_smoothing={SMOOTHING}",
        "optimizer.lr=0.01",
        "test=false",
    ]
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        cfg = compose("train", words)
    with tempfile.TemporaryDirectory() as folder, terminal():
        train.train(cfg, Path(folder))


class Data(lightning.LightningDataModule):
    """The batches of the arms in the place of a dataset."""

    batches: Batches
    net: nn.Module
    num_classes = 10

    def __init__(self, batch_size: int, image_size: int, **kwargs: Any) -> None:
        super().__init__()
        self.batch_size, self.image_size = batch_size, image_size

    @classmethod
    def network(cls, num_classes: int) -> nn.Module:
        """The network of the arms."""
        return cls.net

    def open(self, test: bool) -> None:
        """There is nothing to open."""

    def first_images(self, count: int) -> Tensor:
        """For the whitening."""
        return torch.cat([images for images, _, _ in self.batches.batches])[:count]

    def num_steps(self) -> int:
        """Of the whole training."""
        return len(self.batches)

    def train_dataloader(self) -> Batches:
        """The same for all arms."""
        return self.batches


class Screen:
    """A terminal that nobody looks at: a bar is drawn as on any other."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        """It says so."""
        return True

    def write(self, text: str) -> int:
        """Takes all."""
        return len(text)

    def flush(self) -> None:
        """Has nothing to do."""


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """Standard output is one."""
    with contextlib.redirect_stdout(Screen()):  # type: ignore[type-var]
        yield
