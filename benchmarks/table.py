"""Rows of figures as a Markdown table, a CSV file and a picture."""

import csv
import datetime
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from matplotlib.figure import Figure

from project.devices import num_cores


@dataclass
class Row:
    """One figure, measured several times.

    Args:
        what: was measured.
        unit: of the values, "×" for the ratio of two of them.
        values: one a repeat.
        reach: what the figure is to reach, None where it is only shown.
    """

    what: str
    unit: str
    values: list[float]
    reach: float | None = None
    at_least: bool = False

    @property
    def median(self) -> float:
        """Of all repeats."""
        return statistics.median(self.values)

    @property
    def goal(self) -> str:
        """In words, and whether it is reached."""
        if self.reach is None:
            return ""
        is_met = self.median >= self.reach if self.at_least else self.median <= self.reach
        return f"{'>=' if self.at_least else '<='} {self.reach:g}{'' if is_met else ' (missed)'}"


def ratio(what: str, above: Row, below: Row, reach: float | None = None, **kwargs: bool) -> Row:
    """What one row is over another, repeat by repeat, since the machine's pace changes."""
    pairs = zip(above.values, below.values, strict=True)
    return Row(what, "×", [a / b for a, b in pairs], reach, **kwargs)


def machine() -> str:
    """Where and with what the figures were measured."""
    with Path("/proc/cpuinfo").open() as file:
        names = [line.partition(": ")[2].strip() for line in file if line.startswith("model name")]
    versions = [
        f"{name} {metadata.version(name)}" for name in ("torch", "torchvision", "lightning")
    ]
    return (
        f"{num_cores()} CPU cores ({names[0] if names else platform.machine()}), Python "
        f"{platform.python_version()}, {', '.join(versions)}, {datetime.date.today()}"
    )


def show(name: str, rows: Sequence[Row], folder: Path) -> None:
    """Prints a table, and writes `<name>.csv` and `<name>.png`."""
    print(f"\n**{name}** (`python {' '.join(sys.argv)}`; {machine()})\n")
    print("| what | median | least to most | to reach |\n| --- | --- | --- | --- |")
    for row in rows:
        least, most = (_number(value) for value in (min(row.values), max(row.values)))
        print(
            f"| {row.what} | {_number(row.median)} {row.unit} | {least} to {most} | {row.goal} |",
            flush=True,
        )
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["what", "unit", "median", "to_reach", "at_least", "values"])
        for row in rows:
            values = " ".join(f"{value:.6g}" for value in row.values)
            goal = [row.reach, row.at_least]
            writer.writerow([row.what, row.unit, f"{row.median:.6g}", *goal, values])
    draw(name, rows).savefig(folder / f"{name}.png", dpi=110, bbox_inches="tight")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def draw(name: str, rows: Sequence[Row]) -> Figure:
    """Bars of medians with least and most, a panel for each unit; a line where one is to come."""
    units = list(dict.fromkeys(row.unit for row in rows))
    heights = [sum(row.unit == unit for row in rows) for unit in units]
    figure = Figure(figsize=(9, 0.4 * len(rows) + 0.9 * len(units)))
    panels = figure.subplots(len(units), 1, squeeze=False, height_ratios=heights)
    for unit, axes in zip(units, panels[:, 0], strict=True):
        shown = [row for row in rows if row.unit == unit]
        for place, row in enumerate(shown):
            spread = [[row.median - min(row.values)], [max(row.values) - row.median]]
            axes.barh(place, row.median, xerr=spread, color="tab:blue", ecolor="black")
            if row.reach is not None:
                axes.plot([row.reach] * 2, [place - 0.4, place + 0.4], color="tab:red")
        axes.set_yticks(range(len(shown)), [row.what for row in shown])
        axes.invert_yaxis()
        axes.set_xlabel(unit)
    figure.suptitle(f"{name} (red: to reach)")
    figure.tight_layout()
    return figure
