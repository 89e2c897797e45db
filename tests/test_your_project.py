"""A newcomer's five minutes: docs/your-project.md, step by step, in a copy of this repository."""

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from conftest import REPOSITORY, draw, history, outcome

from project.schema import check_nodes

PAGE = (REPOSITORY / "docs/your-project.md").read_text()
FILE = r"`([\w/]+\.(?:py|yaml))`:$"
COMMAND = "    (?:python|rm|sed) "
LOGGER, DELETE = 5, 6  # steps
STEPS = re.split(r"^\*\*\d\. ", PAGE, flags=re.M)[1:]


def parts(step: str) -> list[list[str]]:
    """The files and the commands of a step, in their order: path and text, or "" and a command."""
    found = []
    for line in step.splitlines(keepends=True):
        if place := re.search(FILE, line):
            found.append([place[1], ""])
        elif re.match(COMMAND, line):
            found.append(["", line])
        elif found and found[-1][0] and line.startswith(("    ", "\n")):
            found[-1][1] += line
    return [[path, textwrap.dedent(text).strip() + "\n"] for path, text in found]


class Newcomer:
    """Does what the page says, in a copy of what the repository needs to train and to test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in "src", "conf", "tests":
            skip = shutil.ignore_patterns("__pycache__")
            skip = shutil.ignore_patterns("__pycache__", "test_copy.py")  # template only
            shutil.copytree(REPOSITORY / name, folder / name, ignore=skip)
        for name in "docs", ".ci", ".github":
            if (REPOSITORY / name).exists():
                shutil.copytree(REPOSITORY / name, folder / name)
        for name in "train.py", "pyproject.toml", "README.md":
            shutil.copy(REPOSITORY / name, folder)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.folder / "src")}
        done = subprocess.run(
            [*words], cwd=self.folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def check(self) -> None:
        """Lets ruff and pyright see the code, once `watch` may import Lightning."""
        path = self.folder / "pyproject.toml"
        text = path.read_text()
        assert ",task," in text
        path.write_text(text.replace(",task,", ",task,watch,", 1))
        self.run(sys.executable, "-m", "ruff", "check", "src")
        self.run(sys.executable, "-m", "ruff", "format", "--check", "src")
        self.run(sys.executable, "-m", "pyright", "src")

    def follow(self, step: str) -> Path:
        """Writes the step's files and gives its commands; returns the folder of the last run."""
        folder = Path()
        for number, (path, text) in enumerate(parts(step)):
            if path:
                self.write(self.folder / path, text)
                continue
            program, *words = shlex.split(text, comments=True)
            if program == "python":
                folder = self.folder / "runs" / f"{STEPS.index(step)}-{number}"
                self.run(sys.executable, *words, f"hydra.run.dir={folder}")
            else:
                self.run(program, *words)
        return folder

    def write(self, path: Path, text: str) -> None:
        """Makes a file, or goes on with one."""
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(("\n\n" if file.tell() else "") + text)


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: Any) -> Newcomer:
    return Newcomer(tmp_path_factory.mktemp("newcomer") / "repository")


@pytest.fixture(scope="module")
def runs(newcomer: Newcomer) -> list[Path]:
    """The last run of each step."""
    draw(newcomer.folder / "data/photos", "train", 100)
    draw(newcomer.folder / "data/photos", "test", 20)
    found = []
    for number, step in enumerate(STEPS):
        if number == LOGGER:  # whose package is not there
            step = "\n".join(line for line in step.splitlines() if "python train.py" not in line)
        if number == DELETE:
            newcomer.check()
        found.append(newcomer.follow(step))
    return found


def test_each_step_ends_in_a_command():
    assert len(STEPS) == DELETE + 1
    for step in STEPS:
        assert len(parts(step)) > 1
        assert parts(step)[-1][1].startswith("python train.py ")
    found = [part for step in STEPS for part in parts(step)]
    assert [path for path, _ in found if path] == re.findall(FILE, PAGE, re.M)
    assert [path for path, _ in found].count("") == len(re.findall(f"^{COMMAND}", PAGE, re.M))


@pytest.mark.slow
def test_each_step_runs(runs):
    kept = [folder for number, folder in enumerate(runs) if number != LOGGER]
    assert [outcome(folder)["status"] for folder in kept] == ["complete"] * len(kept)
    assert outcome(runs[1])["test/count"] == 200


@pytest.mark.slow
def test_a_network_and_data_of_ones_own_train_on_two_ranks(runs):
    results = outcome(runs[2])
    assert results["test/acc"] == 1
    assert (results["epochs"], results["steps"]) == (4, 36)
    assert (runs[2] / "ranks/1-0.log").exists()


@pytest.mark.slow
def test_the_last_line_of_a_run_evaluates_it(newcomer, runs):
    said = (runs[2] / "train.log").read_text()
    line = said[said.index("evaluate with: ") :].splitlines()[0].partition("python train.py ")[2]
    newcomer.run(sys.executable, "train.py", *shlex.split(line), "hydra.run.dir=evaluated")
    assert outcome(newcomer.folder / "evaluated")["test/acc"] == 1
    assert "trusted=" in line


@pytest.mark.slow
def test_the_metric_is_recorded_and_right(runs):
    results, rows = outcome(runs[3]), history(runs[3])
    assert len(rows) == 4
    assert results["val/f1"] == max(float(row["val/f1"]) for row in rows)
    assert results["test/f1"] == results["test/acc"] == 1
    assert "test/acc 1.0000  test/f1 1.0000" in (runs[3] / "train.log").read_text()


@pytest.mark.slow
def test_the_metric_is_that_of_a_network_that_has_learnt_nothing(newcomer, runs):
    words = ["experiment=mine", "callbacks=f1", "optimizer.lr=1e-9", "trainer.max_epochs=1"]
    newcomer.run(sys.executable, "train.py", *words, "hydra.run.dir=nothing")
    results = outcome(newcomer.folder / "nothing")
    # One class for all has recall 1 and precision 1/2 for it; or it takes each for the other.
    expected = {0.5: (2 / 3 + 0) / 2, 0.0: 0.0}[results["test/acc"]]
    assert results["test/f1"] == pytest.approx(expected)


@pytest.mark.slow
def test_the_callback_logs_its_steps(runs):
    with (runs[4] / "csv/version_0/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["step/gradient_norm"]]
    assert [int(row["step"]) for row in rows] == [*range(2, 37, 2)]
    assert all(float(row["step/gradient_norm"]) > 0 for row in rows)


@pytest.mark.slow
def test_the_logger_is_one_of_lightnings(newcomer, runs):
    cfg = OmegaConf.load(newcomer.folder / "conf/logger/wandb.yaml")
    check_nodes(OmegaConf.create({"logger": cfg}))
    assert cfg.wandb.project == "day-and-night"


@pytest.mark.slow
def test_what_is_left_is_a_project(newcomer, runs):
    assert not (newcomer.folder / "docs").exists()
    newcomer.run(sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow or not slow")
    some = [f"tests/test_{name}.py" for name in ("jobs", "mistakes", "readme", "run")]
    left = newcomer.run(sys.executable, "-m", "pytest", "-q", *some).stdout
    assert "passed" in left


@pytest.mark.slow
def test_the_config_is_printed_resolved(newcomer, runs):
    options = ["--cfg", "job", "--resolve", "model=mine", "data=mine"]
    cfg: Any = OmegaConf.create(newcomer.run(sys.executable, "train.py", *options).stdout)
    assert (cfg.model.width, cfg.data.image_size, cfg.seed) == (16, 8, 0)


@pytest.mark.slow
def test_help_shows_a_yaml_that_was_added(newcomer, runs):
    said = newcomer.run(sys.executable, "train.py", "--help").stdout
    assert "model: cnn, cnn_small, mine, speednet\n" in said
    assert said.count("\n  python ") >= 10  # commands people need
