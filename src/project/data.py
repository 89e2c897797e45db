"""Which images are trained on, validated on, and dealt to which rank in which batch."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import Sampler

from project.errors import UserError
from project.seeds import seed_from
from project.steps import local_batch_size, steps_per_epoch


def stratified_split(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Splits indices into training and validation, each class by `fraction`, both ascending.

    Args:
        labels: (N,) int64.
        fraction: of each class that goes to validation, rounded to whole images; 0 to below 1.
        seed: of the split alone, so that runs of different seeds validate on the same images.
    """
    if not 0 <= fraction < 1:
        raise UserError(f"data.val_fraction={fraction} must lie in [0, 1).")
    generator = torch.Generator().manual_seed(seed_from("split", seed))
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        order = torch.randperm(len(members), generator=generator)
        held_out[members[order[: round(fraction * len(members))]]] = True
    if fraction and not held_out.any():
        raise UserError(f"data.val_fraction={fraction} leaves no image to validate on.")
    return (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]


class TrainBatches(Sampler[Tensor]):
    """A rank's batches of one epoch as index arrays, in the order of `DistributedSampler`.

    The union over ranks of an optimizer step's batches is the same slice of the same permutation
    on any number of ranks. What does not fill an optimizer step at the end of an epoch is dropped.

    Args:
        indices: (N,) rows of the packed images to train on.
        batch_size: images of one optimizer step, over all ranks and accumulated batches.
        epoch: the first to yield.
        start: batches of that epoch to leave out, since they have been trained on.
    """

    def __init__(
        self,
        indices: Tensor,
        batch_size: int,
        rank: int,
        world_size: int,
        accumulate: int,
        seed: int,
        epoch: int = 0,
        start: int = 0,
    ) -> None:
        self.indices, self.rank, self.world_size = indices, rank, world_size
        self.local = local_batch_size(batch_size, world_size, accumulate)
        self.num_batches = steps_per_epoch(len(indices), batch_size) * accumulate
        self.seed, self.epoch, self.start = seed, epoch, start

    def set_epoch(self, epoch: int) -> None:
        """Chooses the permutation of `epoch`; Lightning calls this before each epoch."""
        if epoch != self.epoch:
            self.start = 0
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_batches  # of the whole epoch, wherever it starts

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.indices), generator=generator)  # theirs is a Python list
        order = order[self.rank :: self.world_size].clone()  # no rank keeps the others' share
        for batch in range(self.start, self.num_batches):
            yield self.indices[order[batch * self.local : (batch + 1) * self.local]]


class EvalBatches(Sampler[Tensor]):
    """A rank's evaluation batches: whole batches dealt to the ranks in turn, nothing padded.

    Every image is scored exactly once. A rank that is dealt none gets one batch of no images,
    since all ranks must take part in the first forward (DDP broadcasts buffers there).

    Args:
        indices: (N,) rows of the packed images.
        batch_size: images a batch; the last may hold fewer.
    """

    def __init__(self, indices: Tensor, batch_size: int, rank: int, world_size: int) -> None:
        if batch_size < 1:
            raise UserError(f"data.eval_batch_size={batch_size} must be at least 1.")
        self.batches: Sequence[Tensor] = indices.split(batch_size)[rank::world_size]
        self.batches = self.batches or (indices[:0],)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.batches
