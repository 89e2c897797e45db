"""Each mechanism is needed: without it a run comes to its end, and a named test fails."""

import pytest

from conftest import REPOSITORY
from mutants import MUTANTS, kill

# The others by `python tests/mutants.py`: half a minute each.
USUAL = ["no set_epoch", "padded evaluation", "mean of means", "no averaging over the window"]
USUAL += ["augmentation keyed by rank", "schedule stepped per micro-batch"]
USUAL += ["BatchNorm buffers of rank 1 saved"]


@pytest.mark.slow
@pytest.mark.parametrize("name", USUAL)
def test_the_mutant_is_killed(name):
    assert kill(MUTANTS[name]) == "killed"


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutants_code_and_test_are_still_there(name):
    mutant = MUTANTS[name]
    assert (REPOSITORY / "src/project" / mutant.file).read_text().count(mutant.old) == 1
    file, _, test = mutant.test.partition("::")
    assert f"def {test.partition('[')[0]}(" in (REPOSITORY / "tests" / file).read_text()
