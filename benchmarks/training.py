"""What a step costs: the overhead of the Trainer, and what devices and options bring."""

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arms
import torch
import torch.distributed as dist
from arms import ON_GPU, SMOOTHING, Arm, Batches
from omegaconf import OmegaConf
from table import Row, ratio
from torch import nn

from project.agent import run_ranks
from project.model import SpeedNet

TIMEOUT = 300.0
ARMS = {"fixed": arms.fixed, "raw": arms.raw, "barebones": arms.barebones}
ARMS |= {"usual": arms.usual, "ours": arms.ours}
WORDS = {
    "fixed": "forward, backward and step on one batch",
    "raw": "raw DDP loop",
    "barebones": "Trainer(barebones=True)",
    "usual": "Trainer as templates use it: metrics and self.log each step",
    "ours": "train.py, everything on",
}


def in_ranks(
    measure: Callable[..., dict[str, Any]],
    num_ranks: int,
    threads: int,
    accelerator: str = "auto",
    **case: Any,
) -> dict[str, Any]:
    """What `measure(cfg, folder)` returns on rank 0 of so many ranks.

    Args:
        case: what it is told, by `cfg.case`.
    """
    trainer = {"accelerator": accelerator, "devices": num_ranks}
    config = {"trainer": trainer, "launch": {"timeout": TIMEOUT}, "case": case}
    environment = {"OMP_NUM_THREADS": str(threads)}  # given, they also leave the console alone
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / ".hydra").mkdir()
        OmegaConf.save(OmegaConf.create(config), folder / ".hydra" / "config.yaml")
        run_ranks(folder, measure, num_ranks, TIMEOUT, environment=environment)
        results = json.loads((folder / "results.json").read_text())
    return {name: value for name, value in results.items() if name not in ("status", "seconds")}


def tiny() -> nn.Module:
    """So small that only overhead is left."""
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


def speednet() -> nn.Module:
    """The default network."""
    return SpeedNet(10)


ON_CPUS: dict[str, Any] = {"batch_size": 128, "steps": 14, "skipped": 2, "log_every": 2}
ON_GPUS: dict[str, Any] = {"batch_size": 1024, "steps": 220, "skipped": 20, "log_every": 50}
NETS = {"tiny": (tiny, (32,)), "speednet": (speednet, (3, 32, 32))}


def batches(case: Any) -> Batches:
    """A rank's share of a global batch, drawn.

    Args:
        case: net, batch_size (global), steps, skipped, log_every.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    count = case.batch_size // dist.get_world_size()
    drawn = [
        (
            torch.randn(count, *NETS[case.net][1], generator=generator).to(device),
            torch.randint(10, (count,), generator=generator).to(device),
            torch.arange(count).to(device),
        )
        for _ in range(2)
    ]
    return Batches(drawn, case.steps, case.skipped, case.log_every)


def alternate(cfg: Any, folder: Path) -> dict[str, Any]:
    """The arms of a case in turn, each time another one first: seconds a step of each."""
    names = [*cfg.case.arms]
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(cfg.case.repeats):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            arm = ARMS.get(name) or functools.partial(variant, **OPTIONS[name])
            found[name].append(seconds(arm, cfg.case))
    return found


def seconds(arm: Arm, case: Any) -> float:
    """Of a step, on a network of its own; the slowest rank's."""
    torch.manual_seed(0)
    timed = batches(case)
    arm(NETS[case.net][0](), timed)
    slowest = torch.tensor(timed.seconds)  # on the CPU: by gloo
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def overhead(repeats: int) -> list[Row]:
    """A network so small that only overhead is left: 64 × 32 numbers a rank, two layers."""
    case: dict[str, Any] = {"net": "tiny", "steps": 2000, "skipped": 50, "log_every": 50}
    return [
        row
        for ranks in worlds()
        for row in _arms(repeats, ranks, "barebones", 1.0, batch_size=64 * ranks, **case)
    ]


def step(repeats: int) -> list[Row]:
    """The default network, a global batch of 128 on CPUs, a thread a rank."""
    case: dict[str, Any] = {"net": "speednet"} | (ON_GPUS if ON_GPU else ON_CPUS)
    return [row for ranks in worlds() for row in _arms(repeats, ranks, "raw", 1.02, **case)]


def _arms(repeats: int, ranks: int, yardstick: str, reach: float, **case: Any) -> list[Row]:
    """All arms, what they cost more than the raw loop, and ours over one of them."""
    found = in_ranks(alternate, ranks, 1, arms=[*ARMS], repeats=repeats, **case)
    where = f"{ranks} rank{'s' if ranks > 1 else ''}"
    rows = {
        name: Row(f"{words}, {where}", "ms a step", [1e3 * t for t in found[name]])
        for name, words in WORDS.items()
    }
    raw = rows["raw"]
    extra = [a - b for a, b in zip(rows["ours"].values, raw.values, strict=True)]
    compared = [Row(f"ours - raw loop, {where}", "ms a step", extra)]
    compared.append(ratio(f"raw loop / one batch, {where}", raw, rows["fixed"], 1.03))
    for name in "barebones", "usual", "ours":
        goal = reach if (name, yardstick) == ("ours", "raw") else None
        compared.append(ratio(f"{name} / raw loop, {where}", rows[name], raw, goal))
    if yardstick == "barebones":
        over = ratio(f"ours / barebones, {where}", rows["ours"], rows["barebones"], reach)
        compared.append(over)
    return [*rows.values(), *compared]


def worlds() -> list[int]:
    """Numbers of ranks to measure: one and two, as far as there are GPUs, if there are any."""
    return [n for n in (1, 2) if n <= torch.cuda.device_count()] if ON_GPU else [1, 2]


def scaling(repeats: int) -> list[Row]:
    """train.py at one global batch: two ranks of a thread each over one of two; or 1, 2, 4 GPUs."""
    case: dict[str, Any] = {"net": "speednet"} | (ON_GPUS if ON_GPU else {**ON_CPUS, "steps": 26})
    ways = {"1 rank × 2 threads": (1, 2), "2 ranks × 1 thread": (2, 1)}
    if ON_GPU:
        counts = [n for n in (1, 2, 4) if n <= torch.cuda.device_count()]
        ways = {f"{n} GPU{'s' if n > 1 else ''}": (n, 4) for n in counts}
    both = {"raw": "raw DDP loop", "ours": "train.py"}
    rows = {(arm, way): Row(f"{both[arm]}, {way}", "images/s", []) for arm in both for way in ways}
    for number in range(repeats):
        turn = -1 if number % 2 else 1
        for way in [*ways][::turn]:
            names, (ranks, threads) = [*both][::turn], ways[way]
            found = in_ranks(alternate, ranks, threads, arms=names, repeats=1, **case)
            for arm in both:
                rows[arm, way].values.append(case["batch_size"] / found[arm][0])
    first, *others = ways
    goal: dict[str, Any] = {} if ON_GPU else {"reach": 0.95, "at_least": True}
    return [*rows.values()] + [
        ratio(
            f"{both[arm]}, {way} / {first}",
            rows[arm, way],
            rows[arm, first],
            **(goal if arm == "ours" else {}),
        )
        for arm in both
        for way in others
    ]


def variant(net: nn.Module, batches: Batches, **options: Any) -> None:
    """The raw loop with an option."""
    wrap = {key: value for key, value in options.items() if key not in ("compile", "bf16", "fused")}
    if wrap.pop("contiguous", False):
        net.to(memory_format=torch.contiguous_format)
    if options.get("compile"):
        net.compile()
    model = arms.wrapped(net, **wrap).train()
    optimizer, scheduler = arms.optimized(net, len(batches))
    if options.get("fused"):
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = True, False
    for images, labels, _ in batches:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=options.get("bf16", False)):
            loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "broadcast_buffers=False": {"broadcast_buffers": False},
    "fused SGD": {"fused": True},
    "torch.compile": {"compile": True},
    "bf16-mixed": {"bf16": True},
    "contiguous, not channels_last": {"contiguous": True},
}


def options(repeats: int) -> list[Row]:
    """What options of DDP, optimizer, network and precision bring, on two ranks if possible."""
    case: dict[str, Any] = {"net": "speednet"} | (ON_GPUS if ON_GPU else ON_CPUS)
    names = ["raw", *OPTIONS]
    found = in_ranks(alternate, max(worlds()), 1, arms=names, repeats=repeats, **case)
    rows = {name: Row(name, "ms a step", [1e3 * t for t in found[name]]) for name in names}
    rows["raw"].what = "raw DDP loop"
    return [
        rows["raw"],
        *(ratio(f"with {name} / without", rows[name], rows["raw"]) for name in OPTIONS),
    ]
