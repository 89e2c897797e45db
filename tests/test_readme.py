"""Every command of the README and of docs/ is run, shortened, and what they name exists."""

import re
import shlex
import shutil
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from train import train

from conftest import REPOSITORY

from project.errors import UserError
from project.launch import run
from project.resume import take_up

README = (REPOSITORY / "README.md").read_text()
DOCS = [*(REPOSITORY / "docs").glob("*.md")]
# The steps of your-project.md build on each other: test_your_project.py goes them.
PAGES = README + "".join(p.read_text() for p in DOCS if p.name != "your-project.md")
CODE = [line.strip() for line in PAGES.splitlines() if line.startswith("    ")]
CODE += re.findall(r"`(python [^`]+|torchrun [^`]+)`", PAGES)
COMMANDS = sorted({line.split("  ")[0].split(" && ")[-1] for line in CODE})
# A project's own data, networks and recipes are its own to test.
OURS = {"cifar10", "imagefolder", "shapes", "cnn", "cnn_small", "resnet18", "speednet", "mine"}
OURS |= {"quickstart", "tutorial"}
CHOICE = re.compile(r"\b(?:data|experiment|model)=([a-z]\w*)")
TRAININGS = [c for c in COMMANDS if c.startswith("python train.py")]
TRAININGS = [c for c in TRAININGS if {*CHOICE.findall(c)} <= OURS]
# As few images and steps as can be.
SHORT = [
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=1",
    "trainer.limit_val_batches=1",
    "trainer.limit_test_batches=1",
]
SHORT += ["data.batch_size=8", "data.val_fraction=0.1"]
SLOW = [["trainer.precision=bf16-mixed"], ["model=resnet18"]]  # by the first word
# Those that other tests run as they are, or that are about more than a job.
ELSEWHERE = {
    "bash .ci/run": "CI",
    "pytest": "CI",
    "pytest -m slow": "CI",
    "pytest -m faults": "CI",
    "pytest -m faults_all -s": "the table of docs/reliability.md",  # template only
    "python benchmarks/chaos.py": "the figures of README.md",  # template only
    'python -c "import torch"': "a yardstick of docs/speed.md",  # template only
    "python train.py --cfg job": "test_questions_about_the_config_import_no_torch",  # template only
    "python benchmarks/run.py": "the figures of README.md and docs/speed.md",  # template only
    "python benchmarks/agreement.py": "those of docs/reliability.md",  # template only
    "torchrun --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGUSR1 ...": (
        "test_torchruns_ranks_save_and_are_not_started_again"
    ),
    'pytest tests/test_parity.py -m "slow or not slow"': "CI",
    'pytest tests/test_parity.py tests/test_devices.py -m "slow or not slow"': "CI",
    "python tests/mutants.py": "test_mutants.py",
    "pre-commit install": "CI runs its hooks' tools",
    "python -m project.env": "test_env.py",
    "python train.py model=mine": "test_your_project.py",
    "pip install cookiecutter cruft": "CI installs the extra dev",  # template only
    "cookiecutter <path, git URL or zip of this repository>": "test_copy.py",  # template only
    "cruft create <path or git URL of it>": "test_copy.py",  # template only
    "python train.py hparams_search=mine": "test_a_sweep_of_ones_own_is_a_file",
    "torchrun --max-restarts": "a name, no command",
    "torchrun --max-restarts=3": "test_an_outside_torchrun_restarts_in_the_same_folder",
    "python train.py resume=multirun/<date>/<time>": (
        "test_resume_completes_the_sweep_in_the_bits_of_undisturbed_jobs"
    ),
    'pip install -e ".[optuna]"': "CI installs the extra dev, which holds it",
    "python train.py --help": "test_help_under_torchrun_ends_on_all_ranks",
    "torchrun --nproc-per-node=4 train.py trainer.devices=4": (
        "test_torchrun_trains_in_one_run_folder"
    ),
}
SOME_ELSEWHERE = {
    "::": "ids, of which test_each_test_that_is_named_exists",
    ".sweep multirun/": "test_the_summary_can_be_asked_for_at_any_time",
    "reference_ddp.py": "test_the_commands_of_the_page_come_to_the_same",
    "outputs/ours": "test_the_commands_of_the_page_come_to_the_same",
}
for part, where in SOME_ELSEWHERE.items():
    ELSEWHERE |= {command: where for command in COMMANDS if part in command}


@pytest.fixture(scope="module")
def trained(run_here, tmp_path_factory):
    """A checkpoint of a run, for commands that take a file."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    return run_here(folder, "experiment=quickstart", *SHORT) / "checkpoints/best.ckpt"


def words_of(command: str, request: pytest.FixtureRequest) -> list[str]:
    """The command's values, with real files in place of FILE and FOLDER, and small data."""
    words = shlex.split(command)[2:]
    if any(word.endswith("=FILE") for word in words):
        checkpoint = request.getfixturevalue("trained")
        words = [word.replace("FILE", str(checkpoint)) for word in words]
        words += [] if "fit=false" in words else ["experiment=quickstart"]
    elif "data=imagefolder" in words:
        words = [word for word in words if not word.startswith("data.root")]
        words += [f"data.root={request.getfixturevalue('some_images')}"]
    elif not any("quickstart" in word for word in words):
        words += [f"data.root={request.getfixturevalue('cifar10_folder')}"]
    return words


def first_job(words: list[str]) -> list[str]:
    """The words of a sweep's first job, or of the first trial of a search."""
    own = [w for w in words if w.startswith("hydra") or w in ("-m", "hparams_search=optuna")]
    found = []
    overrides: Any = OverridesParser.create().parse_overrides([w for w in words if w not in own])
    for override in overrides:
        value = override.input_line.partition("=")[2]
        if override.is_interval_sweep():
            value = override.value().start
        elif override.is_sweep_override():
            value = next(override.sweep_string_iterator())
        found.append(f"{override.get_key_element()}={value}")
    return found


@pytest.mark.filterwarnings("ignore")  # the compiler's
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(c, marks=[pytest.mark.slow] if c.split()[2:3] in SLOW else [])
        for c in TRAININGS
        if c not in ELSEWHERE
    ],
)
def test_the_command_runs(job, request, command, tmp_path):
    if "resume=FOLDER" in command:
        trained = request.getfixturevalue("trained").parents[1]
        folder, words = shutil.copytree(trained, tmp_path / "run"), shlex.split(command)[3:]
        words = [word.replace("20", "3") for word in words]
        if take_up(folder, words, REPOSITORY / "conf"):
            run(folder, train)
        return
    words = [word for word in words_of(command, request) if "trainer.devices" not in word]
    if "-m" in words or "hparams_search=optuna" in words:
        words = first_job(words)
    if "trainer=gpu" in words and not torch.cuda.is_available():
        with pytest.raises(UserError, match="torch sees no GPU here"):
            job(*words)
    elif "fit=false" in words:
        job(*words)
    else:
        more = ["trainer.max_epochs=2"] if "ckpt_path" in command else []
        job(*words, *SHORT, *more)


def test_every_choice_of_help_and_readme_exists():
    for group, name in re.findall(r"\b(experiment|debug|model|optimizer|data)=([a-z]\w+)", PAGES):
        if name != "mine":
            assert (REPOSITORY / f"conf/{group}/{name}.yaml").exists(), f"{group}={name}"


def test_each_test_that_is_named_exists():
    named = re.findall(r"\btests/(test_\w+\.py)::(test_\w+)", PAGES)
    assert len(named) == PAGES.count("::")
    for file, test in named:
        assert f"def {test}(" in (REPOSITORY / "tests" / file).read_text(), test


def test_each_file_that_is_linked_exists():
    for page in [REPOSITORY / "README.md", *DOCS]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
