"""A real all-reduce over all devices of this machine, started as a training is."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from project.agent import run_ranks
from project.devices import num_cores, on_gpu
from project.errors import RankFailed, UserError

MESSAGE = 64 * 2**20  # bytes
TIMEOUT = 60.0  # seconds


def measure(num_gpus: int, problems: list[str]) -> dict[str, Any]:
    """Starts a rank a GPU, or up to four on CPUs, as a training does, and lets them add up."""
    ranks = num_gpus or min(num_cores(), 4)
    trainer = {"accelerator": "auto", "devices": ranks}
    config = OmegaConf.create({"trainer": trainer, "launch": {"timeout": TIMEOUT}})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / ".hydra").mkdir()
        OmegaConf.save(config, Path(folder) / ".hydra" / "config.yaml")
        try:
            run_ranks(Path(folder), all_reduce, ranks, TIMEOUT)
        except (RankFailed, UserError) as error:
            problems.append(f"an all-reduce over {ranks} ranks failed: {error}")
            return {"ranks": ranks, "works": False}
        measured = json.loads((Path(folder) / "results.json").read_text())
    return {"ranks": ranks, "works": True} | {k: measured[k] for k in ("backend", "bus_gb_per_s")}


def all_reduce(cfg: Any, folder: Path) -> dict[str, Any]:
    """What each rank does: sums 64 MiB of float32 over the ranks, five times.

    Returns:
        backend, and the median bus bandwidth in GB/s: bytes / seconds * 2 (n - 1) / n
        (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    device = "cuda" if on_gpu(cfg.trainer) else "cpu"
    ranks, times = dist.get_world_size(), []
    for _ in range(6):  # the first is a warm-up
        values = torch.full((MESSAGE // 4,), dist.get_rank() + 1.0, device=device)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(values)
        total = values[-1].item()  # waits for a GPU
        times.append(time.perf_counter() - started)
        if total != ranks * (ranks + 1) / 2:
            raise ArithmeticError(f"1 + ... + {ranks} gave {total}")
    bandwidth = MESSAGE / sorted(times[1:])[2] * 2 * (ranks - 1) / ranks / 1e9
    return {"backend": "nccl" if device == "cuda" else "gloo", "bus_gb_per_s": round(bandwidth, 2)}
