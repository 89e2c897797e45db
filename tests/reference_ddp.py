"""The classic DDP training script: no Lightning, no Hydra, one image at a time.

torchrun --nproc-per-node=2 tests/reference_ddp.py --data ROOT --epochs 2 --out ref.pt

ROOT is a CIFAR-10 folder or an image folder (ROOT/train/<class>/*). This is the oracle that the
Trainer is judged by: it shares the network with the project, and nothing else.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import datasets, transforms

from project.model import CNN


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore
    parser.add_argument("--data", required=True, metavar="ROOT")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--max-steps", type=int, default=-1, help="-1: all of them")
    parser.add_argument("--batch-size", type=int, default=64, help="images a rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=2, help="loader processes a rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, help="plain state dict of the network")
    parser.add_argument("--trace", help="per-step losses of each rank, and the optimizer's state")
    return parser.parse_args()


def open_images(root: str) -> Dataset:
    to_input = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))]
    )
    if Path(root, "train").is_dir():
        return datasets.ImageFolder(Path(root, "train"), transform=to_input)
    return datasets.CIFAR10(root, train=True, transform=to_input)


def main() -> None:
    args = parse_args()

    # 1. Who am I? torchrun says so in the environment.
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    # 2. Each rank reads its own shard, in a new order every epoch.
    images = open_images(args.data)
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

    # 3. Each rank holds a replica; DDP broadcasts rank 0's and averages the gradients.
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(
        CNN(num_classes=10).to(device), device_ids=[local_rank] if on_gpu else None
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    # 4. The loop.
    step, losses = 0, []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for batch, labels in loader:
            if step == args.max_steps:
                break
            batch, labels = batch.to(device, non_blocking=True), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch), labels)
            loss.backward()
            optimizer.step()
            step += 1
            if args.trace:
                losses.append(loss.item())
            if rank == 0 and step % 100 == 0:
                print(f"epoch {epoch + 1}  step {step}  loss {loss.item():.4f}", flush=True)

    # 5. Rank 0 saves the network without its wrapper.
    if rank == 0:
        torch.save(model.module.state_dict(), args.out)
    if args.trace:
        all_losses: list = [None] * world_size
        dist.all_gather_object(all_losses, losses)
        if rank == 0:
            torch.save({"losses": all_losses, "optimizer": optimizer.state_dict()}, args.trace)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
