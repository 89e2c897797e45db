"""The classic DDP training script: no Lightning, no Hydra, one image at a time.

torchrun --nproc-per-node=2 tests/reference_ddp.py --data ROOT --epochs 2 --out ref.pt

ROOT is a CIFAR-10 folder or an image folder (ROOT/train/<class>/*). This is the oracle that the
Trainer is judged by: it shares the network with the project, and no other code. What cannot be
drawn twice, which images to hold out and how to augment each, is handed to it in a file (--given).
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import pkgutil
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision.transforms.functional as TF
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    SequentialLR,
)
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision import datasets

HALF = [0.5, 0.5, 0.5]


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore
    add = parser.add_argument
    add("--data", required=True, metavar="ROOT")
    add(
        "--given",
        help="file of the rows to train and validate on, and an augmentation table each epoch",
    )
    add("--epochs", type=int, default=10)
    add("--max-steps", type=int, default=-1, help="-1: all of them")
    add("--batch-size", type=int, default=64, help="images a rank and backward pass")
    add("--accumulate", type=int, default=1, help="backward passes a step")
    add("--workers", type=int, default=2, help="loader processes a rank")
    add("--net", default="project.model.CNN", help="class of the network")
    add("--net-args", type=json.loads, default={}, metavar="JSON")
    add("--initialise", action="store_true", help="show the network its training images first")
    add("--compile", action="store_true")
    add("--optimizer", choices=["adam", "adamw", "sgd"], default="adam")
    add("--lr", type=float, default=1e-3)
    add("--weight-decay", type=float, default=0.0, help="of matrices; vectors have none")
    add("--schedule", choices=["constant", "linear", "cosine"], default="constant")
    add("--warmup", type=float, default=0.0, help="fraction of all steps")
    add("--clip", type=float, help="largest norm of the gradient")
    add("--precision", choices=["32", "64", "bf16-mixed", "16-mixed"], default="32")
    add("--label-smoothing", type=float, default=0.0)
    add("--padding", type=int, default=0, help="pixels around an image before its crop")
    add("--cutout", type=int, default=0, help="side of the blanked square")
    add(
        "--reseed", action="store_true", help="dropout and its like from (seed, epoch, batch, rank)"
    )
    add("--validate", action="store_true", help="after each epoch")
    add("--seed", type=int, default=0)
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--deterministic", action="store_true", help="on a GPU (set CUBLAS_WORKSPACE_CONFIG)")
    add("--out", required=True, help="plain state dict of the network")
    add("--trace", metavar="FOLDER", help="what each rank saw and did at each step")
    return parser.parse_args(words)


class Images(Dataset):
    """Some rows of a dataset: image (3, 32, 32) float32, label, row."""

    def __init__(self, root: str, rows: list[int] | None, padding: int, cutout: int) -> None:
        folder = Path(root, "train")
        self.files = datasets.ImageFolder(folder) if folder.is_dir() else datasets.CIFAR10(root)
        self.rows = range(len(self.files)) if rows is None else rows
        self.padding, self.cutout = padding, cutout
        self.table: torch.Tensor | None = None  # of this epoch: how each row is augmented

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        row = self.rows[index]
        image, label = self.files[row]
        if self.table is None:
            return TF.normalize(TF.to_tensor(image), HALF, HALF), label, row
        choices = self.table[row].tolist()
        return augmented(TF.to_tensor(image), choices, self.padding, self.cutout), label, row


def augmented(
    image: torch.Tensor,
    choices: list[int],
    padding: int,
    cutout: int,
    mean: list[float] = HALF,
    std: list[float] = HALF,
) -> torch.Tensor:
    """Crops, flips, normalises and blanks one image (3, H, W) in [0, 1], all by torchvision."""
    height, width = image.shape[1:]
    top, left, flip, y, x = choices
    image = TF.crop(TF.pad(image, [padding], padding_mode="reflect"), top, left, height, width)
    image = TF.normalize(TF.hflip(image) if flip else image, mean, std)
    top, left = y - cutout // 2, x - cutout // 2
    bottom, right = min(top + cutout, height), min(left + cutout, width)
    top, left = max(top, 0), max(left, 0)
    return TF.erase(image, top, left, bottom - top, right - left, torch.tensor(0.0))


def make_optimizer(args: argparse.Namespace, net: torch.nn.Module) -> Optimizer:
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    groups = [{"params": weights}]
    if args.weight_decay:
        groups = [{"params": [weight for weight in weights if weight.ndim >= 2]}]
        groups += [{"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0}]
    if args.optimizer == "sgd":
        return SGD(groups, args.lr, momentum=0.9, nesterov=True, weight_decay=args.weight_decay)
    of_adam = AdamW if args.optimizer == "adamw" else Adam
    return of_adam(groups, args.lr, weight_decay=args.weight_decay)


def make_schedule(args: argparse.Namespace, optimizer: Optimizer, num_steps: int) -> LRScheduler:
    num_warmup = round(args.warmup * num_steps)
    falling = {
        "constant": lambda: ConstantLR(optimizer, factor=1),
        "linear": lambda: LinearLR(optimizer, 1, 0, total_iters=num_steps - num_warmup),
        "cosine": lambda: CosineAnnealingLR(optimizer, T_max=num_steps - num_warmup),
    }[args.schedule]()
    if not num_warmup:
        return falling
    rising = LinearLR(optimizer, 1 / num_warmup, total_iters=num_warmup - 1)
    return SequentialLR(optimizer, [rising, falling], milestones=[num_warmup])


def seed_of_step(seed: int, epoch: int, batch: int, rank: int) -> int:
    """63 bits of a BLAKE2b hash of these words and numbers."""
    words = repr(("step", seed, epoch, batch, rank)).encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big") >> 1


def digest(state: dict[str, torch.Tensor]) -> str:
    """A fingerprint of names and bits."""
    parts = [name.encode() + state[name].detach().cpu().numpy().tobytes() for name in sorted(state)]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


class Trace:
    """What a rank saw and did, for the tests to compare.

    losses, rows: of each batch; rates: before each step; weights, buffers: digests after it; val:
    loss and accuracy of each validation.
    """

    def __init__(self) -> None:
        names = "losses", "rows", "rates", "weights", "buffers", "val"
        self.values: dict[str, list] = {name: [] for name in names}

    def batch(self, loss: torch.Tensor, rows: torch.Tensor) -> None:
        self.values["losses"].append(loss.item())
        self.values["rows"].append(rows.tolist())

    def before_step(self, optimizer: Optimizer) -> None:
        self.values["rates"].append([group["lr"] for group in optimizer.param_groups])

    def after_step(self, net: torch.nn.Module) -> None:
        self.values["weights"].append(digest(dict(net.named_parameters())))
        self.values["buffers"].append(digest(dict(net.named_buffers())))


def main(args: argparse.Namespace) -> None:
    # 1. Who am I? torchrun says so in the environment.
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(args.deterministic)
    if not dist.is_initialized():  # the tests train many times in one process
        dist.init_process_group("nccl" if on_gpu else "gloo")

    # 2. Each rank reads its own shard, in a new order every epoch.
    given = torch.load(args.given) if args.given else {"train": None, "val": [], "tables": None}
    images = Images(args.data, given["train"], args.padding, args.cutout)
    sampler = DistributedSampler(
        images, world_size, rank, shuffle=True, seed=args.seed, drop_last=True
    )
    loader = DataLoader(
        images,
        batch_size=args.batch_size,
        sampler=sampler,
        num_workers=args.workers,
        pin_memory=on_gpu,
        drop_last=True,
    )
    held_out = Images(args.data, given["val"], 0, 0)
    share = Subset(held_out, range(rank, len(held_out), world_size))  # nothing padded
    steps_an_epoch = len(loader) // args.accumulate  # an incomplete step is dropped
    num_steps = steps_an_epoch * args.epochs
    num_steps = min(num_steps, args.max_steps) if args.max_steps >= 0 else num_steps

    # 3. Each rank holds a replica; DDP broadcasts rank 0's and averages the gradients.
    torch.manual_seed(args.seed)
    net = pkgutil.resolve_name(args.net)(num_classes=10, **args.net_args).to(device)
    if args.initialise:
        net.initialise(
            torch.stack([images[i][0] for i in range(min(len(images), 5000))]).to(device)
        )
    dtype = torch.float64 if args.precision == "64" else torch.float32
    net.to(dtype)
    if args.compile:
        net.compile()
    model = DistributedDataParallel(net, device_ids=[local_rank] if on_gpu else None)
    optimizer = make_optimizer(args, net)
    scheduler = make_schedule(args, optimizer, num_steps)
    autocast = torch.autocast(
        device.type,
        torch.float16 if args.precision == "16-mixed" else torch.bfloat16,
        enabled=args.precision.endswith("mixed"),
        cache_enabled=False,  # else a weight used twice adds up its gradients in half precision
    )
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "16-mixed")

    # 4. The loop.
    step, trace = 0, Trace() if args.trace else None
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        images.table = given["tables"][epoch] if given["tables"] is not None else None
        model.train()
        whole_steps = itertools.islice(loader, steps_an_epoch * args.accumulate)
        for i, (batch, labels, rows) in enumerate(whole_steps):
            if step == num_steps:
                break
            if args.reseed:
                seed = seed_of_step(args.seed, epoch, i, rank)
                torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed % 2**32)
            is_last = (i + 1) % args.accumulate == 0
            batch = batch.to(device, dtype, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            with contextlib.nullcontext() if is_last else model.no_sync():
                with autocast:
                    loss = F.cross_entropy(
                        model(batch), labels, label_smoothing=args.label_smoothing
                    )
                part = loss / args.accumulate
                scaler.scale(part).backward()
            if trace:
                trace.batch(part, rows)
            if not is_last:
                continue
            if args.clip:
                scaler.unscale_(optimizer)
                weights = [weight for group in optimizer.param_groups for weight in group["params"]]
                torch.nn.utils.clip_grad_norm_(weights, args.clip)
            if trace:
                trace.before_step(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            if trace:
                trace.after_step(net)
            if rank == 0 and (step % 100 == 0 or step == num_steps):
                print(f"epoch {epoch + 1}  step {step}  loss {loss.item():.4f}", flush=True)

        if args.validate:  # with rank 0's running statistics, as they will be saved
            for buffer in net.buffers():
                dist.broadcast(buffer, src=0)
            model.eval()
            sums = torch.zeros(3, dtype=torch.float64, device=device)
            with torch.no_grad(), autocast:
                for batch, labels, _ in DataLoader(share, args.batch_size):
                    logits, labels = net(batch.to(device, dtype)), labels.to(device)
                    sums[0] += F.cross_entropy(logits, labels, reduction="sum").double()
                    sums[1] += (logits.argmax(1) == labels).sum()
                    sums[2] += len(labels)
            dist.all_reduce(sums)
            if trace:
                trace.values["val"].append((sums[:2] / sums[2]).tolist())
        if step == num_steps:
            break

    # 5. Rank 0 saves the network without its wrapper.
    if rank == 0:
        torch.save(net.state_dict(), args.out)
        print(f"saved {args.out}", flush=True)
    if trace:
        states = {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        torch.save(trace.values | states, Path(args.trace, f"{rank}.pt"))


if __name__ == "__main__":
    if not dist.is_torchelastic_launched():
        raise SystemExit(f"torchrun --nproc-per-node=2 {' '.join(sys.argv)}")
    main(parse_args())
    dist.destroy_process_group()
