"""Kills a training again and again, and holds what comes of it against the undisturbed one.

python benchmarks/chaos.py                       20 times SIGKILL, on one of two ranks at a time
python benchmarks/chaos.py --kills 100 --seed 1
"""

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from project import heartbeat

TRAIN = Path(__file__).parents[1] / "train.py"
RANKS = 2
# The quickstart, longer, with validation and saving also inside epochs of 45 steps.
WORDS = ["experiment=quickstart", "logger=none", "trainer.max_epochs=40", "launch.timeout=60"]
WORDS += ["+trainer.val_check_interval=15", "checkpoint.every_n_steps=10"]
OTHERS = itertools.cycle(["saving", "validation", "set-up"])
# Seconds of an attempt after which, at most, the next moment in a phase is waited for.
LONGEST = {"training": 4.0, "validation": 3.0, "saving": 3.0, "set-up": 0.2}


class Training:
    """A run that goes on in the background.

    Attributes:
        restarts: when the parent has said that a rank is gone, seconds.
    """

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.restarts = folder, list[float]()
        command = [sys.executable, TRAIN, *WORDS, *words, f"hydra.run.dir={folder}"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=folder.parent
        )
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        for line in self.process.stderr or ():
            print(f"  {line.rstrip()}", flush=True)
            if "Restart " in line:
                self.restarts.append(time.monotonic())

    def doing(self, rank: int) -> str:
        """The phase of a rank, by its latest sign of life."""
        try:
            return heartbeat.read(self.folder / f"ranks/{rank}.beat").doing
        except FileNotFoundError:
            return ""

    def pid(self, rank: int) -> int:
        """Process id of a rank, 0 if it is not there."""
        try:
            return int((self.folder / f"ranks/{rank}.pid").read_text() or 0)
        except FileNotFoundError:
            return 0

    def saved(self) -> tuple[int, int]:
        """When the last checkpoint was written, nanoseconds, and its step; zeros for none."""
        path = self.folder / "checkpoints/last.ckpt"
        if not path.exists():
            return 0, 0
        return path.stat().st_mtime_ns, torch.load(path, weights_only=True)["global_step"]

    def wait(self) -> int:
        """Its exit status."""
        status = self.process.wait()
        self._listener.join()
        return status


def kill(training: Training, rank: int, phase: str, gone: set[int]) -> str:
    """Kills a rank at a random moment in a phase of the next attempt; says in which it was.

    Args:
        gone: process ids of earlier attempts; grows.
    """
    wanted = random.uniform(0, LONGEST[phase])
    also = "training" if phase == "set-up" else phase  # set-up does not come again
    began, pids = 0.0, [0]
    while True:
        if training.process.poll() is not None:
            sys.exit("The training has ended too early: more epochs, or fewer kills.")
        if not began:
            pids = [training.pid(number) for number in range(RANKS)]
            began = time.monotonic() if all(pids) and not gone & {*pids} else 0.0
        elif time.monotonic() - began >= wanted and training.doing(rank) in (phase, also):
            break
        time.sleep(0.0005)
    os.kill(pids[rank], signal.SIGKILL)
    doing = training.doing(rank)
    gone |= {*pids}
    return doing


def chaos(folder: Path, kills: int) -> dict[str, Any]:
    """A training that is killed so many times, at least every other time inside a training step.

    Returns:
        phases: in which the kills came, and how often; seconds: from each to the parent's word;
        steps: from which the next attempt goes on; stuck: attempts that saved, but no later step.
    """
    training = Training(folder, f"launch.max_restarts={kills}")
    phases, seconds, steps, stuck, gone = Counter[str](), [], [0], [], set[int]()
    for number in range(kills):
        phase = next(OTHERS) if 2 * phases["training"] > number + 1 else "training"
        rank, before = random.randrange(RANKS), training.saved()
        phases[kill(training, rank, phase, gone)] += 1
        killed = time.monotonic()
        while len(training.restarts) <= number:
            if training.process.poll() is not None:
                sys.exit("The training did not survive.")
            time.sleep(0.001)
        seconds.append(training.restarts[number] - killed)
        time_of_save, step = training.saved()
        stuck += [number] if time_of_save > before[0] and step <= steps[-1] else []
        steps.append(step)
    status = training.wait()
    if status:
        sys.exit(f"The training has ended with {status}.")
    return {"phases": phases, "seconds": seconds, "steps": steps, "stuck": stuck}


def bits_that_differ(a: Any, b: Any) -> int:
    """Of two checkpoints; of what is no tensor each difference counts as one."""
    if isinstance(a, dict) and isinstance(b, dict):
        names = {*a, *b} - {"config", "loops"}  # which count restarts, and name them
        return sum(bits_that_differ(a.get(name), b.get(name)) for name in names)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return sum(map(bits_that_differ, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        rows = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b)]
        return sum(int(byte).bit_count() for byte in rows[0] ^ rows[1] if byte)
    return int(a != b)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of ranks, moments and their order")
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        whole, broken = Path(name, "undisturbed"), Path(name, "disturbed")
        if Training(whole).wait():
            sys.exit("The undisturbed training has failed.")
        found = chaos(broken, arguments.kills)
        lost = {}
        for file in "last.ckpt", "best.ckpt", "model.pt":
            states = [
                torch.load(f / "checkpoints" / file, weights_only=True) for f in (whole, broken)
            ]
            lost[file] = bits_that_differ(*states)
        tables = [(folder / "metrics.csv").read_text() for folder in (whole, broken)]
    print(f"went on from steps {found['steps'][1:]}")
    for phase, count in found["phases"].most_common():
        print(f"killed in {phase:<10} {count:3} {'#' * count}")
    print(
        f"{arguments.kills} faults tried, {len(found['seconds'])} survived, worst time to stop "
        f"{max(found['seconds']):.1f} s, bits that differ {sum(lost.values())}, "
        f"{time.monotonic() - began:.0f} s in all"
    )
    if sum(lost.values()) or tables[0] != tables[1] or found["stuck"]:
        sys.exit(
            f"differences: {lost}, metrics.csv {tables[0] != tables[1]}, stuck {found['stuck']}"
        )
    if 2 * found["phases"]["training"] < arguments.kills:
        sys.exit("Fewer than half of the kills came inside training steps.")


if __name__ == "__main__":
    main()
