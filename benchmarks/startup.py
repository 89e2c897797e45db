"""How long it takes until something happens."""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from arms import REPOSITORY
from PIL import Image
from table import Row, ratio

TRAIN = str(REPOSITORY / "train.py")
NUM_IMAGES = 2000


def startup(repeats: int) -> list[Row]:
    """Answers of Hydra, the first step on two ranks, and the second job of a sweep."""
    torch_ = Row('python -c "import torch"', "s", [])
    help_, cfg = (Row(f"python train.py {word}", "s", []) for word in ("--help", "--cfg job"))
    raw = Row("first step of the raw program under torchrun, 2 ranks", "s", [])
    ours = Row("first step of train.py, 2 ranks", "s", [])
    job = Row("second job of a sweep, start to end, one step on 2 ranks", "s", [], 3.0)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        draw_images(root / "images")
        (raw_words, raw_line), (our_words, our_line) = _raw(root), _ours(root)
        for words in raw_words, our_words:
            times_of([], words, root)  # once before: caches, and our pack of the images
        for _ in range(repeats):
            for row, words in (torch_, ["-c", "import torch"]), (help_, [TRAIN, "--help"]):
                row.values += times_of([], words, root)
            cfg.values += times_of([], [TRAIN, "--cfg", "job"], root)
            raw.values += times_of([raw_line], raw_words, root)[:1]
            ours.values += times_of([our_line], our_words, root)[:1]
            sweep = [*our_words, "seed=0,1,2", "-m"]
            second, third, _ = times_of(["job 1 of 3", "job 2 of 3"], sweep, root)
            job.values.append(third - second)
    return [
        *(torch_, help_, cfg, raw, ours, job),
        ratio("--help / import torch", help_, torch_, 1 / 3),
        ratio("--cfg job / import torch", cfg, torch_, 1 / 3),
        ratio("first step, train.py / raw", ours, raw, 0.9),
    ]


def draw_images(root: Path) -> None:
    """An image folder of noise in ten classes."""
    rng = np.random.default_rng(0)
    for split, count in ("train", NUM_IMAGES), ("test", 100):
        for number in range(count):
            folder = root / split / str(number % 10)
            folder.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")


def _raw(root: Path) -> tuple[list[str], str]:
    program = str(REPOSITORY / "tests/reference_ddp.py")
    words = f"--device cpu --workers 0 --max-steps 1 --data {root}/images --out {root}/net.pt"
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
    return [*launch, program, *words.split()], r"step 1 "


def _ours(root: Path) -> tuple[list[str], str]:
    words = f"""experiment=tutorial trainer=cpu trainer.devices=2 data=imagefolder
        data.root={root}/images data.batch_size=128 trainer.max_steps=1 test=false
        trainer.log_every_n_steps=1"""
    return [TRAIN, *words.split()], r"step 1/"


def times_of(lines: list[str], words: list[str], folder: Path) -> list[float]:
    """Seconds from the command to each line of its output that matches, in their order; its end."""
    began, times, said = time.perf_counter(), list[float](), ""
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for text in process.stdout or ():
            said += text
            if len(times) < len(lines) and re.search(lines[len(times)], text):
                times.append(time.perf_counter() - began)
    if process.returncode or len(times) < len(lines):
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}:\n{said}")
    return [*times, time.perf_counter() - began]
