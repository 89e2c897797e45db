"""What the one agreement between ranks costs, as a share of a small step.

python benchmarks/agreement.py      two ranks, a network of two layers, batches of 64 × 32 numbers
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from project.agent import run_ranks
from project.agreement import Agreement
from project.heartbeat import beat
from project.processes import start_fork_server

RANKS, TIMEOUT, REPEATS, STEPS = 2, 60.0, 5, 4000


def measure(cfg: Any, folder: Path) -> dict[str, Any]:
    """What each rank does.

    Returns:
        a_step: seconds of a step of the raw DDP loop; agreement, heartbeat: the share of the time
        that goes into looking whether the ranks are to agree, and agreeing, or into signs of life.
        Medians over the repeats.
    """
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    images, labels = torch.randn(64, 32), torch.randint(10, (64,))
    found = {"a_step": [], "agreement": [], "heartbeat": []}
    for _ in range(REPEATS):
        agreement, looking, beating = Agreement(0, None, None), 0.0, 0.0
        began = time.perf_counter()
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            optimizer.step()
            first = time.perf_counter()
            agreement.look(step)
            second = time.perf_counter()
            beat(step)
            looking += second - first
            beating += time.perf_counter() - second
        total = time.perf_counter() - began
        found["a_step"].append((total - looking - beating) / STEPS)
        found["agreement"].append(looking / total)
        found["heartbeat"].append(beating / total)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    """The command line."""
    config = {"trainer": {"accelerator": "cpu", "devices": RANKS}, "launch": {"timeout": TIMEOUT}}
    start_fork_server()
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / ".hydra").mkdir()
        OmegaConf.save(OmegaConf.create(config), Path(name) / ".hydra" / "config.yaml")
        run_ranks(Path(name), measure, RANKS, TIMEOUT)
        found = json.loads((Path(name) / "results.json").read_text())
    print(
        f"{RANKS} ranks, {found['a_step'] * 1e3:.2f} ms a step: the agreement takes "
        f"{found['agreement']:.2%} of the time, signs of life {found['heartbeat']:.2%}"
    )


if __name__ == "__main__":
    main()
