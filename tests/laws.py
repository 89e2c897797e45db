"""Programs of a rank: many trainings in one set of processes, since starting those takes longest.

Each is a Train of rank.py; what it returns is in the `results.json` of its folder.
"""

import csv
import gc
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from lightning.pytorch.callbacks import Callback
from omegaconf import OmegaConf, open_dict
from train import train

from project import signals
from project.errors import Preempted
from project.files import write_json
from project.launch import run
from project.processes import end_workers, start_fork_server
from project.rank import Train

CONF = str(Path(__file__).parents[1] / "conf")


def composed(*overrides: str) -> Any:
    with initialize_config_dir(CONF, version_base="1.3"):
        return compose("train", [*overrides])


def launch(
    folder: Path,
    program: Train,
    num_ranks: int,
    device: str = "cpu",
    inplace: bool = False,
    **config: Any,
) -> dict[str, Any]:
    """Runs a program on ranks; returns what it returned.

    Args:
        device: "cpu" or "cuda".
        inplace: in this process, which is quicker.
        config: the program's own.
    """
    where = f"trainer={'cpu' if device == 'cpu' else 'gpu'}", f"trainer.devices={num_ranks}"
    cfg = composed("experiment=quickstart", *where, f"launch.inplace={inplace}")
    (folder / ".hydra").mkdir(parents=True)
    with open_dict(cfg):
        cfg.update(config)
    OmegaConf.save(cfg, folder / ".hydra" / "config.yaml")
    if not inplace:
        start_fork_server()
    return run(folder, program)


class Undrawn(Callback):
    """In the place of the pictures, which take longer than these trainings."""

    def __init__(self, folder: Path) -> None:
        pass


def training(folder: Path, *overrides: str) -> None:
    """One attempt at a run, to its end or to a request to stop, as run_rank makes it."""
    (folder / "ranks").mkdir(parents=True, exist_ok=True)
    with signals.handled(), patch("project.plots.Pictures", Undrawn):
        try:
            results = train(composed(*overrides), folder)
        except Preempted:
            # Here life goes on: a loader that the garbage collector finds waits 5 s for each worker
            # (its queues are finalised first), be it in a process that was forked meanwhile.
            end_workers()
            gc.collect()
            return
    if not dist.is_initialized() or dist.get_rank() == 0:
        write_json(folder / "results.json", results)


def asked_to_stop(step: int, inside: bool = False) -> list[str]:
    target = f"+callbacks.asks={{_target_: faults.Asks, step: {step}, inside: {inside}}}"
    return [target]


def interrupted(cfg: Any, folder: Path) -> dict[str, Any]:
    """Runs each of `cfg.cases` undisturbed, and stopped at each of its steps and taken up again.

    Returns:
        what differs, by case and step.
    """
    found: dict[str, Any] = {}
    for name, case in cfg.cases.items():
        words = [*(case.base or cfg.words), *case.words, f"trainer.devices={cfg.trainer.devices}"]
        training(folder / name / "whole", *words)
        for step in case.steps:
            training(folder / name / str(step), *words, *asked_to_stop(step, case.inside))
            assert not (folder / name / str(step) / "results.json").exists(), (name, step)
            training(folder / name / str(step), *words)
            if not dist.is_initialized() or dist.get_rank() == 0:
                found[f"{name} at {step}"] = differences(
                    folder / name / "whole", folder / name / str(step)
                )
    return found


def regimes(cfg: Any, folder: Path) -> dict[str, Any]:
    """Runs each of `cfg.cases`, stopped after some steps and taken up again where one says so."""
    for name, case in cfg.cases.items():
        for step in case.stops:
            training(folder / name, *case.words, *asked_to_stop(step))
        training(folder / name, *case.words)
    return {}


def busy(cfg: Any, folder: Path) -> dict[str, Any]:
    """Leaves what this job has for itself, and when; long enough to meet the others."""
    began = time.monotonic()
    threading.Event().wait(0.5)
    names = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
    own = {name: os.environ.get(name) for name in names}
    return {**own, "threads": torch.get_num_threads(), "span": [began, time.monotonic()]}


def one_is_killed(cfg: Any, folder: Path) -> dict[str, Any]:
    """Rank 1, while rank 0 is in no collective: it hears of it from the agent."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait(20)
    return {}


def differences(a: Path, b: Path) -> list[str]:
    """Which of the things that a run leaves differ in a bit; times aside."""
    found = [name for name in ("results.json", "metrics.csv") if _text(a / name) != _text(b / name)]
    for name in "last.ckpt", "best.ckpt", "model.pt":
        paths = a / "checkpoints" / name, b / "checkpoints" / name
        if len({path.exists() for path in paths}) > 1:
            found.append(name)
        elif paths[0].exists():
            one, other = (torch.load(path, weights_only=True) for path in paths)
            found += [f"{name} {key}" for key in _leaves_that_differ(one, other)]
    return found


def _text(path: Path) -> Any:
    if path.suffix == ".csv":
        with path.open() as file:
            return list(csv.reader(file))
    return json.loads(path.read_text()) | {"seconds": None}


def _leaves_that_differ(a: Any, b: Any, key: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [name for name in {**a, **b} if name not in ("config", "loops", "num_steps")]
        return [
            leaf
            for name in keys
            for leaf in _leaves_that_differ(a.get(name), b.get(name), f"{key}.{name}")
        ]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [leaf for i, (x, y) in pairs for leaf in _leaves_that_differ(x, y, f"{key}.{i}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if torch.equal(a, b) else [key]
    return [] if a == b else [key]
