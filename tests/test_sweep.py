"""A sweep's jobs are runs: each once, with its own ranks and folder, whatever the others do."""

import csv
import inspect
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from train import main

from conftest import REPOSITORY, TINY, needs_docs, outcome
from laws import busy, composed, differences
from test_readme import TRAININGS

from project import parallel, signals, sweep_plot
from project.cli import explained
from project.entry import _register
from project.errors import Preempted, UserError
from project.files import write_csv, write_json
from project.folder import in_use
from project.launch import run
from project.parallel import Share, run_at_once
from project.processes import start_fork_server
from project.resume import resumed, take_up_sweep
from project.search import OptunaSweeper
from project.search_space import distribution
from project.sweep import Sweep, summarise
from project.sweep import main as main_of_summary
from project.sweeper import GridSweeper

TINY = [*(word for word in TINY if "batch_size" not in word), "data.batch_size=60", "logger=none"]
DEVICES = [1, 2, 3, 1]


class Watched(NamedTuple):
    """A sweep: when each job began, and what the process that launches held after it."""

    folder: Path
    status: int
    output: str
    errors: str
    began: list[float]
    held: list[dict[str, Any]]


@pytest.fixture(scope="module")
def watch(start, tmp_path_factory) -> Callable[..., Watched]:
    def watch(*words: str) -> Watched:
        folder = tmp_path_factory.mktemp("sweep a=b ü") / "sweep"
        paths = os.pathsep.join(str(REPOSITORY / name) for name in ("src", "tests", ""))
        program = str(REPOSITORY / "tests/watched.py")
        words = "-m", *TINY, *words, f"hydra.sweep.dir='{folder}'"
        output, began, held = "", [], []
        with start("python", program, *words, PYTHONPATH=paths) as process:
            for line in process.stdout:
                if line.startswith("holds "):
                    held.append(json.loads(line.removeprefix("holds ")))
                    continue
                output += line
                if line.startswith("job ") and " of " in line:
                    began.append(time.monotonic())
            errors = process.stderr.read()
        return Watched(folder, process.returncode, output, errors, began, held)

    return watch


@pytest.fixture(scope="module")
def watched(watch) -> Watched:
    """12 jobs on 1 to 3 ranks."""
    watched = watch("seed=0,1,2", "trainer.devices=1,2,3,1")
    assert (watched.status, watched.errors) == (0, "")
    return watched


def test_each_job_runs_once_with_its_own_ranks_and_all_of_its_data(watched):
    jobs = sorted(int(path.name) for path in watched.folder.iterdir() if path.is_dir())
    assert jobs == [*range(12)]
    for number in jobs:
        folder = watched.folder / str(number)
        config = OmegaConf.load(folder / ".hydra/config.yaml")
        assert (config.seed, config.trainer.devices) == (number // 4, DEVICES[number % 4])
        results = outcome(folder)
        assert (results["status"], results["steps"], results["test/count"]) == ("complete", 12, 101)
        logs = {path.name for path in (folder / "ranks").glob("*.log")}
        assert logs == {f"{rank}-0.log" for rank in range(1, config.trainer.devices)}
    begun = re.findall(r"^job (\d+) of 12: seed=(\d) trainer.devices=(\d)$", watched.output, re.M)
    assert begun == [(str(n), str(n // 4), str(DEVICES[n % 4])) for n in range(12)]
    assert not any(folder.name != "multirun.yaml" for folder in watched.folder.glob("*.yaml"))


def test_of_two_equal_jobs_the_second_gives_the_bits_of_the_first_and_of_a_plain_run(watched, job):
    for seed in range(3):
        first, again = (watched.folder / str(4 * seed + place) for place in (0, 3))
        assert differences(first, again) == []
    assert differences(watched.folder / "11", job(*TINY, "seed=2")) == []
    assert differences(watched.folder / "0", watched.folder / "11") != []


def test_a_job_leaves_nothing_for_the_next(watched, troubled):
    """Also one that fails; the first starts the fork server."""
    assert (len(watched.held), len(troubled.held)) == (12, 6)
    for first, *more in watched.held, troubled.held:
        for later in more:
            assert later["memory"] < 1.1 * first["memory"]
            assert {**later, "memory": 0} == {**first, "memory": 0}


def test_a_warm_job_takes_three_seconds_beside_its_training(watched):
    """Its ranks start, train 12 steps, test, draw and end: all of it counts here."""
    spans = [after - before for before, after in itertools.pairwise(watched.began[1:])]
    assert sorted(spans)[len(spans) // 2] < 3, spans


def test_the_summary_has_a_line_a_job_and_the_command_that_repeats_the_best(watched, command):
    table = watched.output[watched.output.index("\njob ", watched.output.rindex("complete in")) :]
    lines = table.strip().split("\n")
    head = "job seed trainer.devices val/acc val/loss test/acc test/loss epochs seconds status"
    assert lines[0].split() == head.split()
    with (watched.folder / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    for number, (line, row) in enumerate(zip(lines[1:13], rows, strict=True)):
        results = outcome(watched.folder / str(number))
        values = [str(number), str(number // 4), str(DEVICES[number % 4])]
        metrics = [results[name] for name in head.split()[3:7]]
        ends = ["2", f"{results['seconds']:.1f}", "complete"]
        assert line.split() == [*values, *(f"{metric:.4f}" for metric in metrics), *ends]
        assert [float(row[name]) for name in head.split()[3:7]] == metrics
        assert [row[name] for name in ("job", "seed", "trainer.devices")] == values
    assert (watched.folder / "sweep.png").stat().st_size > 10_000
    [again] = [line for line in lines if "again with: python train.py " in line]
    assert any(line.startswith("best mean: trainer.devices=") for line in lines)
    best = max(range(12), key=lambda n: outcome(watched.folder / str(n))["val/acc"])
    assert f"best: job {best}, val/acc " in table
    words = shlex.split(again.partition("train.py ")[2])
    config = OmegaConf.load(watched.folder / str(best) / ".hydra/config.yaml")
    assert composed(*words) == config


# Without ranks: what is composed, run, told


@pytest.fixture
def sweep(tmp_path, monkeypatch) -> Callable[..., tuple[Any, list[str]]]:
    """Sweeps of train.py whose jobs are `work`: the status, and the jobs that ran.

    By default a job is complete with an accuracy of a tenth of its seed; or has no network to
    train, with model=resnet18.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_plot, "draw", lambda sweep, path: path.touch())  # takes a second
    monkeypatch.setattr(signals, "_asked", 0)  # what a test before this one has asked for
    monkeypatch.setattr(inspect.unwrap(main), "__module__", "__main__")  # as when it is run

    def sweep(*words: str, work: Callable[[Path], int] | None = None) -> tuple[Any, list[str]]:
        ran = []

        def job(folder: Path, share: Any = None) -> int:
            ran.append(folder.name)
            return (work or complete)(folder)

        _register([GridSweeper, OptunaSweeper], job)
        monkeypatch.setattr(sys, "argv", [str(REPOSITORY / "train.py"), *words])
        try:
            with explained(main):
                main()
        except SystemExit as ended:
            return ended.code, ran
        return 0, ran

    return sweep


def complete(folder: Path) -> int:
    config = OmegaConf.load(folder / ".hydra/config.yaml")
    metrics = {"val/acc": config.seed / 10, "val/loss": 1 - config.seed / 10}
    write_json(
        folder / "results.json", {"status": "complete", **metrics, "epochs": 1, "seconds": 1.0}
    )
    return 0


def fails_for_odd_seeds(folder: Path) -> int:
    config = OmegaConf.load(folder / ".hydra/config.yaml")
    if config.seed % 2 == 0:
        return complete(folder)
    write_json(folder / "results.json", {"status": "failed", "reason": "odd"})
    return 1


def test_a_job_that_fails_ends_no_other_and_the_sweep_says_which(sweep, capfd):
    status, ran = sweep("-m", "seed=range(5)", "hydra.sweep.dir=s", work=fails_for_odd_seeds)
    assert (status, ran) == (1, ["0", "1", "2", "3", "4"])
    out, err = capfd.readouterr()
    assert "job 1 failed: odd" in out
    assert "val/acc 0.2000 ± 0.2000 over 3 seeds" in out
    assert "best mean" not in out
    assert err == "train.py: failed: 1, 3. Go on with: python train.py resume=s\n"


def test_a_combination_that_cannot_be_composed_is_recorded_and_the_others_run(sweep, capfd):
    words = ["scheduler=constant,nope", "seed=0,1"]
    status, ran = sweep("-m", *words, "hydra.sweep.dir=s")
    assert (status, ran) == (1, ["0", "1"])
    reason = "There is no scheduler=nope. scheduler: constant, cosine, linear."
    assert outcome(Path("s/2")) == {"status": "failed", "reason": reason}
    assert capfd.readouterr().err.endswith("failed: 2, 3. Go on with: python train.py resume=s\n")


def test_a_sweep_of_which_nothing_can_be_composed_is_refused_and_leaves_nothing(sweep):
    with pytest.raises(UserError, match=r"There is no model=nope."):
        sweep("-m", "model=nope,none", "hydra.sweep.dir=s")
    with pytest.raises(UserError, match=r"Did you mean optimizer.lr\?"):
        sweep("-m", "optimizer.lrr=1,2", "hydra.sweep.dir=s")
    assert not Path("s").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("hydra.sweep.subdir=x", "the folder of a job is its number"),
        ("hydra.sweeper.direction=up", "direction=up: maximize or minimize"),
        ("optimized_metric=3", "optimized_metric=3 is not of type str"),
        ("hydra/launcher=joblib hydra.launcher.n_jobs=0", "n_jobs=0: a number of jobs, or -1"),
        ("hydra/launcher=joblib hydra.launcher.n_job=2", "Did you mean hydra.launcher.n_jobs?"),
        ("optimizer.lr=interval(0,1)", "interval(0,1): hparams_search=optuna takes intervals"),
        ("seed=range(0)", "These words ask for no job"),
        ("hydra/launcher=joblb", "There is no hydra/launcher=joblb. Did you mean joblib?"),
    ],
)
def test_a_mistake_about_the_sweep_is_refused(sweep, words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        sweep("-m", "seed=0,1", "hydra.sweep.dir=s", *words.split())


def test_a_sweep_under_torchrun_is_refused(sweep, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(UserError, match="no torchrun"):
        sweep("-m", "seed=0,1")


def test_the_config_files_may_change_while_a_sweep_goes_on(sweep, monkeypatch):
    """Every job is composed before the first begins."""
    seen = []

    def work(folder: Path) -> int:
        seen.append(len([*Path("s").glob("*/.hydra/config.yaml")]))
        return complete(folder)

    sweep("-m", "seed=0,1,2", "hydra.sweep.dir=s", work=work)
    assert seen == [3, 3, 3]


def test_a_used_folder_is_refused_unless_the_sweep_goes_on(sweep, capfd):
    sweep("-m", "seed=0,1", "hydra.sweep.dir=s")
    status, ran = sweep("-m", "seed=0,1", "hydra.sweep.dir=s")
    assert ran == []
    assert status == "train.py: s already holds a run. Choose another folder."


def test_losses_are_minimized_and_the_direction_can_be_said(sweep, capfd):
    words = "-m", "seed=1,2,3"
    for more, best in [
        ([], 2),
        (["optimized_metric=val/loss"], 2),
        (["hydra.sweeper.direction=minimize"], 0),
        (["optimized_metric=val/loss", "hydra.sweeper.direction=maximize"], 0),
    ]:
        sweep(*words, *more)
        assert f"best: job {best}, " in capfd.readouterr().out
    sweep(*words, "optimized_metric=val/f1")
    said = "no complete job has val/f1 (optimized_metric); there are val/acc, val/loss"
    assert said in capfd.readouterr().out


def test_the_picture_shows_means_and_deviations_over_seeds_and_all_curves(sweep):
    def work(folder: Path) -> int:
        write_csv(folder / "metrics.csv", [{"epoch": n, "val/acc": n / 10} for n in (1, 2)])
        return complete(folder)

    sweep("-m", "optimizer.lr=0.1,0.2", "seed=0,2,4", "hydra.sweep.dir=s", work=work)
    found = Sweep(Path("s"))
    against, curves = Figure().subplots(1, 2)
    sweep_plot._against(found, "optimizer.lr", against)
    sweep_plot._curves(found, curves)
    [(line, _, [bars])] = [container.lines for container in against.containers]
    assert line.get_xydata() == pytest.approx(np.array([[0.1, 0.2], [0.2, 0.2]]))
    spans = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert spans == [pytest.approx([0.0, 0.4])] * 2  # 0, 0.2, 0.4: mean 0.2, deviation 0.2
    assert (against.get_xlabel(), against.get_ylabel()) == ("optimizer.lr", "val/acc")
    drawn = [curve.get_xydata().tolist() for curve in curves.lines]
    assert drawn == [[[1, 0.1], [2, 0.2]]] * 6


def test_a_stop_ends_the_sweep_with_its_summary(sweep, capfd):
    def work(folder: Path) -> int:
        if folder.name != "1":
            return complete(folder)
        write_json(
            folder / "results.json", {"status": "preempted", "reason": "stopped", "signal": 15}
        )
        return 143

    status, ran = sweep("-m", "seed=0,1,2", "hydra.sweep.dir=s", work=work)
    assert (status, ran) == (143, ["0", "1"])
    out, err = capfd.readouterr()
    words = [line.split()[-1] for line in out.split("epochs")[1].splitlines()[1:4]]
    assert words == ["complete", "preempted", "waiting"]
    assert err == "train.py: the sweep has stopped. Go on with: python train.py resume=s\n"


def test_a_request_at_the_last_moment_of_a_job_stops_the_sweep(sweep, monkeypatch):
    """The job is complete, and no other begins."""

    def work(folder: Path) -> int:
        monkeypatch.setattr(signals, "_asked", signal.SIGINT)
        return complete(folder)

    assert sweep("-m", "seed=0,1,2", work=work) == (130, ["0"])


def test_what_goes_wrong_around_a_job_ends_no_other(sweep, capfd):
    """Its folder is in use, full, or holds what nobody can read."""

    def work(folder: Path) -> int:
        if folder.name == "0":
            raise UserError("in use")
        if folder.name == "1":
            raise OSError(28, "No space left on device", "file")
        if folder.name == "2":
            (folder / "results.json").write_text("{")
            return 0
        return complete(folder)

    status, ran = sweep("-m", "seed=range(4)", "hydra.sweep.dir=s", work=work)
    assert (status, ran) == (1, [*"0123"])
    assert [job.status for job in Sweep(Path("s")).jobs] == ["waiting"] * 2 + ["failed", "complete"]
    out, err = capfd.readouterr()
    assert "results.json is damaged" in out
    assert "No space left" in err
    assert "train.py: failed: 0, 1, 2. Go on" in err


def test_the_summary_can_be_asked_for_at_any_time(sweep, monkeypatch, capfd):
    sweep("-m", "seed=0,1", "hydra.sweep.dir=s")
    Path("s/1/results.json").unlink()
    monkeypatch.setattr(sys, "argv", ["sweep", "s"])
    with in_use(Path("s/1")):
        main_of_summary()
    assert capfd.readouterr().out.count("running") == 1
    main_of_summary()
    assert capfd.readouterr().out.count("interrupted") == 1
    monkeypatch.setattr(sys, "argv", ["sweep", "nowhere"])
    with pytest.raises(SystemExit, match=r"sweep: nowhere holds no sweep"):
        main_of_summary()


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [c for c in TRAININGS if " -m " in c or "hparams_search=optuna" in c]
)
def test_each_sweep_of_the_pages_is_composed(sweep, command):
    """Its first job is run in test_readme.py."""
    few = ["hydra.sweeper.n_trials=2"] if "optuna" in command else []
    status, ran = sweep(*shlex.split(command)[2:], *few, work=complete)
    assert status == 0
    assert len(ran) > 1


@needs_docs
def test_a_sweep_of_ones_own_is_a_file(sweep, tmp_path, capfd):
    """The one of docs/sweeps.md, from another folder of configs."""
    page = (REPOSITORY / "docs/sweeps.md").read_text()
    text = textwrap.dedent(page[page.index("    # @package _global_") :].partition("\n\n")[0])
    (tmp_path / "conf/hparams_search").mkdir(parents=True)
    (tmp_path / "conf/hparams_search/mine.yaml").write_text(text)
    own = ["--config-dir", f"{tmp_path}/conf", "hparams_search=mine", "hydra.sweep.dir=s"]
    assert sweep(*own, "model=cnn", "optimizer.weight_decay=0") == (0, ["0", "1", "2"])
    assert "again with: python train.py --config-dir=" in capfd.readouterr().out
    shutil.rmtree("s/1")
    assert go_on(sweep, "s") == (0, ["1"])
    rates = [OmegaConf.load(f"s/{job}/.hydra/config.yaml").optimizer.lr for job in range(3)]
    assert rates == [0.1, 0.2, 0.5]


# Going on


def go_on(sweep, folder: str, *words: str, **options) -> tuple[Any, list[str]]:
    """resume=folder words..."""
    assert resumed([f"resume={folder}"]) == Path(folder).absolute()
    return sweep(*take_up_sweep(Path(folder).absolute(), [*words], REPOSITORY / "conf"), **options)


def test_complete_jobs_are_left_alone_and_all_others_run(sweep):
    sweep(
        "-m",
        "seed=range(5)",
        "scheduler=constant,nope",
        "hydra.sweep.dir=s",
        work=fails_for_odd_seeds,
    )
    shutil.rmtree("s/4")
    before = {path: path.read_bytes() for path in Path("s/0").rglob("*") if path.is_file()}
    status, ran = go_on(sweep, "s")
    assert status == 1  # scheduler=nope
    assert ran == ["2", "4", "6"]
    assert before == {path: path.read_bytes() for path in Path("s/0").rglob("*") if path.is_file()}


def test_values_on_top_reach_all_jobs_but_not_those_that_the_sweep_varies(sweep):
    sweep("-m", "seed=0,1", "hydra.sweep.dir=s", work=fails_for_odd_seeds)
    shutil.copytree("s/1", "s/missing")
    shutil.rmtree("s/1")
    shutil.rmtree("s/missing")
    go_on(sweep, "s", "trainer.max_epochs=20")
    for job in "01":
        assert OmegaConf.load(f"s/{job}/.hydra/config.yaml").trainer.max_epochs == 20
    with pytest.raises(UserError, match="seed=3: this sweep varies seed"):
        go_on(sweep, "s", "seed=3")
    with pytest.raises(UserError, match="resume keeps the choices of the run"):
        go_on(sweep, "s", "model=cnn")


def test_a_value_that_one_job_cannot_take_changes_none(sweep):
    sweep("-m", "+trainer.extra=0,???", "hydra.sweep.dir=s", work=fails_for_odd_seeds)
    before = {path: path.read_bytes() for path in Path("s").rglob("*.yaml")}
    for word in "trainer.devices=999", "trainer.nonsense=1":
        with pytest.raises((UserError, ConfigCompositionException)):
            go_on(sweep, "s", word)
    assert before == {path: path.read_bytes() for path in Path("s").rglob("*.yaml")}


@pytest.mark.parametrize(
    "word", ["hydra.sweep.dir=x", "hydra.mode=RUN", "+hydra.sweep.dir=x", "hydra/help=train"]
)
def test_words_about_another_sweep_are_refused(sweep, word):
    sweep("-m", "seed=0,1", "hydra.sweep.dir=s")
    with pytest.raises(UserError, match=re.escape(f"{word} is for new sweeps")):
        go_on(sweep, "s", word)


@pytest.mark.parametrize("file", ["metrics.csv", "results.json", ".hydra/overrides.yaml"])
@pytest.mark.parametrize("content", [b"\xff\xfe", b"epoch,val/acc\n1,x,3"])
def test_damaged_files_of_one_job_take_the_summary_from_no_other(sweep, capfd, file, content):
    sweep("-m", "seed=1,2", "hydra.sweep.dir=s")
    Path("s/1", file).write_bytes(content)
    capfd.readouterr()
    summarise(Path("s"))
    out = capfd.readouterr().out
    assert "best: job 0, val/acc 0.1000" in out or file == "metrics.csv"
    assert out.count("complete") == 1 or file == "metrics.csv"


def test_a_damaged_sweep_is_named(tmp_path):
    (tmp_path / "multirun.yaml").write_text("hydra: 3")
    for content in b"hydra: 3", b"a: [1", b"\xff\xfe", b"":
        (tmp_path / "multirun.yaml").write_bytes(content)
        with pytest.raises(UserError, match=r"multirun.yaml is damaged"):
            take_up_sweep(tmp_path, [], REPOSITORY / "conf")
        with pytest.raises(UserError, match=r"multirun.yaml is damaged"):
            Sweep(tmp_path)
    with pytest.raises(UserError, match="holds no sweep"):
        Sweep(tmp_path / "other")


# Optuna

THRESHOLD = ["hydra.sweeper.pruner._target_=optuna.pruners.ThresholdPruner"]


def search(sweep, *words: str, n: int = 6, **options: Any) -> tuple[Any, list[str]]:
    own = ["hparams_search=optuna", f"hydra.sweeper.n_trials={n}", "hydra.sweep.dir=s"]
    return sweep(*own, "seed=range(0,9)", *words, **options)


def trials(folder: str = "s") -> list[tuple[str, dict[str, Any], Any]]:
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder}/study.db")
    study = optuna.load_study(study_name="sweep", storage=storage)
    return [(trial.state.name, trial.params, trial.value) for trial in study.trials]


def test_a_search_is_one_study_whose_trials_are_the_jobs(sweep, capfd):
    status, ran = search(sweep, "optimizer.lr=tag(log,interval(0.001,1))")
    assert (status, ran) == (0, [*"012345"])
    for number, (state, params, value) in enumerate(trials()):
        config = OmegaConf.load(f"s/{number}/.hydra/config.yaml")
        assert state == "COMPLETE"
        assert params == {"seed": config.seed, "optimizer.lr": config.optimizer.lr}
        assert value == outcome(Path(f"s/{number}"))["val/acc"] == config.seed / 10
    best = max(range(6), key=lambda number: trials()[number][2])
    out, err = capfd.readouterr()
    assert f"best: job {best}, " in out
    assert err == ""
    [again] = [line for line in out.splitlines() if "again with: " in line]
    words = shlex.split(again.partition("train.py ")[2])
    assert words[-1] == "hydra.mode=RUN"
    assert composed(*words[:-1]) == OmegaConf.load(f"s/{best}/.hydra/config.yaml")


def test_a_search_that_was_interrupted_ends_like_one_that_was_not(sweep, monkeypatch, tmp_path):
    """Also in the middle of a trial, which then goes on."""
    search(sweep)
    undisturbed = trials()
    monkeypatch.chdir(tmp_path / "s")

    def stopped(folder: Path) -> int:
        return complete(folder) if folder.name != "3" else 143

    assert search(sweep, n=2) == (0, ["0", "1"])
    assert search(sweep, work=stopped) == (143, ["2", "3"])
    assert [state for state, _, _ in trials()] == ["COMPLETE"] * 3 + ["RUNNING"]
    assert go_on(sweep, "s") == (0, ["3", "4", "5"])
    assert trials() == undisturbed
    assert go_on(sweep, "s") == (0, [])
    assert go_on(sweep, "s", "hydra.sweeper.n_trials=7") == (0, ["6"])
    with pytest.raises(UserError, match="are compared under one config"):
        go_on(sweep, "s", "trainer.max_epochs=3")


def test_a_trial_that_fails_or_has_no_number_is_marked_and_the_study_goes_on(sweep):
    def work(folder: Path) -> int:
        if folder.name == "2":
            write_json(folder / "results.json", {"status": "complete", "val/acc": float("nan")})
            return 0
        if folder.name == "3":
            write_json(folder / "results.json", {"status": "failed", "reason": "injected"})
            return 1
        return complete(folder)

    assert search(sweep, work=work) == (1, [*"012345"])
    states = [state for state, _, _ in trials()]
    assert states == ["COMPLETE", "COMPLETE", "FAIL", "FAIL", "COMPLETE", "COMPLETE"]


def test_a_trial_whose_results_are_damaged_has_failed_and_the_study_goes_on(sweep):
    def work(folder: Path) -> int:
        complete(folder)
        if folder.name == "1":
            (folder / "results.json").write_text("{")
        return 0

    assert search(sweep, n=3, work=work) == (1, [*"012"])
    assert [state for state, _, _ in trials()] == ["COMPLETE", "FAIL", "COMPLETE"]


def test_a_trial_that_was_being_asked_when_its_sweep_was_killed_is_asked_again(sweep):
    """Its values lie in the study one by one, and the sampler's state is that of before."""
    words = ["optimizer.lr=interval(0.001,1)"]
    search(sweep, *words, "hydra.sweep.dir=undisturbed")
    search(sweep, *words, n=2)
    half: Any = {"optimizer.lr": FloatDistribution(0.001, 1)}
    storage = optuna.storages.RDBStorage("sqlite:///s/study.db")
    optuna.load_study(study_name="sweep", storage=storage).ask(half)
    assert search(sweep, *words) == (0, [*"3456"])
    found = trials()
    assert found.pop(2)[0] == "FAIL"
    assert found == trials("undisturbed")
    assert go_on(sweep, "s") == (0, [])


def test_a_metric_that_does_not_exist_ends_a_study_at_its_first_trial(sweep):
    with pytest.raises(UserError, match="optimized_metric=val/f1: results have val/acc, val/loss"):
        search(sweep, "optimized_metric=val/f1")
    assert [state for state, _, _ in trials()] == ["FAIL"]


@pytest.mark.parametrize(
    ("file", "content"),
    [("study.db", b"text, and no database" * 99), ("sampler.pkl", b""), ("sampler.pkl", b"\x80x")],
)
def test_a_damaged_study_is_named(sweep, file, content):
    search(sweep, n=1)
    Path("s", file).write_bytes(content)
    with pytest.raises(UserError, match=f"{file} is damaged"):
        search(sweep, n=2)


def test_losses_are_minimized_by_the_study_too(sweep):
    search(sweep, "optimized_metric=val/loss", n=1)
    storage = optuna.storages.RDBStorage("sqlite:///s/study.db")
    assert optuna.load_study(study_name="sweep", storage=storage).direction.name == "MINIMIZE"


def test_sampler_and_pruner_are_targets(sweep, capfd):
    sampler = [
        "hydra.sweeper.sampler._target_=optuna.samplers.GridSampler",
        "+hydra.sweeper.sampler.search_space={seed:[4,7],optimizer.lr:[0.1]}",
    ]
    pruner = [*THRESHOLD, "+hydra.sweeper.pruner.lower=0.5"]

    def work(folder: Path) -> int:
        config = OmegaConf.load(folder / ".hydra/config.yaml")
        row = {"epoch": 1, "val/acc": config.seed / 10}
        write_csv(folder / "metrics.csv", [row, row | {"epoch": 2}])
        return complete(folder)

    status, _ = search(sweep, *sampler, *pruner, n=5, work=work)
    found = {params["seed"]: (state, value) for state, params, value in trials()}
    assert (status, found) == (0, {4: ("PRUNED", 0.4), 7: ("COMPLETE", 0.7)})
    assert "pruned after epoch 1" in capfd.readouterr().out
    assert [job.status for job in Sweep(Path("s")).jobs].count("pruned") == 1
    assert go_on(sweep, "s", work=work) == (0, [])  # the grid is done


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("a=choice(1,x,true)", CategoricalDistribution([1, "x", True])),
        ("a=1,2.5", CategoricalDistribution([1, 2.5])),
        ("a=[1,2],[3]", CategoricalDistribution(["[1,2]", "[3]"])),
        ("a=range(1,8)", IntDistribution(1, 8)),
        ("a=range(1,8,step=2)", IntDistribution(1, 7, step=2)),
        ("a=tag(log,range(1,8))", IntDistribution(1, 8, log=True)),
        ("a=range(0.5,2,step=0.5)", FloatDistribution(0.5, 2, step=0.5)),
        ("a=interval(1,8)", FloatDistribution(1, 8)),
        ("a=tag(log,interval(0.01,1))", FloatDistribution(0.01, 1, log=True)),
        ("a=tag(int,interval(1,8))", IntDistribution(1, 8)),
        ("a=tag(int,log,interval(1,8))", IntDistribution(1, 8, log=True)),
    ],
)
@pytest.mark.filterwarnings("ignore:The distribution is specified by")  # 8 is not 1 + 2 n
def test_words_mean_what_they_mean_to_the_plugin(word, expected):
    [override] = OverridesParser.create().parse_overrides([word])
    found = distribution(override)
    assert found == expected
    assert [*map(type, getattr(found, "choices", ()))] == [
        *map(type, getattr(expected, "choices", ()))
    ]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optimizer.lr=interval(1,0)", "optimizer.lr=interval(1,0): "),
        ("optimizer.lr=tag(log,interval(0,1))", "optimizer.lr=tag(log,interval(0,1)): "),
        ("hydra/sweeper=optuna", "Nothing to search"),
        ("hydra.sweeper.n_trials=x", "n_trials"),
        ("optimizer.lr=tag(lgo,interval(0.1,1))", "the tags are log and int, not lgo"),
        ("optimized_metric=null", "optimized_metric=None is not of type str"),
        ("hydra.sweeper.pruner._target_=optuna.pruners.Nope", "Nope"),
        ("hydra.sweeper.n_trails=3", "Did you mean hydra.sweeper.n_trials?"),
        (
            "optimized_metric=test/acc hydra.sweeper.pruner._target_=optuna.pruners.MedianPruner",
            "a pruner needs one of each epoch",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused_and_leaves_nothing(sweep, word, message):
    own = [] if "hydra/sweeper" in word else ["hparams_search=optuna"]
    with pytest.raises(UserError, match=re.escape(message)):
        sweep("-m", *own, "hydra.sweep.dir=s", *word.split())
    assert not Path("s").exists()


def test_a_search_without_optuna_says_what_to_install(sweep, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r'Optuna is not installed: pip install -e "\.\[optuna\]"'):
        search(sweep)
    assert not Path("s").exists()


def test_a_value_on_the_command_line_takes_the_place_of_one_to_search(sweep):
    search(sweep, "optimizer.lr=0.07", n=2)
    assert [params.keys() for _, params, _ in trials()] == [{"seed"}] * 2
    assert OmegaConf.load("s/1/.hydra/config.yaml").optimizer.lr == 0.07


def test_a_study_is_of_one_command(sweep):
    search(sweep, n=1)
    for word in "model=cnn", "seed=range(0,8)":
        with pytest.raises(UserError, match="s holds a study of other words"):
            search(sweep, word)


def test_a_study_is_not_mixed_with_another_sweep(sweep):
    sweep("-m", "seed=0,1", "hydra.sweep.dir=s")
    with pytest.raises(UserError, match="s holds another sweep"):
        search(sweep)


@pytest.mark.slow
def test_a_job_that_falls_behind_is_ended(command, tmp_path):
    """It would never end by itself."""
    pruner = [*THRESHOLD, "+hydra.sweeper.pruner.lower=2"]
    words = [
        "trainer.max_steps=-1",
        "trainer.max_epochs=100000",
        "seed=range(0,9)",
        "trainer.devices=2",
    ]
    own = [
        "hparams_search=optuna",
        "hydra.sweeper.n_trials=1",
        *pruner,
        f"hydra.sweep.dir={tmp_path}/s",
    ]
    done = command("python", "train.py", *TINY, *words, *own)
    assert done.returncode == 0, done.stderr
    assert "pruned after epoch 1" in done.stdout
    assert [state for state, _, _ in trials(f"{tmp_path}/s")] == ["PRUNED"]
    assert outcome(tmp_path / "s/0")["status"] == "preempted"
    assert outcome(tmp_path / "s/0")["val/acc"] <= 1
    assert done.stderr == ""


# Several at once


def at_once(folder: Path, count: int, devices: list[Any], share: Share) -> list[dict[str, Any]]:
    """Runs a job for each of `devices`; their results."""
    for number, value in enumerate(devices):
        (folder / str(number) / ".hydra").mkdir(parents=True)
        where = "trainer.accelerator=auto", f"trainer.devices={value}"
        config = composed("experiment=quickstart", *where)
        OmegaConf.save(config, folder / str(number) / ".hydra/config.yaml")
    folders = iter([folder / str(number) for number in range(len(devices))])

    def work(job: Path) -> int:
        run(job, busy, share)
        return 0

    start_fork_server()
    assert run_at_once(folders, count, work) == 0
    return [outcome(folder / str(number)) for number in range(len(devices))]


def test_jobs_at_once_get_gpus_of_their_own_and_wait_where_there_are_too_few(tmp_path, monkeypatch):
    """Pretended ones: the ranks train on CPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,c")
    share = Share(4, tmp_path / "leases")
    found = at_once(tmp_path, 4, [2, 1, 2, 1, "[1]"], share)
    assert {results["status"] for results in found} == {"complete"}
    held = [{*results["CUDA_VISIBLE_DEVICES"].split(",")} for results in found]
    assert [len(gpus) for gpus in held] == [2, 1, 2, 1, 3]
    held[4] = {"b"}  # a list names some of all, so all are visible
    spans = [results["span"] for results in found]
    together = 0
    for (one, a), (other, b) in itertools.combinations(zip(held, spans, strict=True), 2):
        if a[0] < b[1] and b[0] < a[1]:
            together += 1
            assert not one & other
    assert together


def test_jobs_at_once_share_the_cores(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(parallel, "num_cores", lambda: 8)
    share = Share(2, tmp_path / "leases")
    with share(composed("trainer.devices=2").trainer, 2) as environment:
        assert environment == {"OMP_NUM_THREADS": "2"}
    [one, _] = at_once(tmp_path, 2, [1, 1], share)
    assert (one["OMP_NUM_THREADS"], one["threads"]) == ("4", 4)


def test_a_crash_leaks_no_lease(tmp_path):
    """A process that holds two of three GPUs is killed while another waits for two."""
    code = """
        import sys, time
        from pathlib import Path
        from project.parallel import Share
        with Share(1, Path(sys.argv[1])).leased(["0", "1", "2"], 2) as held:
            print(*held, flush=True)
            time.sleep(60)
    """
    words = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "0 1\n"
        leased = Share(1, tmp_path).leased
        with leased(["0", "1", "2"], 1) as held:
            assert held == ["2"]
        threading.Timer(0.5, process.kill).start()
        with leased(["0", "1", "2"], 2) as held:
            assert process.poll() is not None or process.wait(1) == -9
            assert held in (["0", "2"], ["0", "1"])


def test_who_waits_for_a_gpu_can_be_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "_asked", signal.SIGTERM)
    leased = Share(1, tmp_path).leased
    with leased(["0"], 1), pytest.raises(Preempted), leased(["0"], 1):
        pass


@pytest.mark.slow
def test_jobs_at_once_give_the_bits_of_jobs_in_turn(watched, command, tmp_path):
    words = ["seed=0,1,2", "trainer.devices=2,3", f"hydra.sweep.dir={tmp_path}/sweep"]
    at_once = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    done = command("python", "train.py", "-m", *TINY, *words, *at_once)
    assert (done.returncode, done.stderr) == (0, "")
    for number in range(6):
        serial = watched.folder / str(4 * (number // 2) + 1 + number % 2)
        assert differences(tmp_path / f"sweep/{number}", serial) == []
    assert "epoch 1" not in done.stdout  # of which job would it be?
    assert "epoch 1" in (tmp_path / "sweep/0/train.log").read_text()


# With ranks: failures, stops, going on


@pytest.fixture(scope="module")
def troubled(watch) -> Watched:
    """A sweep of equal jobs to which different things happen, all of them once."""
    fault = {"_target_": "faults.Fault", "rank": 1, "steps": "[10]", "once": True}
    words = [f"+callbacks.fault.{key}={value}" for key, value in fault.items()]
    how = "+callbacks.fault.how=nothing,exception,kill,poison,nothing,ask,nothing"
    return watch(*words, how, "trainer.log_every_n_steps=1")


def test_whatever_ends_a_job_the_others_run_until_the_sweep_is_stopped(troubled):
    folder = troubled.folder
    assert troubled.status == 143
    expected = [
        ("complete", None),
        ("failed", "rank 1 failed: ArithmeticError: injected"),
        ("failed", "rank 1 "),  # ended with status -9, or: died without a word
        ("failed", "the loss of step 11 (epoch 2) is not a finite"),
        ("complete", None),
        ("preempted", "stopped by SIGTERM at step 10, saved"),
    ]
    for number, (status, reason) in enumerate(expected):
        results = outcome(folder / str(number))
        assert results["status"] == status
        assert results.get("reason", "").startswith(reason or ""), results
    assert not (folder / "6/ranks").exists()
    last = troubled.errors.splitlines()[-1]
    said, _, command = last.partition("Go on with: python train.py ")
    assert said == "train.py: failed: 1, 2, 3. "
    [word] = shlex.split(command)
    assert word.startswith("resume='")
    assert word.endswith("/sweep'")
    statuses = ["complete", "failed", "failed", "failed", "complete", "preempted", "waiting"]
    assert [job.status for job in Sweep(folder).jobs] == statuses


@pytest.mark.slow
def test_resume_completes_the_sweep_in_the_bits_of_undisturbed_jobs(troubled, command, tmp_path):
    folder = shutil.copytree(troubled.folder, tmp_path / "sweep")
    before = (folder / "4/results.json").stat().st_mtime_ns
    done = command("python", "train.py", f"resume={folder}")
    assert done.returncode == 0, done.stderr
    assert "going on from step 10 of 12" in done.stdout
    for number in range(1, 7):
        assert differences(folder / "0", folder / str(number)) == []
    assert (folder / "4/results.json").stat().st_mtime_ns == before
    assert [job.status for job in Sweep(folder).jobs] == ["complete"] * 7


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 2])
def test_ctrl_c_stops_what_runs_within_ten_seconds_and_starts_no_other(start, tmp_path, at_once):
    folder = tmp_path / "sweep"
    words = ["seed=0,1,2", "trainer.max_steps=-1", "trainer.max_epochs=100000"]
    more = [
        "hydra/launcher=joblib",
        f"hydra.launcher.n_jobs={at_once}",
        f"hydra.sweep.dir={folder}",
    ]
    with start("python", "train.py", "-m", *TINY, *words, *more, apart=True) as process:
        until = time.monotonic() + 60
        while not all((folder / f"{job}/metrics.csv").exists() for job in range(at_once)):
            assert time.monotonic() < until
            time.sleep(0.05)
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        os.killpg(process.pid, signal.SIGINT)
        threading.Timer(0.5, os.killpg, (process.pid, signal.SIGINT)).start()
        output, errors = process.communicate(timeout=20)
    assert time.monotonic() - began < 10
    assert process.returncode == 130, errors
    for job in range(at_once):
        results = outcome(folder / str(job))
        assert results["status"] == "preempted"
        assert re.match(r"stopped by SIGINT at step \d+, saved", results["reason"])
    assert not (folder / f"{at_once}/ranks").exists()
    assert output.count("preempted") == 2 * at_once
    lines = errors.splitlines()
    assert lines[-1].startswith(
        "train.py: the sweep has stopped. Go on with: python train.py resume="
    )
    assert len(lines) == 1
