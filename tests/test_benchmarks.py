"""The benchmarks run, and no figure is far from where it is to be."""

import csv

import pytest

from conftest import REPOSITORY

NAMES = ("overhead", "step", "loader", "memory", "startup", "scaling", "growth")
SLACK = 1.5  # one repeat, on a machine that may do other work


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_figures_are_near_their_goals(command, tmp_path, name):
    script = str(REPOSITORY / "benchmarks/run.py")
    words = ["--only", name, "--repeats", "1", "--out", str(tmp_path)]
    done = command("python", script, *words, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    with (tmp_path / f"{name}.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["to_reach"]]
    assert rows
    for row in rows:
        median, goal = float(row["median"]), float(row["to_reach"])
        ratio = goal / median if row["at_least"] == "True" else median / goal
        assert ratio < SLACK, row
        assert row["what"] in done.stdout


@pytest.mark.slow
def test_a_wrong_word_is_refused(command, tmp_path):
    script = str(REPOSITORY / "benchmarks/run.py")
    for words in ["--only", "speed"], ["--repeats", "0"]:
        done = command("python", script, *words)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith("run.py: error: argument --")
