"""What this repository's own README says of it is true; a project made from it has another."""

import re
from pathlib import Path

from conftest import REPOSITORY
from laws import composed
from test_readme import README, TRAININGS


def test_the_commands_are_found():
    assert len(TRAININGS) > 15


def test_the_plain_default_is_the_cifar10_recipe():
    assert composed() == composed("experiment=cifar10")


def test_each_recipe_says_command_accuracy_and_time():
    for path in sorted((REPOSITORY / "conf/experiment").glob("*.yaml")):
        head = [line for line in path.read_text().splitlines() if line.startswith("# ")]
        assert any("python train.py" in line for line in head), path
        assert any("measured" in line for line in head), path


def test_each_file_has_its_line():
    named = set(re.findall(r"\b\w+\.py\b", README.split("## Where things are")[1]))
    files = {path.name for path in Path(REPOSITORY, "src/project").glob("*.py")}
    assert files - {"__init__.py"} <= named


def test_it_is_short():
    assert len(README.splitlines()) < 250
