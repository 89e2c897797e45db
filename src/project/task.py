"""What is learned: the LightningModule with loss, exact epoch metrics and optimizer."""

from collections.abc import Callable, Iterable
from typing import Any

import lightning
import torch.nn.functional as F
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from project.datamodule import Batch
from project.errors import UserError
from project.losses import Confusion, EpochSums, RecentLosses
from project.optim import decay_weights_only
from project.seeds import seed_from, seed_generators


class Classifier(lightning.LightningModule):
    """Trains `net` by cross-entropy.

    A network with a method `initialise(images)` is shown the first 5,000 training images,
    normalised, before it trains.

    Args:
        net: images (B, 3, H, W) to logits (B, num_classes).
        optimizer: makes an optimizer from parameters.
        scheduler: makes a schedule from an optimizer and `num_steps`, stepped every optimizer step.
        num_classes: number of labels.
        seed: of the randomness inside the network.
        label_smoothing: of the training loss, in [0, 1); evaluation uses none.
        initialise: false where the weights come from a file.

    Attributes:
        metrics: exact values of the latest epochs, equal on all ranks, by name ("val/acc").
        losses: of the batches that nobody has looked at yet.
        confusion: matrix of the latest evaluation, (num_classes, num_classes) int64.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[Iterable[Tensor]], Optimizer],
        scheduler: Callable[..., LRScheduler],
        num_classes: int,
        seed: int,
        label_smoothing: float = 0.0,
        initialise: bool = True,
    ) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise UserError(f"label_smoothing={label_smoothing} must lie in [0, 1).")
        self.net = net
        self.label_smoothing, self.initialise = label_smoothing, initialise
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.num_classes, self.seed = num_classes, seed
        self.metrics: dict[str, float] = {}
        self.confusion: Tensor | None = None
        self.losses = RecentLosses()
        self._stored_sums: Tensor | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Spares the name of a hook, which Lightning sets 50 times a step, a look at parameters."""
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def setup(self, stage: str) -> None:
        """Lets the network initialise itself from training images."""
        initialise: Any = getattr(self.net, "initialise", None)
        if stage == "fit" and self.initialise and initialise:
            initialise(self.trainer.datamodule.first_images(5000))  # type: ignore[attr-defined]

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes) of normalised images (B, 3, H, W)."""
        return self.net(images)

    def configure_optimizers(self) -> Any:
        """The optimizer, and its schedule over all steps of the training."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        try:
            optimizer = self.make_optimizer(trained)
        except (TypeError, ValueError) as error:  # a rate below 0, say
            raise UserError(f"optimizer: {error}") from error
        decay_weights_only(optimizer)
        num_steps = self.trainer.datamodule.num_steps()  # type: ignore[attr-defined]
        scheduler = self.make_scheduler(optimizer, num_steps=num_steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_start(self) -> None:
        """Takes up the sums of an epoch that goes on."""
        self.on_train_epoch_start()
        if self._stored_sums is not None:
            self._train_sums.restore(self._stored_sums)

    def on_train_epoch_start(self) -> None:
        """Begins the epoch's sums."""
        self._train_sums = EpochSums(self.device)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Makes dropout and its like a function of (seed, step, rank)."""
        seed = seed_from("step", self.seed, self.current_epoch, batch_idx, self.global_rank)
        seed_generators(seed, self.device)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean loss of this rank's batch."""
        images, labels, _ = batch
        logits = self.net(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        self._train_sums.add(loss.expand(labels.shape), logits, labels)
        self.losses.add(loss, batch_idx)
        return loss

    def on_train_epoch_end(self) -> None:
        """Publishes train/loss and train/acc."""
        self._publish("train", self._train_sums)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what an epoch has measured so far; all ranks take part."""
        checkpoint["epoch_sums"] = self._train_sums.gather()
        checkpoint["epoch_metrics"] = dict(self.metrics)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes it up."""
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._stored_sums = checkpoint["epoch_sums"]
            self.metrics |= checkpoint["epoch_metrics"]

    def on_validation_epoch_start(self) -> None:
        """Begins the evaluation's sums."""
        self._eval_sums = EpochSums(self.device)
        self._confusion = Confusion(self.num_classes, self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Scores a batch, which may hold no images; returns its logits."""
        images, labels, _ = batch
        # All ranks take part in a forward, and not every network takes no images.
        shown = images if len(images) else images.new_zeros(1, *images.shape[1:])
        logits = self.net(shown)[: len(images)]
        self._eval_sums.add(F.cross_entropy(logits, labels, reduction="none"), logits, labels)
        self._confusion.add(logits, labels)
        return logits

    def on_validation_epoch_end(self) -> None:
        """Publishes val/loss and val/acc."""
        self._publish("val", self._eval_sums)

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        """Publishes test/loss, test/acc and test/count."""
        self.metrics["test/count"] = self._publish("test", self._eval_sums)

    def _publish(self, stage: str, sums: EpochSums) -> int:
        loss, accuracy, count = sums.reduce()
        if stage != "train":
            self.confusion = self._confusion.reduce()
        self.publish({f"{stage}/loss": loss, f"{stage}/acc": accuracy})
        return count

    def publish(self, values: dict[str, float]) -> None:
        """Brings values of an epoch to metrics.csv, results.json, loggers, and what monitors them.

        For callbacks with a metric of their own, in a hook `on_..._epoch_end`.

        Args:
            values: equal on all ranks, by names such as "val/f1".
        """
        self.metrics |= values
        self.log_dict(values, logger=False)  # reduced already: sync_dist would average again
        for logger in self.trainer.loggers:  # not by log_dict, which counts steps from 0
            logger.log_metrics(values, self.trainer.global_step)
