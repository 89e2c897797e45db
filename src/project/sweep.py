"""What came of a sweep: `python -m project.sweep FOLDER`

Also while it goes on. A table on the console, the same in `sweep.csv`, pictures in `sweep.png`,
the best job.
"""

import argparse
import contextlib
import math
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from project.console import say
from project.errors import UserError
from project.files import write_csv
from project.folder import shown
from project.jobs import DAMAGE, Job, config_dir, read_job

METRICS = ("val/acc", "val/loss", "test/acc", "test/loss")


class Sweep:
    """The jobs of a sweep, and what they are compared by.

    Args:
        folder: of the sweep, with `multirun.yaml`.

    Attributes:
        jobs: by their numbers.
        swept: keys whose values differ between jobs.
        options: that the command line of each job needs.
        metric: `optimized_metric`.
        maximize: whether more of it is better.

    Raises:
        UserError: the folder holds no sweep.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "multirun.yaml").exists():
            raise UserError(f"{folder} holds no sweep (multirun.yaml).")
        names = [path.parents[1].name for path in folder.glob("*/.hydra/overrides.yaml")]
        numbers = sorted(int(name) for name in names if name.isdecimal())
        self.folder, self.jobs = folder, [read_job(folder / str(number)) for number in numbers]
        keys = dict.fromkeys(key for job in self.jobs for key in job.values)
        self.swept = [key for key in keys if len({job.values.get(key) for job in self.jobs}) > 1]
        try:
            config: Any = OmegaConf.load(folder / "multirun.yaml")
            self.options = config_dir(config)
            self.metric: str = config.optimized_metric
            self.maximize = is_maximized(self.metric, config.hydra.sweeper.direction)
        except DAMAGE as error:
            raise UserError(f"{folder / 'multirun.yaml'} is damaged ({error}).") from error

    def score(self, job: Job) -> float:
        """The metric of a job; NaN if it is not complete, or did not measure it."""
        value = job.results.get(self.metric) if job.status == "complete" else None
        return value if isinstance(value, int | float) else math.nan

    def best(self) -> Job | None:
        """The first of the best jobs."""
        scored = [job for job in self.jobs if math.isfinite(self.score(job))]
        sign = 1 if self.maximize else -1
        return max(scored, key=lambda job: sign * self.score(job), default=None)

    def scores(self, *keys: str) -> dict[tuple[str, ...], dict[str, float]]:
        """The metric by the values of `keys`, then by the seed; of jobs that have one."""
        found: dict[tuple[str, ...], dict[str, float]] = {}
        for job in self.jobs:
            if math.isfinite(score := self.score(job)):
                by_seed = found.setdefault(tuple(job.values.get(key, "") for key in keys), {})
                by_seed.setdefault(job.values.get("seed", ""), score)
        return found


def is_maximized(metric: str, direction: str | None) -> bool:
    """Whether more of a metric is better: as `direction` says, else by the metric's name."""
    return not metric.endswith("loss") if direction is None else direction == "maximize"


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; 0 for a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def summarise(folder: Path) -> dict[int, str]:
    """Shows what came of the sweep in a folder, and writes `sweep.csv` and `sweep.png`.

    Returns:
        the status of each job.
    """
    sweep = Sweep(folder)
    metrics = [name for name in METRICS if any(name in job.results for job in sweep.jobs)]
    if sweep.metric not in METRICS:
        metrics.insert(0, sweep.metric)
    rows = [
        {"job": job.number}
        | {key: job.values.get(key, "") for key in sweep.swept}
        | {name: job.results.get(name) for name in metrics}
        | {"epochs": job.results.get("epochs", len(job.history))}
        | {"seconds": job.results.get("seconds"), "status": job.status}
        for job in sweep.jobs
    ]
    reasons = [{"reason": job.results.get("reason", "")} for job in sweep.jobs]
    write_csv(folder / "sweep.csv", [a | b for a, b in zip(rows, reasons, strict=True)])
    from project.sweep_plot import draw  # matplotlib takes a second

    draw(sweep, folder / "sweep.png")
    say("\n".join([*_table(rows), *_last_words(sweep)]))
    return {job.number: job.status for job in sweep.jobs}


def _last_words(sweep: Sweep) -> Iterable[str]:
    for job in sweep.jobs:
        if "reason" in job.results:
            reason = job.results["reason"]
            said = reason if reason.startswith(job.status) else f"{job.status}: {reason}"
            yield f"job {job.number} {said}"
    others = [key for key in sweep.swept if key != "seed"]
    means: dict[str, float] = {}
    for values, by_seed in sweep.scores(*others).items():
        if len(by_seed) > 1:
            where = " ".join(f"{key}={value}" for key, value in zip(others, values, strict=True))
            means[where], deviation = spread([*by_seed.values()])
            of = f"{sweep.metric} {means[where]:.4f} ± {deviation:.4f} over {len(by_seed)} seeds"
            yield f"{of}: {where}" if where else of
    if len(means) > 1:
        yield f"best mean: {(max if sweep.maximize else min)(means, key=lambda w: means[w])}"
    if best := sweep.best():
        yield f"best: job {best.number}, {sweep.metric} {sweep.score(best):.4f}"
        single = ["hydra.mode=RUN"] if "hparams_search" in best.values else []  # no search again
        words = {word.partition("=")[0]: word for word in best.words}.values()  # the last counts
        yield f"  again with: python train.py {shlex.join([*sweep.options, *words, *single])}"
    else:
        known = dict.fromkeys(n for job in sweep.jobs for n in job.results if "/" in n)
        there = f"; there are {', '.join(known)}" if known else ""
        yield f"no complete job has {sweep.metric} (optimized_metric){there}"
    yield f"{shown(sweep.folder / 'sweep.csv')} {shown(sweep.folder / 'sweep.png')}"


def short(value: str) -> str:
    """A value of a search with fewer digits."""
    if len(value) > 10:
        with contextlib.suppress(ValueError):
            return f"{float(value):.4g}"
    return value


def _table(rows: list[dict[str, Any]]) -> Iterable[str]:
    if not rows:
        return
    cells = [[*rows[0]], *([_cell(name, row[name]) for name in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(text.rjust(n) for text, n in zip(line, widths, strict=True))


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if name == "seconds" else f"{value:.4f}"
    return "" if value is None else short(str(value))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(f"python -m {__package__}.sweep", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the sweep, such as multirun/DATE/TIME")
    try:
        summarise(parser.parse_args().folder)
    except UserError as error:
        sys.exit(f"sweep: {error}")


if __name__ == "__main__":
    main()
