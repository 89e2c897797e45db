"""The picture of a sweep: its metric against each value, and the learning curves of all jobs."""

import math
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from project.files import write_atomically
from project.sweep import Sweep, short, spread

NUM_NAMED = 20  # lines that a legend can name
NUM_TICKS = 10  # values that an axis can show one by one


def draw(sweep: Sweep, path: Path) -> None:
    """Draws one panel a swept key, and one of curves.

    In a panel, a line joins the jobs that differ only in its key and the seed; jobs that differ
    only in the seed are one point, their mean, with their standard deviation.
    """
    keys = [key for key in sweep.swept if key != "seed"] or ["seed"]
    columns = min(len(keys) + 1, 3)
    rows = math.ceil((len(keys) + 1) / columns)
    figure = Figure(figsize=(5 * columns, 4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for key, axes in zip(keys, panels, strict=False):
        _against(sweep, key, axes)
    _curves(sweep, panels[len(keys)])
    for axes in panels[len(keys) + 1 :]:
        axes.set_axis_off()
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=110))


def _against(sweep: Sweep, key: str, axes: Any) -> None:
    """The metric against the values of one key."""
    others = [name for name in sweep.swept if name not in (key, "seed")]
    lines: dict[tuple[str, ...], dict[str, tuple[float, float]]] = {}
    for (value, *rest), by_seed in sweep.scores(key, *others).items():
        lines.setdefault(tuple(rest), {})[value] = spread([*by_seed.values()])
    places = _places(list(dict.fromkeys(job.values.get(key, "") for job in sweep.jobs)))
    is_grid = len(places) <= NUM_TICKS and any(len(points) > 1 for points in lines.values())
    for values, points in lines.items():
        xs = sorted(points, key=lambda value: places[value])
        means, deviations = zip(*(points[x] for x in xs), strict=True)
        label = ", ".join(f"{n}={short(v)}" for n, v in zip(others, values, strict=True))
        look = {"label": label} if is_grid else {"color": "C0", "linestyle": ""}
        look |= {"marker": "o", "capsize": 3}
        axes.errorbar([places[x] for x in xs], means, deviations, **look)
    if key == "seed" and lines:
        mean, deviation = spread([score for score, _ in lines[()].values()])
        axes.axhspan(mean - deviation, mean + deviation, alpha=0.15)
        axes.axhline(mean, linestyle=":", label=f"{mean:.4f} ± {deviation:.4f}")
    if min(places.values()) > 0 and max(places.values()) >= 10 * min(places.values()):
        axes.set_xscale("log")
    if len(places) <= NUM_TICKS:
        axes.set_xticks([*places.values()], [short(value) for value in places])
        axes.set_xticks([], minor=True)
    axes.set(xlabel=key, ylabel=sweep.metric)
    axes.grid(alpha=0.3)
    if 0 < len(axes.get_legend_handles_labels()[1]) <= NUM_NAMED and (others or key == "seed"):
        axes.legend(fontsize="small")


def _places(values: list[str]) -> dict[str, float]:
    """Where values stand on an axis: numbers at their place, words in turn."""
    try:
        numbers = {value: float(value) for value in values}
    except ValueError:
        numbers = dict.fromkeys(values, math.nan)
    if all(map(math.isfinite, numbers.values())):
        return numbers
    return {value: float(place) for place, value in enumerate(values)}


def _curves(sweep: Sweep, axes: Any) -> None:
    """The metric after each epoch, of all jobs; val/acc if the metric is none of an epoch."""
    has_metric = any(sweep.metric in row for job in sweep.jobs for row in job.history)
    name = sweep.metric if has_metric else "val/acc"
    axes.set_prop_cycle(color=colormaps["tab20"].colors)  # pyright: ignore
    for job in sweep.jobs:
        points = [(row["epoch"], row[name]) for row in job.history if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", label=f"job {job.number}")
    axes.set(xlabel="epoch", ylabel=name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    if 0 < len(axes.get_legend_handles_labels()[1]) <= NUM_NAMED:
        axes.legend(fontsize="small")
