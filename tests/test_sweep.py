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
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from omegaconf import OmegaConf
from train import main

from conftest import REPOSITORY, TINY, outcome
from laws import composed, differences
from project.cli import explained
from project.errors import UserError
from project.files import write_json
from project.resume import resumed, take_up_sweep
from project.sweep import Sweep
from project.sweeper import register

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
    monkeypatch.setattr(inspect.unwrap(main), "__module__", "__main__")  # as when it is run

    def sweep(*words: str, work: Callable[[Path], int] | None = None) -> tuple[Any, list[str]]:
        ran = []

        def job(folder: Path) -> int:
            ran.append(folder.name)
            return (work or complete)(folder)

        register(job)
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
    assert "no complete job has val/f1 (optimized_metric)" in capfd.readouterr().out


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


def test_a_damaged_sweep_is_named(tmp_path):
    (tmp_path / "multirun.yaml").write_text("hydra: 3")
    with pytest.raises(UserError, match=r"multirun.yaml is damaged"):
        take_up_sweep(tmp_path, [], REPOSITORY / "conf")
    with pytest.raises(UserError, match="holds no sweep"):
        Sweep(tmp_path / "other")


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
@pytest.mark.parametrize("devices", [1, 2])
def test_ctrl_c_stops_the_job_within_ten_seconds_and_starts_no_other(start, tmp_path, devices):
    folder = tmp_path / "sweep"
    words = ["seed=0,1", "trainer.max_steps=-1", "trainer.max_epochs=100000"]
    more = [f"trainer.devices={devices}", f"hydra.sweep.dir={folder}"]
    with start("python", "train.py", "-m", *TINY, *words, *more, apart=True) as process:
        assert any("epoch 2" in line for line in process.stdout)
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        os.killpg(process.pid, signal.SIGINT)
        threading.Timer(0.5, os.killpg, (process.pid, signal.SIGINT)).start()
        output, errors = process.communicate(timeout=20)
    assert time.monotonic() - began < 10
    assert process.returncode == 130, errors
    results = outcome(folder / "0")
    assert results["status"] == "preempted"
    assert re.match(r"stopped by SIGINT at step \d+, saved", results["reason"])
    assert not (folder / "1/ranks").exists()
    assert "preempted" in output
    lines = errors.splitlines()
    assert lines[-1].startswith(
        "train.py: the sweep has stopped. Go on with: python train.py resume="
    )
    assert len(lines) == 2
