"""Each mechanism is needed: without it a run comes to its end, and a named test fails."""

import pytest

from conftest import REPOSITORY
from mutants import MUTANTS, kill


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_killed(name):
    assert kill(MUTANTS[name]) == "killed"


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutants_code_and_test_are_still_there(name):
    mutant = MUTANTS[name]
    assert (REPOSITORY / "src/project" / mutant.file).read_text().count(mutant.old) == 1
    file, _, test = mutant.test.partition("::")
    assert f"def {test.partition('[')[0]}(" in (REPOSITORY / "tests" / file).read_text()
