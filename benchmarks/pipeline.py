"""What the input pipeline costs: time a batch, memory a rank, and how both grow."""

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import arms
import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from table import Row, ratio
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from training import in_ranks

from project.augment import Augment
from project.datamodule import ImageDataModule
from project.model import SpeedNet
from project.pack import PackedImages
from project.sources import Listing

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
BATCH, NUM_IMAGES = 512, 50_000
CLASSES = [str(label) for label in range(10)]


def noise(root: Path, split: str, image_size: int) -> Listing:
    """As many images as CIFAR-10 has, of noise."""
    rng = np.random.default_rng(0)
    count = NUM_IMAGES if split == "train" else 100
    labels = rng.integers(0, 10, count).tolist()
    images = (rng.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(count))
    return Listing(labels, CLASSES, images)


def data_module(root: Path) -> ImageDataModule:
    """The data of one rank that trains without a Trainer."""
    data = ImageDataModule(
        noise,
        str(root),
        image_size=32,
        batch_size=BATCH,
        eval_batch_size=BATCH,
        val_fraction=0.0,
        split_seed=0,
        limit_train_images=None,
        mean=MEAN,
        std=STD,
        augment=Augment(crop_padding=4, flip=True),
        on_device=False,
        num_workers=0,
        pin_memory=False,
        seed=0,
    )
    progress = SimpleNamespace(current=SimpleNamespace(processed=0))
    loop = SimpleNamespace(epoch_progress=progress, restarting=False)
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        global_rank=0,
        world_size=1,
        num_devices=1,
        accumulate_grad_batches=1,
        fit_loop=SimpleNamespace(**vars(loop), epoch_loop=SimpleNamespace(batch_progress=progress)),
        training=True,
        testing=False,
        current_epoch=0,
        lightning_module=SimpleNamespace(dtype=torch.float32),
    )
    return data


def our_batches(data: ImageDataModule, device: str = "cpu") -> Iterator[Tensor]:
    """An epoch's images as the network gets them."""
    for batch in data.train_dataloader():
        if device != "cpu":  # row numbers
            batch = batch.to(device, non_blocking=True)
        yield data.on_after_batch_transfer(batch, 0)[0]


class PILImages(Dataset):
    """torchvision's way: an image at a time, as its CIFAR10 does."""

    def __init__(self, images: PackedImages) -> None:
        self.arrays = [np.ascontiguousarray(image.transpose(1, 2, 0)) for image in images.images]
        self.labels = images.labels.tolist()
        self.transform: Any = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4, padding_mode="reflect"),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.arrays[index])), self.labels[index]


def loader(repeats: int) -> list[Row]:
    """Crop, flip and normalise batches of 512, one thread."""
    torch.set_num_threads(1)
    own, share, resident = [], [], []
    theirs: dict[int, list[float]] = {0: [], 1: [], 2: []}
    with tempfile.TemporaryDirectory() as name:
        data = data_module(Path(name))
        images = PILImages(data.train_images)
        for _ in range(repeats):
            for workers, speeds in theirs.items():
                pil = DataLoader(images, BATCH, shuffle=True, num_workers=workers)
                speeds.append(BATCH / _seconds(x for x, _ in pil))
            a_batch = _seconds(our_batches(data), count=80)
            own.append(BATCH / a_batch)
            if arms.ON_GPU:
                data.on_device = True
                resident.append(BATCH / _seconds(our_batches(data, "cuda"), count=80))
                data.on_device = False
            share.append(100 * a_batch / _step())
    rows = [
        Row(f"PIL, a sample at a time, {workers} loader workers", "images/s", speeds)
        for workers, speeds in theirs.items()
    ]
    mine = Row("ours, whole batches, 0 loader workers", "images/s", own)
    rows += [mine, ratio("ours / PIL with 0 workers", mine, rows[0], 15, at_least=True)]
    if arms.ON_GPU:
        rows.append(Row("ours, images on the GPU", "images/s", resident))
    return [*rows, Row("share of the default network's step", "%", share, 1.0)]


def _seconds(batches: Iterator[Tensor], count: int = 8, skipped: int = 2) -> float:
    """Of a batch, after some that are not counted."""
    for _ in range(skipped):
        next(batches)
    began = arms.now()
    for _ in range(count):
        next(batches)
    return (arms.now() - began) / count


def _step() -> float:
    """Seconds of forward, backward and step of the default network on such a batch."""
    net = SpeedNet(10).train()
    (optimizer, _), began = arms.optimized(net, 1), 0.0
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    for _ in range(2):  # the first allocates
        began = time.perf_counter()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
    return time.perf_counter() - began


def unique_memory() -> float:
    """Bytes of this process that no other has (USS)."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    own = [line.split() for line in lines if line.startswith("Private_")]
    return 1024 * sum(int(words[1]) for words in own)


def added_memory(cfg: Any, folder: Path) -> dict[str, Any]:
    """What a rank has more after an epoch than after its imports, the largest rank's."""
    before = unique_memory()
    data = data_module(Path(cfg.case.root))
    data.batch_size = cfg.case.batch_size
    trainer: Any = data.trainer
    trainer.global_rank, trainer.world_size = dist.get_rank(), dist.get_world_size()
    for _ in our_batches(data):
        pass
    added = torch.tensor((unique_memory() - before) / 1e6)
    dist.all_reduce(added, dist.ReduceOp.MAX)
    return {"MB": added.item()}


def memory(repeats: int) -> list[Row]:
    """What an epoch over 50,000 packed images, cropped, flipped, normalised, leaves in a rank."""
    # Of a single rank also the pages of libraries are its own.
    cases = {(1, 64): Row("1 rank, batches of 64", "MB", [])}
    cases |= {(n, 64): Row(f"{n} ranks, batches of 64", "MB", [], 20) for n in (2, 4, 8)}
    cases[2, 512] = Row("2 ranks, batches of 512", "MB", [])
    with tempfile.TemporaryDirectory() as name:
        # Held here too, so that pages of the files are no rank's own.
        held = data_module(Path(name)).train_images
        assert int(held.images.max()) == 255
        for _ in range(repeats):
            for (ranks, size), row in cases.items():
                found = in_ranks(added_memory, ranks, 1, "cpu", root=name, batch_size=size * ranks)
                row.values.append(found["MB"])
    return [*cases.values()]


def sparse(folder: Path, count: int) -> None:
    """A pack of so many images, all black, whose file takes no room on disk."""
    folder.mkdir()
    shape = (count, 3, 32, 32)
    np.lib.format.open_memmap(folder / "images.npy", "w+", np.uint8, shape).flush()
    np.save(folder / "labels.npy", np.random.default_rng(0).integers(0, 10, count))
    (folder / "classes.json").write_text(json.dumps(CLASSES))


def epoch_start(cfg: Any, folder: Path) -> dict[str, Any]:
    """Seconds and bytes from the beginning of an epoch to its first batch, on a rank of two."""
    for pack in "warm-up", "pack":
        data = data_module(folder)
        vars(data)["train_images"] = PackedImages(Path(cfg.case.root) / pack)
        data.trainer.world_size = 2  # type: ignore[union-attr]
        _ = data.split
        before, began = unique_memory(), time.perf_counter()
        batches = our_batches(data)
        next(batches)
        found = {"s": time.perf_counter() - began, "bytes": unique_memory() - before}
    return found


def growth(repeats: int) -> list[Row]:
    """The beginning of an epoch over ever more images, one thread."""
    rows = []
    for count in 10**5, 10**6, 10**7:
        cold = Row(f"{count:,} images: seconds a million, file not in memory", "s", [])
        took = Row(f"{count:,} images: seconds a million", "s", [], 0.2)
        grew = Row(f"{count:,} images: memory an image", "bytes", [])
        with tempfile.TemporaryDirectory() as name:
            sparse(Path(name) / "warm-up", 10**4)
            sparse(Path(name) / "pack", count)
            found = in_ranks(epoch_start, 1, 1, "cpu", root=name)  # reads the file from disk
            cold.values.append(found["s"] / count * 1e6)
            for _ in range(repeats):
                found = in_ranks(epoch_start, 1, 1, "cpu", root=name)
                took.values.append(found["s"] / count * 1e6)
                grew.values.append(found["bytes"] / count)
        rows += [took, cold, grew]
    return rows
