"""The data of a run as a LightningDataModule."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from project.augment import Augment, normalise
from project.data import EvalBatches, TrainBatches, stratified_split
from project.errors import UserError
from project.pack import PackedImages, Rows, Source, pack
from project.steps import num_steps, steps_per_epoch
from project.workers import worker_options

Batch = tuple[Tensor, Tensor, Tensor]


class ImageDataModule(lightning.LightningDataModule):
    """Packed images of one source, batched for the ranks of a Trainer.

    A batch holds images (B, 3, H, W), labels (B,) int64 and row numbers (B,) int64. Images leave
    the loader as uint8 and are normalised and augmented on the training device.

    Args:
        source: function that lists a split, see `project.sources`.
        root: folder of the dataset.
        image_size: pixels, height and width.
        batch_size: the global batch: images of one optimizer step, over all ranks and accumulated
            batches.
        eval_batch_size: images a rank scores at a time; has no effect on the result.
        val_fraction: of each class of the training split held out for validation; 0 for none.
        split_seed: chooses which; apart from `seed`, so that seeds are compared on equal terms.
        limit_train_images: train on no more than so many, evenly spaced; None for all.
        mean, std: per channel, of images in [0, 1].
        augment: what happens to training images.
        num_workers: loader processes a rank.
        pin_memory: page-locked batches, copied to a GPU while it computes.
        seed: of sample order and augmentation.
        on_device: keep the images in the memory of each rank's device: row numbers alone travel.
    """

    def __init__(
        self,
        source: Source,
        root: str,
        image_size: int,
        batch_size: int,
        eval_batch_size: int,
        val_fraction: float,
        split_seed: int,
        limit_train_images: int | None,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Augment,
        num_workers: int,
        pin_memory: bool,
        seed: int,
        on_device: bool = False,
    ) -> None:
        super().__init__()
        if image_size < 1 or num_workers < 0 or not len(mean) == len(std) == 3 or min(std) <= 0:
            raise UserError("data: image_size >= 1, num_workers >= 0, three each of mean, std > 0.")
        self.source, self.root, self.image_size = source, Path(root), image_size
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.val_fraction, self.split_seed = val_fraction, split_seed
        self.limit_train_images = limit_train_images
        self.mean, self.std, self.augment, self.on_device = mean, std, augment, on_device
        self.num_workers, self.pin_memory, self.seed = num_workers, pin_memory, seed
        self._table: tuple[int, Tensor] | None = None

    def open(self, test: bool) -> None:
        """Packs what is not packed yet, the test split only if `test`.

        Raises:
            UserError: images are missing or cannot be decoded, or the splits do not fit together.
        """
        _ = self.split
        if test and len(self.test_images) == 0:
            raise UserError(f"data.root={self.root} has no test images (test=false trains only).")

    @functools.cached_property
    def train_images(self) -> PackedImages:
        """The training split, validation images included."""
        return pack(self.source, self.root, "train", self.image_size)

    @functools.cached_property
    def test_images(self) -> PackedImages:
        """The test split, for testing only.

        Raises:
            UserError: its classes are not those of the training split.
        """
        images = pack(self.source, self.root, "test", self.image_size)
        if images.classes != self.train_images.classes:
            odd = sorted(set(images.classes) ^ set(self.train_images.classes))
            raise UserError(f"data.root={self.root}: train and test differ in classes {odd}.")
        return images

    @functools.cached_property
    def split(self) -> tuple[Tensor, Tensor]:
        """Rows of `train_images` to train on and to validate on."""
        labels = self.train_images.labels
        train, val = stratified_split(labels, self.val_fraction, self.split_seed)
        count = min(self.limit_train_images or len(train), len(train))
        return train[torch.arange(count) * len(train) // max(count, 1)], val

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.train_images.classes)

    def first_images(self, count: int) -> Tensor:
        """The first `count` training images, normalised, not augmented."""
        return normalise(self.train_images[self.split[0][:count]][0], self.mean, self.std)

    def train_dataloader(self) -> DataLoader:
        """This rank's share of the training images.

        Raises:
            UserError: the global batch does not divide, or there are fewer images than it takes.
        """
        trainer, loop = self._trainer, cast(Any, self._trainer.fit_loop)
        # A continued training makes its first iterator before Lightning sets the epoch.
        sampler = TrainBatches(
            self.split[0],
            self.batch_size,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            accumulate=trainer.accumulate_grad_batches,
            seed=self.seed,
            epoch=loop.epoch_progress.current.processed,
            start=loop.epoch_loop.batch_progress.current.processed if loop.restarting else 0,
        )
        return self._loader(self.train_images, sampler)

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """This rank's share of the validation images; an empty list if there are none."""
        rows = self.split[1]
        return self._eval_loader(self.train_images, rows) if len(rows) else []

    def test_dataloader(self) -> DataLoader:
        """This rank's share of the test images."""
        return self._eval_loader(self.test_images, torch.arange(len(self.test_images)))

    def num_steps(self) -> int:
        """Optimizer steps of the whole training, from arithmetic.

        Not from `trainer.estimated_stepping_batches`, which would build the loaders.

        Raises:
            UserError: see `project.steps.num_steps`.
        """
        trainer, steps = self._trainer, steps_per_epoch(len(self.split[0]), self.batch_size)
        limits = trainer.limit_train_batches, trainer.max_epochs, trainer.max_steps
        interval = getattr(trainer, "val_check_interval", None)  # Lightning sets none by time
        return num_steps(steps, trainer.accumulate_grad_batches, *limits, interval)

    def on_after_batch_transfer(self, batch: Batch | Tensor, dataloader_idx: int) -> Batch:
        """Normalises a batch on its device, and in training augments it."""
        packed = self.test_images if self._trainer.testing else self.train_images
        images, labels, rows = packed.on(batch) if isinstance(batch, Tensor) else batch
        dtype = self._trainer.lightning_module.dtype  # float32, unless trainer.precision is "true"
        if not self._trainer.training:
            return normalise(images, self.mean, self.std).to(dtype), labels, rows
        choices = self._augmentations(images.device)[rows]
        images = normalise(self.augment.crop_and_flip(images, choices), self.mean, self.std)
        return self.augment.cut_out(images, choices).to(dtype), labels, rows

    def _augmentations(self, device: torch.device) -> Tensor:
        """The current epoch's table, drawn once an epoch."""
        epoch = self._trainer.current_epoch
        if self._table is None or self._table[0] != epoch:
            table = self.augment.table(len(self.train_images), self.image_size, self.seed, epoch)
            self._table = epoch, table.to(device)
        return self._table[1]

    def _eval_loader(self, images: PackedImages, rows: Tensor) -> DataLoader:
        rank, world_size = self._trainer.global_rank, self._trainer.world_size
        return self._loader(images, EvalBatches(rows, self.eval_batch_size, rank, world_size))

    def _loader(self, images: PackedImages, sampler: Sampler[Tensor]) -> DataLoader:
        nbytes = max(self.batch_size, self.eval_batch_size) * 3 * self.image_size**2
        return DataLoader(
            Rows(len(images)) if self.on_device else images,
            batch_size=None,  # the sampler's items are whole batches
            sampler=sampler,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory and torch.cuda.is_available(),
            **worker_options(self.num_workers, self._trainer.num_devices, nbytes),
        )

    @property
    def _trainer(self) -> lightning.Trainer:
        assert self.trainer is not None, "the loaders depend on the ranks of a Trainer"
        return self.trainer
