"""How many ranks a config asks for, and whether the machine has the devices for them."""

import os

import torch
from omegaconf import DictConfig, ListConfig

from project.errors import UserError

RANKS_PER_CORE = 4  # on CPUs; more is a typing error, and would drown the machine


def num_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_a_rank(num_ranks: int) -> int:
    """Its share of the cores, unless OMP_NUM_THREADS says otherwise."""
    return int(os.environ.get("OMP_NUM_THREADS") or max(num_cores() // num_ranks, 1))


def on_gpu(trainer: DictConfig) -> bool:
    """Whether ranks get a GPU each: wherever there is one, unless the config insists on CPUs."""
    return trainer.accelerator != "cpu" and torch.cuda.device_count() > 0


def num_local_ranks(trainer: DictConfig) -> int:
    """Ranks on this node: one a GPU, or on CPUs as many as `trainer.devices` says.

    Raises:
        UserError: the devices do not exist, or cannot do what else the config asks for.
    """
    accelerator, devices = trainer.accelerator, trainer.devices
    num_gpus = torch.cuda.device_count()
    if accelerator not in ("auto", "cpu", "gpu", "cuda"):
        raise UserError(f"trainer.accelerator={accelerator}: choose auto, cpu or gpu.")
    if accelerator in ("gpu", "cuda") and num_gpus == 0:
        raise UserError(f"trainer.accelerator={accelerator}: torch sees no GPU here (trainer=cpu?)")
    if isinstance(devices, bool):  # which Python takes for a number
        raise UserError(f"trainer.devices={devices}: give a number, a list of GPUs, -1 or auto.")
    if not on_gpu(trainer):
        limit = RANKS_PER_CORE * num_cores()
        devices = 1 if devices == "auto" else devices
        if not isinstance(devices, int) or not 1 <= devices <= limit:
            raise UserError(f"trainer.devices={devices}: on this CPU choose 1 to {limit} ranks.")
        if str(trainer.get("precision")) in ("16", "16-mixed"):  # Lightning would take bfloat16
            raise UserError("trainer.precision=16-mixed needs a GPU. On CPUs use bf16-mixed.")
        if trainer.get("sync_batchnorm"):
            raise UserError("trainer.sync_batchnorm needs GPUs: on CPUs torch has none.")
        return devices
    chosen = range(num_gpus) if devices in ("auto", -1) else devices
    chosen = range(chosen) if isinstance(chosen, int) else chosen
    if not isinstance(chosen, range | ListConfig) or not chosen:
        raise UserError(f"trainer.devices={devices}: give a number, a list of GPUs, -1 or auto.")
    if not set(chosen) <= set(range(num_gpus)) or len(set(chosen)) < len(chosen):
        raise UserError(f"trainer.devices={devices}: there are {num_gpus} GPUs here, from 0.")
    return len(chosen)


def check_world(num_ranks: int, trainer: DictConfig) -> None:
    """Refuses a config that does not ask for just the ranks that torchrun has started.

    Raises:
        UserError: with both numbers.
    """
    asked = num_ranks * trainer.num_nodes
    world_size = int(os.environ["WORLD_SIZE"])
    if asked != world_size or num_ranks != int(os.environ["LOCAL_WORLD_SIZE"]):
        raise UserError(
            f"trainer.devices={trainer.devices} × trainer.num_nodes={trainer.num_nodes} are "
            f"{asked} ranks, but torchrun started {world_size}."
        )
