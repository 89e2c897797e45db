"""Each mechanism is needed: without it a run comes to its end, and a named test fails."""

import re

import pytest

from conftest import REPOSITORY
from mutants import MUTANTS, kill
from regimes import REGIMES
from test_devices import SCORINGS, name_of

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
    code = (REPOSITORY / "src/project" / mutant.file).read_text()
    assert code.count(mutant.old) == 1
    file, test, params = re.findall(r"^(.+)::(\w+)\[(.+)\]$", mutant.test)[0]
    assert f"def {test}(" in (REPOSITORY / "tests" / file).read_text()
    known = {*REGIMES, *map(name_of, SCORINGS)}
    assert params in ("2", "4") or params.rpartition("-")[0] in known
