"""What this repository's own README says of it is true; a project made from it has another."""

import re
from pathlib import Path

from conftest import REPOSITORY
from laws import composed
from test_jobs import CHOICES
from test_readme import COMMANDS, ELSEWHERE, PAGES, README, TRAININGS


def test_no_command_is_forgotten():
    starts = ("python ", "torchrun ", "pip ", "pytest", "bash ", "uv ", "pre-commit ")
    starts += ("cookiecutter ", "cruft ")
    others = [c for c in COMMANDS if c.startswith(starts) and c not in TRAININGS]
    assert set(others) <= ELSEWHERE.keys()
    tests = "".join(path.read_text() for path in (REPOSITORY / "tests").glob("test_*.py"))
    named = [where for where in ELSEWHERE.values() if re.fullmatch(r"test_\w+", where)]
    assert named
    assert all(f"def {test}(" in tests for test in named)
    assert len(TRAININGS) > 15


def test_every_choice_is_tested():
    groups = {choice.partition("=")[0] for choice in CHOICES}
    files = [path for group in groups for path in REPOSITORY.glob(f"conf/{group}/*.yaml")]
    found = {f"{path.parent.name}={path.stem}" for path in files}
    others = {"data=images", "data=cifar10", "data=imagefolder"}  # which need files
    assert {*CHOICES} == found - others


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


def test_what_is_claimed_names_its_test():
    assert PAGES.count("::") - 1 > 20  # one in a command
