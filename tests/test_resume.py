"""Going on is as good as never having stopped."""

import contextlib
import multiprocessing
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.errors import ConfigCompositionException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from train import train

from conftest import REPOSITORY, TINY, history, outcome
from laws import asked_to_stop, differences, interrupted, launch

from project import signals
from project.checkpoint import begun
from project.errors import Preempted, RankFailed, UserError
from project.failure import check_progress
from project.folder import in_use
from project.heartbeat import beat, beating
from project.launch import run
from project.resume import resumed, take_up
from project.workers import worker_options

GROUPS = REPOSITORY / "conf"
SHORT = [word for word in TINY if "max_steps" not in word and "_target_" not in word]
SHORT += ["model._target_=toy.Rich", "logger=none", "data.augment.cutout=4"]

# 9 optimizer steps an epoch
CASES: dict[str, Any] = {
    "plain": {"steps": [1, 5, 9, 13, 18, 26, 27]},
    "workers": {"words": ["data.num_workers=2"], "steps": [5, 9]},
    "accumulation": {
        "words": ["trainer.accumulate_grad_batches=2", "optimizer=adam", "scheduler=cosine"],
        "steps": [5, 9, 14],
    },
    "validation inside": {"words": ["+trainer.val_check_interval=4"], "steps": [3, 4, 5, 9, 13]},
    "inside a validation": {
        "words": ["data.eval_batch_size=8", "callbacks=early_stopping"],
        "inside": True,
        "steps": [9, 18, 27],
    },
    "inside a validation inside an epoch": {
        "words": ["data.eval_batch_size=8", "+trainer.val_check_interval=4"],
        "inside": True,
        "steps": [4, 8, 22],
    },
    "inside the last validation by max_steps": {
        "words": ["data.eval_batch_size=8", "trainer.max_steps=18"],
        "inside": True,
        "steps": [18],
    },
    "inside a validation after accumulation": {
        "words": ["data.eval_batch_size=8", "trainer.accumulate_grad_batches=2", "optimizer=adam"],
        "inside": True,
        "steps": [9],
    },
    "validation each step": {"words": ["+trainer.val_check_interval=1"], "steps": [4]},
    "validation every other epoch": {
        "words": ["+trainer.check_val_every_n_epoch=2"],
        "steps": [5, 18],
    },
    "no validation": {"words": ["data.val_fraction=0"], "steps": [5, 10]},
    "cut by max_steps": {"words": ["trainer.max_steps=13"], "steps": [5, 9, 12, 13]},
    "max_steps at an epoch's end": {"words": ["trainer.max_steps=18"], "steps": [9, 12, 18]},
    "short epochs": {"words": ["trainer.limit_train_batches=4"], "steps": [3, 4, 6]},
    "early stop": {
        "words": [
            "callbacks=early_stopping",
            "callbacks.early_stopping.patience=1",
            "+callbacks.early_stopping.min_delta=1",
            "trainer.max_epochs=5",
        ],
        "steps": [5, 9, 12, 18],
    },
    "top 3": {"words": ["checkpoint.top_k=3"], "steps": [5, 9, 20]},
    "the default network": {
        "base": ["experiment=quickstart", "model=speednet", "logger=none", "data.batch_size=40"],
        "words": ["data.source.num_train=300", "data.source.num_test=40", "trainer.max_epochs=1"],
        "steps": [3],
    },
}


FEW = {
    "plain": [5, 9],
    "inside a validation": [18],
    "cut by max_steps": [13],
}


def stopped_and_taken_up(folder: Path, num_ranks: int, few: dict[str, list[int]] | None) -> Any:
    """What differs from the undisturbed run, by case and step."""
    default = {"base": None, "words": [], "inside": False}
    cases = {name: {**default, **case} for name, case in CASES.items()}
    if few:
        cases = {name: {**cases[name], "steps": steps} for name, steps in few.items()}
    words = [*SHORT, "trainer.max_epochs=3"]
    inplace = num_ranks == 1  # which is quicker
    found = launch(folder, interrupted, num_ranks, inplace=inplace, cases=cases, words=words)
    return {name: what for name, what in found.items() if " at " in name}


# The laws


def test_stopped_and_taken_up_a_run_ends_in_the_same_bits(tmp_path, working_folder, monkeypatch):
    monkeypatch.chdir(working_folder)
    found = stopped_and_taken_up(tmp_path / "run", 1, FEW)
    assert found == {name: [] for name in found}
    assert len(found) == sum(map(len, FEW.values()))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_so_it_does_stopped_anywhere_on_any_number_of_ranks(
    tmp_path, working_folder, monkeypatch, num_ranks
):
    monkeypatch.chdir(working_folder)
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}/src:{REPOSITORY}/tests:{REPOSITORY}")
    found = stopped_and_taken_up(tmp_path / "run", num_ranks, None)
    assert found == {name: [] for name in found}
    assert len(found) == sum(len(case["steps"]) for case in CASES.values())


def test_ranks_killed_and_started_afresh_end_in_the_same_bits(command, two_ranks, tmp_path):
    fault = {"_target_": "faults.Fault", "rank": 1, "steps": "[5,11]", "how": "kill", "once": True}
    more = [f"+callbacks.fault.{key}={value}" for key, value in fault.items()]
    more += ["launch.max_restarts=2", "checkpoint.every_n_steps=4", f"hydra.run.dir={tmp_path}/run"]
    done = command("python", "train.py", *TINY, *more)
    assert done.returncode == 0, done.stderr
    assert [line.split(". ")[-1] for line in done.stderr.splitlines()] == [
        "Restart 1 of 2.",
        "Restart 2 of 2.",
    ]
    assert "going on from step 4 of 12" in done.stdout
    assert "going on from step 9 of 12" in done.stdout
    assert differences(two_ranks, tmp_path / "run") == []
    assert {path.name for path in (tmp_path / "run/ranks").glob("*-*.log")} == {
        "1-0.log",
        "1-1.log",
        "1-2.log",
    }


@pytest.fixture(scope="module")
def stopped(command, tmp_path_factory):
    """A run on two ranks of which one was asked to stop: its folder, and what was printed."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    return folder, command(
        "python", "train.py", *TINY, *asked_to_stop(5), f"hydra.run.dir={folder}"
    )


def test_one_rank_that_is_asked_to_stop_stops_and_saves_all(stopped):
    folder, done = stopped
    assert done.returncode == 143
    where = "stopped by SIGTERM at step 5, saved"
    assert done.stderr.startswith(f"train.py: {where}. Go on with: python train.py resume=")
    assert outcome(folder) == {"status": "preempted", "reason": where, "signal": 15}
    assert not {"0.pid", "1.pid"} & {path.name for path in (folder / "ranks").iterdir()}


def test_another_number_of_devices_goes_on_with_the_same_images(
    stopped, two_ranks, go_on, tmp_path
):
    folder = shutil.copytree(stopped[0], tmp_path / "run")
    go_on(folder, "~callbacks.asks", "trainer.devices=1", "launch.inplace=true")
    assert "going on from step 5 of 12" in (folder / "train.log").read_text()
    for one, other in zip(history(folder), history(two_ranks), strict=True):
        for name in one:
            expected = float(other[name] or "nan")
            assert float(one[name] or "nan") == pytest.approx(expected, rel=1e-5, nan_ok=True)


@pytest.mark.slow
def test_resume_on_the_command_line_ends_in_the_same_bits(command, stopped, two_ranks, tmp_path):
    folder = shutil.copytree(stopped[0], tmp_path / "a=b ü")
    done = command("python", "train.py", f"resume='{folder}'", "~callbacks.asks")
    assert done.returncode == 0, done.stderr
    assert differences(two_ranks, folder) == []
    done = command("python", "train.py", f"resume={folder}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("already complete in")


@pytest.mark.slow
def test_an_outside_torchrun_restarts_in_the_same_folder(command, two_ranks, tmp_path):
    fault = {"_target_": "faults.Fault", "rank": 1, "steps": "[5,11]", "how": "kill", "once": True}
    more = [f"+callbacks.fault.{key}={value}" for key, value in fault.items()]
    more += ["checkpoint.every_n_steps=4", f"hydra.run.dir={tmp_path}/run"]
    launcher = ["torchrun", "--nproc-per-node=2", "--max-restarts=3", "train.py"]
    done = command(*launcher, *TINY, *more, timeout=200)
    assert done.returncode == 0, done.stderr
    assert differences(two_ranks, tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exception", "mistake"])
def test_an_outside_torchrun_does_not_repeat_a_failure_for_ever(command, tmp_path, how):
    fault = {"_target_": "faults.Fault", "rank": 1, "steps": "[5]", "how": how}
    more = [f"+callbacks.fault.{key}={value}" for key, value in fault.items()]
    launcher = ["torchrun", "--nproc-per-node=2", "--max-restarts=4", "train.py"]
    done = command(*launcher, *TINY, *more, f"hydra.run.dir={tmp_path}/run", timeout=200)
    assert done.returncode == 1
    struck = len(list((tmp_path / "run/ranks").glob("1-*.log")))
    assert struck == (1 if how == "mistake" else 2), done.stderr


# A run is its folder


@pytest.fixture
def go_on(working_folder, monkeypatch):
    """`resume=folder words...` on one rank in this process: the results, None if complete."""
    monkeypatch.chdir(working_folder)

    def go_on(folder: Path, *words: str) -> dict[str, Any] | None:
        undo = take_up(folder, [*words], GROUPS)
        if undo is None:
            return None
        try:
            return run(folder, train)
        except UserError:
            undo()
            raise

    return go_on


@pytest.fixture(scope="module")
def original(run_here, tmp_path_factory):
    """Runs of 18 steps, each made once: undisturbed, or asked to stop after the fifth step."""
    made: dict[tuple[str, ...], Path] = {}

    def original(*words: str) -> Path:
        if words not in made:
            folder = made[words] = tmp_path_factory.mktemp("original") / "run"
            with contextlib.suppress(Preempted):
                run_here(folder, *SHORT, "trainer.max_epochs=2", "test=false", *words)
        return made[words]

    return original


@pytest.fixture
def half(original, tmp_path):
    """A copy of one that was asked to stop."""

    def half(*words: str, name: str = "half") -> Path:
        folder = shutil.copytree(original(*words, *asked_to_stop(5)), tmp_path / name)
        assert outcome(folder)["status"] == "preempted"
        return folder

    return half


@pytest.fixture
def whole(original, tmp_path) -> Path:
    """A copy of the undisturbed one."""
    return shutil.copytree(original(), tmp_path / "whole")


def content(folder: Path) -> dict[Path, tuple[bytes, float]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime) for path in files}


def test_a_complete_run_is_left_alone_to_the_byte(whole, go_on):
    before = content(whole)
    for words in [], ["trainer.max_epochs=2"], ["trainer.max_epochs=1"], ["trainer.max_steps=18"]:
        assert go_on(whole, *words) is None
    assert content(whole) == before
    assert run(whole, train) == outcome(whole)


def test_more_epochs_are_as_if_they_had_been_asked_for_at_once(job, go_on):
    """Without a schedule, which would have been another."""
    words = [*SHORT, "scheduler=constant", "test=false"]
    longer = job(*words, "trainer.max_epochs=3", name="longer")
    cut = job(*words, "trainer.max_epochs=3", "trainer.max_steps=13", name="cut")
    short = job(*words, "trainer.max_epochs=1", name="short")
    go_on(short, "trainer.max_epochs=3")
    go_on(cut, "trainer.max_steps=-1")
    assert differences(longer, short) == []
    assert differences(longer, cut) == []


def test_a_test_can_be_asked_for_later(whole, go_on):
    results = go_on(whole, "test=true")
    assert results["test/count"] == 101
    assert results["epochs"] == 2


def test_a_schedule_for_more_steps_stands_where_it_would_have_stood(whole, go_on, job):
    longer = job(*SHORT, "trainer.max_epochs=3", "test=false", "optimizer.lr=0.05", name="longer")
    go_on(whole, "trainer.max_epochs=3", "optimizer.lr=0.05")
    for key in "lr_schedulers", "optimizer_states":
        one, other = (
            torch.load(folder / "checkpoints/last.ckpt", weights_only=True)[key][0]
            for folder in (longer, whole)
        )
        if key == "optimizer_states":
            one, other = one["param_groups"], other["param_groups"]
        assert one == other


def test_more_accumulated_batches_go_on_at_the_same_image(half, whole, go_on):
    folder = half()
    go_on(folder, "trainer.accumulate_grad_batches=2", "~callbacks.asks")
    images = [torch.load(f / "checkpoints/last.ckpt", weights_only=True) for f in (folder, whole)]
    assert images[0]["global_step"] == images[1]["global_step"] == 18
    for one, other in zip(history(folder), history(whole), strict=True):
        assert float(one["train/loss"]) == pytest.approx(float(other["train/loss"]), rel=0.2)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "data.batch_size=20",
            "data.batch_size was 40 .* here it is 20: its steps would",
        ),
        (
            "optimizer._target_=torch.optim.RMSprop ~optimizer.nesterov",
            "used torch.optim.SGD, whose state",
        ),
        ("optimizer.weight_decay=0", "can change, but not from or to 0"),
        ("trainer.devices=99", "choose 1 to"),
        ("seed=-1", "must lie in"),
        ("launch.max_restarts=-1", "must be at least 0"),
        ("checkpoint.top_k=0", "must be at least 1"),
        ("model=resnet18", "resume keeps the choices of the run"),
        ("+experiment=tutorial", "resume keeps the choices"),
        ("data.source.num_train=100", "data.source.num_train was 400"),
        ("trainer.limit_train_batches=8", "trainer.limit_train_batches was None"),
        ("seed=7", "seed was 0 .* here it is 7"),
        ("trainer.max_steps=4", "has trained 5 steps already, of 4"),
        ("trainer.max_epochs=abc", "trainer.max_epochs='abc' is not of type"),
        ("trainer.max_steps=[1]", "trainer.max_steps=.* is not of type"),
        ("~seed", "seed=None is not of type int"),
        ("hydra.run.dir=x", "is for new runs"),
        ("seed=1,2", "is for new runs"),
    ],
)
def test_values_that_cannot_be_are_refused_and_nothing_is_lost(half, go_on, word, message):
    folder = half()
    before = {p: c for p, (c, _) in content(folder).items() if "rank" not in str(p)}
    with pytest.raises(UserError, match=message):
        go_on(folder, *word.split())
    after = {p: c for p, (c, _) in content(folder).items() if "rank" not in str(p)}
    log = folder / "train.log"  # tells of the attempt
    assert before | {log: b""} == after | {log: b""}


@pytest.mark.parametrize(
    ("name", "content"),
    [(".hydra/config.yaml", text) for text in (b"", b"seed: 0\nlaunch:\n", b"- 1", b"\xff\xfe\x00")]
    + [("results.json", text) for text in (b"", b"[1]", b"\xff")],
)
def test_a_damaged_file_of_a_run_is_named(half, go_on, name, content):
    folder = half()
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} is damaged"):
        go_on(folder)


def test_an_unknown_value_is_refused(half, go_on):
    with pytest.raises(ConfigCompositionException, match="Could not override"):
        go_on(half(), "trainer.max_epoch=3")


def test_between_epochs_the_seed_may_change(whole, go_on):
    assert go_on(whole, "seed=7", "trainer.max_epochs=3")["steps"] == 27


def test_what_is_no_run_is_refused(tmp_path):
    assert resumed(["seed=1"]) is None
    for words, message in [
        (["resume="], "is not there"),
        (["+resume=nowhere"], "is not there"),
        (["resume=nowhere"], "is not there"),
        ([f"resume={tmp_path}"], "holds no run"),
        ([f"resume={tmp_path}", "--cfg", "job"], "takes values only, not --cfg"),
    ]:
        with pytest.raises(UserError, match=message):
            resumed(words)


def test_a_run_that_is_going_on_is_not_taken_up(tmp_path):
    with in_use(tmp_path), pytest.raises(UserError, match="is in use"), in_use(tmp_path):
        pass
    with in_use(tmp_path):
        pass


@pytest.mark.parametrize("name", ["last", "best"])
def test_a_new_folder_goes_on_from_a_checkpoint_with_its_best(half, original, job, name):
    """Here both lie inside an epoch."""
    inside = "+trainer.val_check_interval=3"
    path = f"ckpt_path={half(inside)}/checkpoints/{name}.ckpt"
    folder = job(*SHORT, "trainer.max_epochs=2", "test=false", inside, path)
    assert differences(original(inside), folder) == []


def test_the_best_so_far_comes_along(whole, job):
    folder = job(
        *SHORT,
        "trainer.max_epochs=3",
        "optimizer.lr=0",
        "test=false",
        f"ckpt_path={whole}/checkpoints/last.ckpt",
    )
    assert outcome(folder)["val/acc"] == max(float(row["val/acc"]) for row in history(folder))
    assert (folder / "checkpoints/best.ckpt").exists()


# Files


def test_tensorboard_goes_on_without_a_step_back(half, go_on):
    folder = half("logger=tensorboard", "trainer.log_every_n_steps=2")
    go_on(folder, "~callbacks.asks")
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("step/loss")] == list(range(2, 19, 2))


def test_steps_that_come_anew_hide_those_of_before(job, go_on):
    fault = ["+callbacks.fault._target_=faults.Fault", "+callbacks.fault.rank=0"]
    fault += ["+callbacks.fault.steps=[8]", "+callbacks.fault.how=exception"]
    words = ["trainer.max_epochs=2", "checkpoint.every_n_steps=3", "trainer.log_every_n_steps=1"]
    with pytest.raises(RankFailed, match="injected"):
        job(*SHORT, *words, "logger=[tensorboard,csv]", "test=false", *fault)
    folder = Path(job.folder, "run")
    go_on(folder, "~callbacks.fault")
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("step/loss")] == list(range(1, 19))
    assert len(list(folder.glob("csv/version_*/metrics.csv"))) == 2


def test_a_damaged_checkpoint_makes_way_for_the_one_before(half, whole, go_on, caplog, monkeypatch):
    folder = half("checkpoint.every_n_steps=2")
    last = folder / "checkpoints/last.ckpt"
    for damage in "truncated", "flipped", "empty":
        data = bytearray(last.read_bytes())
        if damage == "flipped":
            data[len(data) // 2] ^= 255
        copy = shutil.copytree(folder, folder.with_name(damage))
        kept = {"truncated": data[:-100], "flipped": data, "empty": b""}[damage]
        (copy / "checkpoints/last.ckpt").write_bytes(kept)
        assert begun(copy) == str(copy / "checkpoints/previous.ckpt")
        assert "last.ckpt is damaged" in caplog.text
    seen = []
    monkeypatch.setattr(os, "fsync", lambda number: seen.append(begun(copy)))
    go_on(copy, "~callbacks.asks")
    assert seen[-1] == str(copy / "checkpoints/last.ckpt")  # and at each moment one was whole
    assert differences(whole, copy) == []
    for name in "last.ckpt", "previous.ckpt":
        (folder / "checkpoints" / name).write_bytes(b"x")
    with pytest.raises(UserError, match="no undamaged checkpoint"):
        begun(folder)


def test_so_it_does_in_a_complete_run_that_is_to_go_on(whole, go_on, job, caplog):
    (whole / "checkpoints/last.ckpt").write_bytes(b"")
    (whole / "checkpoints/best.ckpt").write_bytes(b"")
    assert go_on(whole, "trainer.max_epochs=3")["steps"] == 27
    assert "last.ckpt is damaged" in caplog.text
    for path in (whole / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"no checkpoints/last\.ckpt to go on from"):
        go_on(whole, "trainer.max_epochs=4")


class Trap:
    """Runs code when unpickled by a careless reader."""

    def __reduce__(self):
        return os._exit, (1,)


def test_a_checkpoint_that_would_run_code_is_refused_everywhere(half, whole, go_on, job):
    folder, other = half(), half(name="other")
    path = folder / "checkpoints/last.ckpt"
    torch.save(torch.load(path, weights_only=True) | {"trap": Trap()}, path)
    with pytest.raises(UserError, match="could run code"):
        go_on(folder)
    shutil.copy(path, whole / "checkpoints/last.ckpt")
    with pytest.raises(UserError, match="could run code"):
        go_on(whole, "trainer.max_epochs=3")
    shutil.copy(path, other / "checkpoints/best.ckpt")
    go_on(other, "~callbacks.asks")  # the best is found anew
    for number, words in enumerate(
        [[f"ckpt_path={path}"], [f"weights={path}"], [f"ckpt_path={path}", "fit=false"]]
    ):
        with pytest.raises(UserError, match="could run code"):
            job(*SHORT, *words, name=f"trap{number}")


def test_top_k_checkpoints_are_kept(job):
    folder = job(*SHORT, "trainer.max_epochs=4", "checkpoint.top_k=2", "test=false")
    assert len(list(folder.glob("checkpoints/acc-*.ckpt"))) == 2


def test_every_minutes_saves_inside_an_epoch(job, monkeypatch):
    words = ["trainer.max_epochs=1", "checkpoint.every_minutes=0", "test=false"]
    monkeypatch.setattr("project.agreement.SECONDS_BETWEEN", 0.0)
    folder = job(*SHORT, *words)
    previous = torch.load(folder / "checkpoints/previous.ckpt", weights_only=True)
    assert previous["global_step"] == 8


# Writing fails loudly


def test_a_full_disk_ends_in_a_line_and_the_earlier_checkpoint_is_whole(half, go_on):
    """As `ulimit -f` makes it."""
    folder = half()
    before, limits = begun(folder), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(UserError) as error:
            go_on(folder, "~callbacks.asks")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    path = folder / "checkpoints/last.ckpt"
    assert str(error.value) == f"{path} cannot be written: File too large."
    assert begun(folder) == before
    assert torch.load(path, weights_only=True)["global_step"] == 5
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["last.ckpt"]


def test_secrets_stay_in_the_environment(job, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("TOKEN", "s3cret-token")
    monkeypatch.setenv("FOLDER", f"{tmp_path}/s3cret-root")
    words = ["+token=${oc.env:TOKEN}", "+logger.tensorboard.comment=${oc.env:TOKEN}"]
    words += ["data.root=${oc.env:FOLDER}"]
    job(*TINY, "logger=[tensorboard,csv]", "trainer.max_steps=2", "test=false", *words)
    wrong = {
        "optimizer.lr=${oc.env:TOKEN}": r"optimizer.lr='\${oc.env:TOKEN}' is not",
        "weights=/tmp/${oc.env:TOKEN}": "there is no such file",
        "trainer.accelerator=${oc.env:TOKEN}": "choose auto, cpu or gpu",
    }
    for number, (word, message) in enumerate(wrong.items()):
        with pytest.raises(UserError, match=message):
            job(*TINY, word, name=f"wrong{number}")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and "s3cret" not in str(path)]
    assert len(files) > 20
    assert [path for path in files if b"s3cret" in path.read_bytes()] == []
    assert "s3cret" not in capfd.readouterr().out


# Signals


def ask(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_is_granted_at_once_or_by_training(number, monkeypatch):
    before = signal.getsignal(number)
    with pytest.raises(Preempted, match=f"stopped by {number.name}"), signals.handled():
        ask(number)
    with signals.handled():
        signals.defer(True)
        ask(number)
        ask(signal.SIGTERM)  # twice is once
        assert signals.requested() == number
        signals.end()
        ask(number)
    monkeypatch.setattr(signals, "GRACE", 0.05)
    with signals.handled():
        signals.defer(True)
        ask(number)
        with pytest.raises(Preempted, match=number.name):
            signal.pause()  # where training takes too long to come to a step
    assert signal.getsignal(number) == before


def test_a_request_during_an_import_is_granted_at_its_end(monkeypatch):
    monkeypatch.setattr(signals, "_asked", 0)
    before, done = signal.getsignal(signal.SIGTERM), []

    def imports() -> None:
        with signals.held():
            ask(signal.SIGTERM)
            done.append("imported")

    with pytest.raises(Preempted, match="SIGTERM"):
        imports()
    assert done == ["imported"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_request_before_the_ranks_begin_leaves_word(start, tmp_path):
    process = start("python", "train.py", *TINY, f"hydra.run.dir={tmp_path}/run")
    assert process.stdout.readline().startswith("run folder")  # imports of torch are next
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 143, output + errors
    assert "stopped by SIGTERM. Go on with: python train.py resume=" in errors
    assert outcome(tmp_path / "run")["status"] == "preempted"


def test_a_loader_worker_leaves_the_answer_to_its_rank(monkeypatch):
    """It gets the signal too, if it is sent to all processes of a group."""

    def worker(queue) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as torch does, in effect
        worker_options(1, 1, 0)["worker_init_fn"](0)
        ask(signal.SIGINT)
        ask(signal.SIGTERM)
        queue.put("alive")
        signal.pause()

    monkeypatch.setattr(signals, "GRACE", 0.1)
    fork = multiprocessing.get_context("fork")
    with signals.handled():
        queue = fork.SimpleQueue()
        process = fork.Process(target=worker, args=(queue,))
        process.start()
        assert queue.get() == "alive"
        process.join(10)
    assert process.exitcode == -signal.SIGALRM


# Restarts


def test_two_failures_at_the_same_step_are_enough(tmp_path):
    (tmp_path / "ranks").mkdir()
    error = RankFailed("rank 0 failed", "Traceback ...")
    with beating(tmp_path / "ranks/0.beat"):
        for number in 5, 7:
            beat(number)
            check_progress(tmp_path, error)
    with pytest.raises(RankFailed, match="rank 0 failed; so did the attempt before"):
        check_progress(tmp_path, error)
    check_progress(tmp_path, RankFailed("rank 0 died without a word"))  # kills may come anywhere
    with pytest.raises(UserError, match="mistake"):
        check_progress(tmp_path, UserError("mistake"))
