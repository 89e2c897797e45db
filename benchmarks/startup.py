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
    questions = {
        'python -c "import torch"': ["-c", "import torch"],
        "python train.py --help": [TRAIN, "--help"],
        "python train.py --cfg job": [TRAIN, "--cfg", "job"],
    }
    firsts = {
        "first step of the raw program under torchrun, 2 ranks": "raw",
        "first step of train.py, 2 ranks": "ours",
    }
    times: dict[str, list[float]] = {what: [] for what in [*questions, *firsts, "job"]}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        draw_images(root / "images")
        programs = {"raw": _raw(root), "ours": _ours(root)}
        for program, line in programs.values():
            seconds_to(line, program, root)  # once before: caches, and our pack of the images
        for _ in range(repeats):
            for what, words in questions.items():
                times[what].append(seconds_to("", words, root))
            for what, program in firsts.items():
                words, line = programs[program]
                times[what].append(seconds_to(line, words, root))
            sweep = [*_ours(root)[0], "seed=0,1,2", "-m"]
            first, second = (seconds_to(f"job {n} of 3", sweep, root) for n in (1, 2))
            times["job"].append(second - first)
    rows = {what: Row(what, "s", values) for what, values in times.items()}
    torch_, help_, cfg, raw, ours, job = rows.values()
    job.what, job.reach = "second job of a sweep, start to end, one step on 2 ranks", 3.0
    return [
        *rows.values(),
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


def seconds_to(line: str, words: list[str], folder: Path) -> float:
    """From the command to the line of its output that matches; without one, to its end."""
    began, found = time.perf_counter(), None
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        said = ""
        for text in process.stdout or ():
            said += text
            if line and found is None and re.search(line, text):
                found = time.perf_counter() - began
    if process.returncode or (line and found is None):
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}:\n{said}")
    return found or time.perf_counter() - began
